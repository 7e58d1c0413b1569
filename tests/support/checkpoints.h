// What the tests of checkpoints train: one global batch of twelve parts, which any number of ranks up to four divides evenly, so that runs
// on other numbers of ranks are one run.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "support/folder.h"
#include "support/optimizer_suite.h"
#include "zero/checkpoint.h"

namespace checkpoints {

/// A sanitizer keeps memory that is freed: resident memory says nothing then.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr bool kInstrumented = true;
#else
constexpr bool kInstrumented = false;
#endif

using namespace training;
using zero::Communicator;

constexpr int kParts = 12;

inline at::Tensor loss(const Model& model, int step, int rank, int ranks) {
  at::Tensor sum = at::zeros({}, model.params[0].options().requires_grad(false));
  const int mine = kParts / ranks;
  for (int k = rank * mine; k < (rank + 1) * mine; ++k) sum = sum + model.loss(batch(step, k, model.params[0].scalar_type()));
  return sum / mine;
}

struct Trainer {
  Model model;
  zero::ZeroOptimizer opt;

  Trainer(const Communicator& comm, int stage, const Factory& make, std::int64_t bucket_bytes = 256,
          at::ScalarType dtype = at::kDouble, double seed = 1)
      : model(dtype, seed),
        opt(zero::wrap(make(model.params), suite::options_for(comm, stage, bucket_bytes).names(Model::names()))) {}

  void steps(int first, int last) {
    for (int s = first; s < last; ++s) {
      opt.zero_grad();
      loss(model, s, opt.comm().rank(), opt.comm().size()).backward();
      opt.step();
    }
  }
  std::string save(const std::string& directory, const zero::Extra& extra = {}, const zero::SaveOptions& options = {}) {
    return zero::save(directory, {}, opt, extra, options);
  }
  zero::Loaded load(const std::string& path, const zero::LoadOptions& options = {}) {
    return zero::load(path, {}, opt, options);
  }
  Params values() const { return copies(model.params); }
};

inline void on_ranks(int ranks, const std::function<void(const Communicator&)>& body) {
  zero::WaitPolicy policy;
  policy.timeout = std::chrono::seconds(30);
  zero::run_ranks(ranks, policy, body);
}

}  // namespace checkpoints
