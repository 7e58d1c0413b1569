// What the tests of the drop-in contract share: where a promise has to hold, and how close is equal.
#pragma once

#include <array>
#include <functional>
#include <memory>
#include <vector>

#include "support/catch.h"
#include "support/optimizer_suite.h"

namespace contract {

using namespace training;
using torch::optim::AdamW;
using torch::optim::AdamWOptions;
using torch::optim::SGD;
using torch::optim::SGDOptions;
using zero::Communicator;
using zero::Options;
using zero::Stage;

inline void on_threads(const std::vector<int>& worlds, const std::function<void(const Communicator&)>& check) {
  zero::WaitPolicy policy;
  policy.timeout = std::chrono::seconds(30);
  for (int n : worlds) {
    INFO(n << " ranks");
    REQUIRE_NOTHROW(zero::run_ranks(n, policy, check));
  }
}

/// On every stage and world size that the promise is about.
inline void everywhere(const std::function<void(const Communicator&, Options)>& check) {
  for (int stage : suite::stages()) {
    INFO("stage " << stage);
    on_threads({1, 2, 3}, [&](const Communicator& comm) { check(comm, suite::options_for(comm, stage)); });
  }
}

inline void expect_close(const Params& got, const Params& expected, const char* what, double bar = 1e-12) {
  const double d = distance(got, expected);
  expect(d < bar, what, ": differs from torch::optim by ", d);
}

inline std::unique_ptr<torch::optim::Optimizer> adamw(Params p) {
  return std::make_unique<AdamW>(std::move(p), AdamWOptions(0.01).weight_decay(0.1));
}
inline std::unique_ptr<torch::optim::Optimizer> momentum(Params p) {
  return std::make_unique<SGD>(std::move(p), SGDOptions(0.05).momentum(0.9).weight_decay(0.1));
}

/// One model trained by torch::optim on the mean of the ranks' losses, and one by ZeroOptimizer on this rank's.
struct Twins {
  Model plain_model, model;
  std::unique_ptr<torch::optim::Optimizer> plain = adamw(plain_model.params);
  zero::ZeroOptimizer opt;

  explicit Twins(Options options) : opt(zero::wrap(adamw(model.params), options.names(Model::names()))) {}
  std::array<Model*, 2> both() { return {&plain_model, &model}; }
  void step(int s) {
    const auto& comm = opt.comm();
    plain->zero_grad(), opt.zero_grad();
    for (int r = 0; r < comm.size(); ++r) (plain_model.loss(batch(s, r)) / comm.size()).backward();
    model.loss(batch(s, comm.rank())).backward();
    plain->step(), opt.step();
  }
  void expect_alike(const char* what) {
    expect_close(model.params, plain_model.params, what);
    expect_equal_on_ranks(opt.comm(), model.params);
  }
};

}  // namespace contract
