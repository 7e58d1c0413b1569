// What ZeroOptimizer promises about results, as functions of one rank's communicator: run on threads (tests/dist) and under
// mpirun (tests/mpi).
#pragma once

#include <torch/nn/utils/clip_grad.h>

#include <cstdlib>

#include "support/training.h"

namespace suite {

using namespace training;

inline const std::vector<int>& stages() {
  static const std::vector<int> all{0, 1, 2, 3};
  return all;
}

/// With ZERO_TEST_MAPPED every bucket of stage 3 is mapped, as only large ones are otherwise (Options::mapped_shard_bytes).
inline zero::Options options_for(const zero::Communicator& comm, int stage, std::int64_t bucket_bytes = 256) {
  static const bool mapped = std::getenv("ZERO_TEST_MAPPED") != nullptr;
  auto options = zero::Options(comm).stage(static_cast<zero::Stage>(stage)).bucket_bytes(bucket_bytes).elementwise();
  if (mapped) options.mapped_shard_bytes(1);
  return options;
}

enum class Clip { none, ours, torch, loop };

inline const char* name_of(Clip clip) {
  return clip == Clip::none ? "none" : clip == Clip::ours ? "ours" : clip == Clip::torch ? "torch's" : "a loop";
}

/// Clips what p.grad() says, in one of the ways in which trainers do it. Returns the norm.
template <typename Optimizer>
double clip(Clip how, Optimizer& opt, const Params& params, double max_norm) {
  if (how == Clip::torch) return torch::nn::utils::clip_grad_norm_(params, max_norm);
  if (how == Clip::loop) {
    double sum = 0;
    for (const auto& p : params)
      if (p.grad().defined()) sum += p.grad().square().sum().template item<double>();
    const double norm = std::sqrt(sum), factor = max_norm / (norm + 1e-6);
    if (factor < 1)
      for (const auto& p : params)
        if (p.grad().defined()) p.grad().mul_(factor);
    return norm;
  }
  if constexpr (std::is_same_v<Optimizer, zero::ZeroOptimizer>) {
    if (how == Clip::ours) return zero::clip_grad_norm_(opt, max_norm);
  } else {
    if (how == Clip::ours) return torch::nn::utils::clip_grad_norm_(params, max_norm);
  }
  return 0;
}

/// The plain loop on the mean of the ranks' losses, each step in K backwards.
inline Params reference_of(const Factory& make, int ranks, int steps, int backwards, Clip how, double max_norm,
                           at::ScalarType dtype = at::kDouble) {
  Model model(dtype);
  auto opt = make(model.params);
  for (int s = 0; s < steps; ++s) {
    opt->zero_grad();
    for (int k = 0; k < backwards; ++k)
      for (int r = 0; r < ranks; ++r) (model.loss(batch(100 * k + s, r, dtype)) / (ranks * backwards)).backward();
    clip(how, *opt, model.params, max_norm);
    opt->step();
  }
  return copies(model.params);
}

inline Params wrapped_of(const zero::Communicator& comm, const Factory& make, int steps, zero::Options options, int backwards,
                         Clip how, double max_norm, at::ScalarType dtype = at::kDouble) {
  Model model(dtype);
  options.names(Model::names());
  auto opt = zero::wrap(make(model.params), options);
  for (int s = 0; s < steps; ++s) {
    opt.zero_grad();
    for (int k = 0; k < backwards; ++k) (model.loss(batch(100 * k + s, comm.rank(), dtype)) / backwards).backward();
    clip(how, opt, model.params, max_norm);
    opt.step();
  }
  return copies(model.params);
}

/// Every optimizer equals one-process torch::optim in float64, at every stage, and the ranks agree bit for bit.
inline void equals_torch_in_double(const zero::Communicator& comm) {
  for (const auto& [name, make] : optimizers()) {
    for (Clip how : {Clip::none, Clip::torch}) {
      for (int k : {1, 2}) {
        const auto expected = reference_of(make, comm.size(), 5, k, how, 0.05);
        for (int stage : stages()) {
          const auto got = wrapped_of(comm, make, 5, options_for(comm, stage), k, how, 0.05);
          const double d = distance(got, expected);
          expect(d < 1e-12, name, " at stage ", stage, ", ", comm.size(), " ranks, ", k, " backwards, clip ", name_of(how),
                 ": differs from torch::optim by ", d);
          expect_equal_on_ranks(comm, got);
        }
      }
    }
  }
}

/// All stages give the same bits in float32 with one backward per step; with several, 0 and 1 do, and 2 agrees to 1e-6. For any bucket
/// size and way of clipping.
inline void stages_give_the_same_bits(const zero::Communicator& comm) {
  int n = 0;
  for (const auto& [name, make] : optimizers()) {
    for (Clip how : {Clip::none, Clip::ours, Clip::torch, Clip::loop}) {
      for (std::int64_t bucket : {64, 400, 1 << 20}) {
        const int k = n++ % 4 == 3 ? 2 + n / 4 % 2 : 1;
        const auto zero_ = wrapped_of(comm, make, 4, options_for(comm, 0, bucket), k, how, 0.05, at::kFloat);
        const auto one = wrapped_of(comm, make, 4, options_for(comm, 1, bucket), k, how, 0.05, at::kFloat);
        const auto two = wrapped_of(comm, make, 4, options_for(comm, 2, bucket), k, how, 0.05, at::kFloat);
        const auto what = [&](const char* which) {
          std::ostringstream out;
          out << name << ": stages " << which << " differ at " << comm.size() << " ranks, bucket " << bucket << ", clip "
              << name_of(how) << ", " << k << " backwards, by ";
          return out.str();
        };
        expect(same_bits(zero_, one), what("0 and 1"), distance(zero_, one));
        // The least budget with which every operator of this model works, and one that holds everything.
        auto paged = options_for(comm, 3, bucket).memory_budget(n % 2 == 0 ? 1 << 20 : bucket < 1 << 20 ? 1600 : 0);
        const auto three = wrapped_of(comm, make, 4, paged, k, how, 0.05, at::kFloat);
        expect(same_bits(two, three), what("2 and 3"), distance(two, three));
        if (k == 1) expect(same_bits(one, two), what("1 and 2"), distance(one, two));
        // Sums of averages against averages of sums. What divides by the gradient's size, or takes its sign, amplifies the rounding
        // of a tiny one without bound.
        const double bar = name.compare(0, 3, "SGD") == 0 ? 1e-6 : 2e-4;
        if (k > 1) expect(distance(one, two) < bar, what("1 and 2"), distance(one, two));
        expect_equal_on_ranks(comm, two);
      }
    }
  }
}

/// A step with one backward sends 2Ψ′(N−1)/N elements per rank at every stage, with and without our norm; reading every gradient adds
/// one gather at stages 1 and 2, where the step gathers parameters, and nothing at stage 0, where the averages are gathered anyway.
inline void bytes_sent_are_the_formula(const zero::Communicator& comm) {
  const auto make = optimizers()[2].second;
  for (int stage : stages()) {
    for (Clip how : {Clip::none, Clip::ours, Clip::torch}) {
      Model model(at::kFloat);
      auto opt = zero::wrap(make(model.params), options_for(comm, stage).memory_budget(1 << 20));
      for (int s = 0; s < 2; ++s) {
        opt.zero_grad(s == 0);
        model.loss(batch(s, comm.rank(), at::kFloat)).backward();
        clip(how, opt, model.params, 1.0);
        opt.step();
        const std::int64_t once = opt.padded_numel() * 4 / comm.size() * (comm.size() - 1);
        const std::int64_t expected = (how == Clip::torch && stage > 0 ? 3 : 2) * once;
        // Stage 3 gathers parameters before they are used, within a budget that holds them all, and none after the update.
        if (stage == 3)
          expect(opt.last_step().bytes_gathered == (comm.size() > 1 ? once : 0), "stage 3 gathered ",
                 opt.last_step().bytes_gathered, " bytes, not ", once);
        expect(opt.last_step().bytes_sent == expected, "stage ", stage, ", clip ", name_of(how), " sent ",
               opt.last_step().bytes_sent, " bytes, not ", expected);
      }
    }
  }
}

}  // namespace suite
