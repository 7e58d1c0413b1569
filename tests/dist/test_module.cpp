// LibTorch's own modules, unchanged: recurrent layers with their private lists of weights, batch norm with buffers, a tied weight.
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/rnn.h>

#include "support/catch.h"
#include "support/optimizer_suite.h"

using namespace training;
using zero::Communicator;

namespace {

struct Net : torch::nn::Module {
  torch::nn::Embedding embedding{torch::nn::EmbeddingOptions(11, 3)};
  torch::nn::LSTM lstm{torch::nn::LSTMOptions(3, 3).num_layers(2).bidirectional(true).batch_first(true)};
  torch::nn::GRU gru{torch::nn::GRUOptions(6, 3).batch_first(true)};
  torch::nn::BatchNorm1d norm{torch::nn::BatchNorm1dOptions(3)};
  torch::nn::Linear head{torch::nn::LinearOptions(3, 11)};
  explicit Net(double seed) {
    register_module("embedding", embedding);
    register_module("lstm", lstm);
    register_module("gru", gru);
    register_module("norm", norm);
    register_module("head", head);
    to(torch::kDouble);
    // Tied: one tensor, two uses. The module's registry keeps the weight that was replaced: a parameter that never has a gradient.
    head->weight = embedding->weight;
    const at::NoGradGuard no_grad;
    for (auto& p : unique_parameters()) p.copy_(values(p.sizes(), seed += 1) * 0.5);
    norm->running_mean.fill_(seed);
  }
  Params unique_parameters() {
    Params out;
    for (auto& p : parameters())
      if (std::none_of(out.begin(), out.end(), [&](const at::Tensor& q) { return q.is_same(p); })) out.push_back(p);
    return out;
  }
  at::Tensor loss(int step, int rank) {
    const auto tokens = (at::arange(20) * (step + 3) + 7 * rank).remainder(11).reshape({5, 4});
    auto x = std::get<0>(lstm->forward(embedding->forward(tokens)));
    x = std::get<0>(gru->forward(x)).select(1, 3);
    return at::cross_entropy_loss(head->forward(norm->forward(x)), tokens.select(1, 0)) * (1 + 0.5 * rank);
  }
};

std::unique_ptr<torch::optim::Optimizer> adam(Params p) {
  return std::make_unique<torch::optim::Adam>(std::move(p), torch::optim::AdamOptions(0.02).eps(1e-3));
}

}  // namespace

TEST_CASE("B60 B15 B16 recurrent layers, batch norm and a tied weight train as with torch::optim") {
  for (int stage : suite::stages()) {
    for (int n : {1, 2, 3}) {
      INFO("stage " << stage << ", " << n << " ranks");
      REQUIRE_NOTHROW(zero::run_ranks(n, [&](const Communicator& comm) {
        Net plain_net(1), net(1);
        auto plain = adam(plain_net.unique_parameters());
        auto opt = zero::wrap(adam(net.unique_parameters()), suite::options_for(comm, stage).module(net));
        for (int s = 0; s < 5; ++s) {
          plain->zero_grad(), opt.zero_grad();
          double sum = 0;
          for (int r = 0; r < n; ++r) {
            const auto l = plain_net.loss(s, r) / n;
            l.backward();
            sum += l.item<double>();
          }
          const auto l = net.loss(s, comm.rank());
          l.backward();
          auto mean = l.detach().clone();
          comm.all_reduce(mean, n);
          expect(std::abs(mean.item<double>() - sum) < 1e-12 * sum, "losses differ at step ", s);
          double square = 0;
          for (auto& p : plain_net.unique_parameters())
            if (p.grad().defined()) square += p.grad().square().sum().item<double>();
          expect(std::abs(opt.grad_norm() - std::sqrt(square)) < 1e-12 * std::sqrt(square),
                 "a tied weight counts once in the norm");
          plain->step(), opt.step();
        }
        const double d = distance(net.unique_parameters(), plain_net.unique_parameters());
        expect(d < 1e-11, "differs from torch::optim by ", d);
        expect(net.head->weight.is_same(net.embedding->weight), "the tie is broken");
      }));
    }
  }
}

TEST_CASE("B64 Options::module gives names to errors and everybody rank 0's buffers") {
  REQUIRE_NOTHROW(zero::run_ranks(3, [&](const Communicator& comm) {
    Net net(1 + comm.rank());
    const double mean = Net(1).norm->running_mean[0].item<double>();
    auto opt = zero::wrap(adam(net.unique_parameters()), zero::Options(comm).module(net));
    expect(net.norm->running_mean[0].item<double>() == mean, "buffers are not rank 0's");
    net.loss(0, comm.rank()).backward();
    opt.step();
    // From then on each rank keeps the statistics of its own batches.
    auto spread = net.norm->running_mean.detach().clone();
    comm.all_reduce(spread, 3);
    expect(!at::equal(spread, net.norm->running_mean), "batch statistics are local");
    net.norm->weight.mutable_grad() = at::ones({3}, at::kDouble).to_sparse();
    expect_error({"'norm.weight'"}, [&] { opt.step(); });
  }));
}
