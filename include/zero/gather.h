// Whole parameters in a scope, for code that needs raw pointers: custom kernels, torch::save, other libraries.
#pragma once

#include <vector>

#include "zero/export.h"
#include "zero/optimizer.h"

namespace zero {

/// While the guard lives, parameters are whole on this rank and stay where they are: data_ptr(), accessor() and torch::save work.
/// Operators need no guard. At stages 0 to 2 parameters are whole anyway, and the guard only does what it does about values.
///
///   { zero::GatherGuard guard(opt); torch::save(model, "model.pt"); }            // reading: this rank alone, if it likes
///   { zero::GatherGuard guard(opt, {fc->weight}, 0); if (rank == 0) load(fc->weight.data_ptr<float>()); }   // writing: collective
///
/// Memory: what is gathered is whole in spite of Options::memory_budget. Reading sends Ψ(N−1)/N elements of the buckets concerned
/// (on several nodes it is collective); writing a broadcast more. On the thread that trains; no step() while it lives.
class ZERO_API GatherGuard {
 public:
  /// Reading; all parameters, or some of them. @throws c10::Error if one isn't the optimizer's
  explicit GatherGuard(ZeroOptimizer& optimizer);
  GatherGuard(ZeroOptimizer& optimizer, const std::vector<at::Tensor>& parameters);
  /// Collective. Writing: when the guard ends, the values that rank `values_of` has written are everybody's.
  GatherGuard(ZeroOptimizer& optimizer, const std::vector<at::Tensor>& parameters, int values_of);
  /// close(). Not when an exception unwinds through a writing guard: then each rank keeps what it has written, and the next fence
  /// takes each rank's own slice of it.
  ~GatherGuard() noexcept(false);
  GatherGuard(const GatherGuard&) = delete;
  GatherGuard& operator=(const GatherGuard&) = delete;

  /// Ends the guard before its scope does. Collective if it is for writing.
  void close();

 private:
  GatherGuard(ZeroOptimizer& optimizer, const std::vector<int>& indices, int values_of);
  ZeroOptimizer::Impl* impl_;
  std::vector<int> parameters_;
  int values_of_;
  bool open_ = false;
  int unwinding_;
};

}  // namespace zero
