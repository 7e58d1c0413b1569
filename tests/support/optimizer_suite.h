// What ZeroOptimizer promises about results, as functions of one rank's communicator: run on threads (tests/dist) and under
// mpirun (tests/mpi).
#pragma once

#include "support/training.h"

namespace suite {

using namespace training;

inline zero::Options options_for(const zero::Communicator& comm, int stage, std::int64_t bucket_bytes = 256) {
  return zero::Options(comm).stage(static_cast<zero::Stage>(stage)).bucket_bytes(bucket_bytes).elementwise();
}

/// Every optimizer equals one-process torch::optim in float64, at both stages, and the ranks agree bit for bit.
inline void equals_torch_in_double(const zero::Communicator& comm) {
  for (const auto& [name, make] : optimizers()) {
    const auto expected = reference(make, comm.size(), 5);
    for (int stage : {0, 1}) {
      const auto got = wrapped(comm, make, 5, options_for(comm, stage));
      const double d = distance(got, expected);
      expect(d < 1e-12, name, " at stage ", stage, ", ", comm.size(), " ranks: differs from torch::optim by ", d);
      expect_equal_on_ranks(comm, got);
    }
  }
}

/// Stages 0 and 1 give the same bits in float32, for any bucket size, with and without clipping.
inline void stages_give_the_same_bits(const zero::Communicator& comm) {
  for (const auto& [name, make] : optimizers()) {
    for (double max_norm : {0.0, 0.05}) {
      for (std::int64_t bucket : {64, 400, 1 << 20}) {
        const auto zero_ = wrapped(comm, make, 4, options_for(comm, 0, bucket), at::kFloat, max_norm);
        const auto one = wrapped(comm, make, 4, options_for(comm, 1, bucket), at::kFloat, max_norm);
        expect(same_bits(zero_, one), name, ": stages 0 and 1 differ at ", comm.size(), " ranks, bucket ", bucket, ", clip ",
               max_norm);
        expect_equal_on_ranks(comm, one);
      }
    }
  }
}

/// A step sends 2Ψ′(N−1)/N elements per rank at both stages, with and without a norm.
inline void bytes_sent_are_the_formula(const zero::Communicator& comm) {
  const auto make = optimizers()[2].second;
  for (int stage : {0, 1}) {
    for (bool clip : {false, true}) {
      Model model(at::kFloat);
      auto opt = zero::wrap(make(model.params), options_for(comm, stage));
      for (int s = 0; s < 2; ++s) {
        opt.zero_grad();
        model.loss(batch(s, comm.rank(), at::kFloat)).backward();
        if (clip) zero::clip_grad_norm_(opt, 1.0);
        opt.step();
        const std::int64_t expected = 2 * opt.padded_numel() * 4 / comm.size() * (comm.size() - 1);
        expect(opt.last_step().bytes_sent == expected, "stage ", stage, " sent ", opt.last_step().bytes_sent, " bytes, not ",
               expected);
      }
    }
  }
}

}  // namespace suite
