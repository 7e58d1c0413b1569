// Trains a small network on Fashion-MNIST on several ranks, with gradients and optimizer state sharded:
//
//   mpirun -n 2 build/examples/mnist --stage 2
//
// All that differs from mnist_plain.cpp, the trainer for one process:
//
//   + #include <zero/zero.h>
//   - const auto args = mnist::parse(argc, argv, /*ranks=*/1, /*rank=*/0);
//   + const auto comm = zero::make_communicator();
//   + const auto args = mnist::parse(argc, argv, comm.size(), comm.rank());
//   - data::samplers::DistributedRandomSampler sampler(args.limit, /*num_replicas=*/1, /*rank=*/0);
//   + data::samplers::DistributedRandomSampler sampler(args.limit, comm.size(), comm.rank());
//   - auto opt = optim::SGD(net->parameters(), sgd);
//   + auto opt = zero::wrap<optim::SGD>(net->parameters(), sgd, zero::Options(comm).module(*net).stage(zero::Stage(args.stage)));
#include <torch/data.h>
#include <torch/nn/functional/loss.h>
#include <torch/nn/utils/clip_grad.h>
#include <torch/optim/schedulers/step_lr.h>
#include <torch/optim/sgd.h>
#include <zero/zero.h>

#include "model.h"
#include "run.h"

namespace data = torch::data;
namespace optim = torch::optim;

void train(int argc, char** argv) {
  const auto comm = zero::make_communicator();
  const auto args = mnist::parse(argc, argv, comm.size(), comm.rank());
  if (args.help) return;
  torch::manual_seed(args.seed);

  const auto normalize = data::transforms::Normalize<>(mnist::kMean, mnist::kDeviation);
  const auto images = data::datasets::MNIST(args.data).map(normalize).map(data::transforms::Stack<>());
  const auto test_images = data::datasets::MNIST(args.data, data::datasets::MNIST::Mode::kTest);
  data::samplers::DistributedRandomSampler sampler(args.limit, comm.size(), comm.rank());

  auto net = std::make_shared<mnist::Net>();
  const auto sgd = optim::SGDOptions(args.lr).momentum(0.9);
  auto opt = zero::wrap<optim::SGD>(net->parameters(), sgd, zero::Options(comm).module(*net).stage(zero::Stage(args.stage)));
  auto scheduler = optim::StepLR(opt, /*step_size=*/1, /*gamma=*/0.5);

  mnist::Progress progress(args);
  for (int epoch = 0; epoch < args.epochs; ++epoch) {
    sampler.set_epoch(args.seed + epoch);  // another order
    const auto loader = data::make_data_loader(images, sampler, args.local_batch);
    for (const auto& batch : *loader) {
      opt.zero_grad();
      const auto loss = torch::nll_loss(net->forward(batch.data), batch.target);
      loss.backward();
      torch::nn::utils::clip_grad_norm_(net->parameters(), 1.0);
      opt.step();
      progress.step(loss.item<double>());
    }
    scheduler.step();
    progress.epoch(mnist::accuracy(*net, test_images));
  }
}

int main(int argc, char** argv) { return mnist::run(train, argc, argv); }
