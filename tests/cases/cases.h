// Faults that users of other systems have reported, each as a small training problem with a known right outcome. A test case is
// named by the report's number in docs/cases.md. One program: run as it is, ranks are threads (2, 3 and 4 of them); under mpirun, the
// job's processes.
#pragma once

#include <cstdlib>
#include <functional>

#include "support/contract.h"

namespace cases {

using namespace contract;

inline bool under_mpirun() { return std::getenv("OMPI_COMM_WORLD_SIZE") != nullptr; }

/// On 2, 3 and 4 threads, or on the processes of this job.
inline void on_ranks(const std::function<void(const Communicator&)>& check, const std::vector<int>& worlds = {2, 3, 4}) {
  if (!under_mpirun()) return on_threads(worlds, check);
  static const auto comm = zero::make_communicator();
  std::string problem;
  try {
    check(comm);
  } catch (const std::exception& e) {
    problem = e.what();
  }
  // All ranks or none: the others would wait in the next test case.
  for (const auto& p : comm.exchange(problem)) {
    INFO(p);
    REQUIRE(p.empty());
  }
}

inline void at_every_stage(const std::function<void(const Communicator&, Options)>& check,
                           const std::vector<int>& worlds = {2, 3, 4}) {
  for (int stage : suite::stages()) {
    INFO("stage " << stage);
    on_ranks([&](const Communicator& comm) { check(comm, suite::options_for(comm, stage)); }, worlds);
  }
}

/// A model and its data; what one process makes of it is right.
struct Problem {
  std::function<Params()> build;
  std::function<at::Tensor(const Params&, int step, int rank)> loss;
  std::function<std::unique_ptr<torch::optim::Optimizer>(const Params&)> make = [](const Params& p) { return adamw(p); };
  int steps = 4;
  bool to_none = true;  ///< how gradients are cleared
  double max_norm = 0;  ///< by LibTorch's own call
  double bar = 1e-12;
};

/// Trains on one process (the mean of the ranks' losses) and on the ranks: parameters, losses and ranks must agree after every step.
/// @returns the wrapped model's parameters
inline Params trains_like_torch(const Communicator& comm, const Options& options, const Problem& problem) {
  auto expected = problem.build(), params = problem.build();
  auto plain = problem.make(expected);
  auto opt = zero::wrap(problem.make(params), options);
  for (int s = 0; s < problem.steps; ++s) {
    plain->zero_grad(problem.to_none), opt.zero_grad(problem.to_none);
    double loss = 0;
    for (int r = 0; r < comm.size(); ++r) {
      const auto l = problem.loss(expected, s, r) / comm.size();
      loss += l.item<double>();
      if (l.requires_grad()) l.backward();
    }
    const auto mine = problem.loss(params, s, comm.rank());
    auto mean = mine.detach().to(at::kDouble).clone();
    if (mine.requires_grad()) mine.backward();
    comm.all_reduce(mean, comm.size());
    expect(std::abs(mean.item<double>() - loss) <= 1e-10 * std::abs(loss) + (problem.bar > 1e-9 ? 1e-2 * std::abs(loss) : 0),
           "loss of step ", s, ": ", mean.item<double>(), ", not ", loss);
    for (std::size_t i = 0; i < params.size(); ++i)
      expect(params[i].grad().defined() == expected[i].grad().defined(), "a gradient of parameter ", i, " at step ", s,
             " is defined: ", params[i].grad().defined());
    if (problem.max_norm > 0) {
      const double norm = torch::nn::utils::clip_grad_norm_(expected, problem.max_norm),
                   ours = torch::nn::utils::clip_grad_norm_(params, problem.max_norm);
      expect(std::abs(norm - ours) <= problem.bar * norm, "norm ", ours, ", not ", norm);
    }
    plain->step(), opt.step();
    expect_close(params, expected, "parameters", problem.bar);
  }
  expect_equal_on_ranks(comm, params);
  return params;
}

inline at::Tensor leaf(const at::Tensor& t) { return t.detach().clone(at::MemoryFormat::Preserve).requires_grad_(true); }

}  // namespace cases
