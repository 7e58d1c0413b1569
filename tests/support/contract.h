// What the tests of the drop-in contract share: where a promise has to hold, and how close is equal.
#pragma once

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
  for (int stage : {0, 1}) {
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

}  // namespace contract
