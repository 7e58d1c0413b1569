// Scopes that a trainer may put around parts of its loop.
#pragma once

#include <shared_mutex>

#include "zero/export.h"
#include "zero/optimizer.h"

namespace zero {

/// Backwards in this scope bring local gradients only; the next backward outside of it, a read of a gradient, or step() averages them.
/// On every rank alike. Spares communication when several backwards make one step:
///
///   for (int m = 0; m < K; ++m) {
///     std::optional<zero::NoSync> wait;
///     if (m + 1 < K) wait.emplace(opt);
///     (loss(batch(m)) / K).backward();
///   }
///   opt.step();
///
/// Memory: nothing at stages 0 and 1. At stage 2 each rank keeps whole gradients (Ψ elements) until they are averaged; without the
/// scope every backward sends Ψ′(N−1)/N elements and keeps shards only.
class ZERO_API NoSync {
 public:
  explicit NoSync(ZeroOptimizer& optimizer);
  ~NoSync();
  NoSync(const NoSync&) = delete;
  NoSync& operator=(const NoSync&) = delete;

 private:
  ZeroOptimizer::Impl* impl_;
  bool before_;
};

/// Another thread of this rank that uses the model while this one trains (an actor that plays while the learner learns) holds a
/// guard while it reads: all parameters it sees are then of one step, since step() waits for it before it writes, and it for
/// step(). It does not communicate. Waits for at most the communicator's timeout.
class ZERO_API ReadGuard {
 public:
  explicit ReadGuard(ZeroOptimizer& optimizer);
  ReadGuard(const ReadGuard&) = delete;
  ReadGuard& operator=(const ReadGuard&) = delete;

 private:
  std::shared_lock<std::shared_timed_mutex> lock_;
};

}  // namespace zero
