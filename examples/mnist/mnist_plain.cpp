// Trains a small network on Fashion-MNIST as LibTorch programs usually do it, in one process: mnist.cpp without zero.
#include <torch/data.h>
#include <torch/nn/functional/loss.h>
#include <torch/nn/utils/clip_grad.h>
#include <torch/optim/schedulers/step_lr.h>
#include <torch/optim/sgd.h>

#include "model.h"
#include "run.h"

namespace data = torch::data;
namespace optim = torch::optim;

void train(int argc, char** argv) {
  const auto args = mnist::parse(argc, argv, /*ranks=*/1, /*rank=*/0);
  if (args.help) return;
  torch::manual_seed(args.seed);

  const auto normalize = data::transforms::Normalize<>(mnist::kMean, mnist::kDeviation);
  const auto images = data::datasets::MNIST(args.data).map(normalize).map(data::transforms::Stack<>());
  const auto test_images = data::datasets::MNIST(args.data, data::datasets::MNIST::Mode::kTest);
  data::samplers::DistributedRandomSampler sampler(args.limit, /*num_replicas=*/1, /*rank=*/0);

  auto net = std::make_shared<mnist::Net>();
  const auto sgd = optim::SGDOptions(args.lr).momentum(0.9);
  auto opt = optim::SGD(net->parameters(), sgd);
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
