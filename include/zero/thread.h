// N ranks as N threads of this process, on the CPU: for tests, debuggers and sanitizers, and for users who debug their trainer.
#pragma once

#include <functional>

#include "zero/communicator.h"

namespace zero {

/// Runs `body(comm)` on `ranks` threads, each with its own rank of one communicator, and returns when all have ended.
/// If ranks throw, the others are told (their waits throw too, naming the rank), and the first rank's own exception (not a
/// consequence) is rethrown here. The threads share LibTorch's default generator: seed per rank with a generator of your own,
/// and expect no bitwise repeatability from dropout or concurrent initialisation.
ZERO_API void run_ranks(int ranks, const std::function<void(const Communicator&)>& body);

/// The same with waits that give up after `policy`.
ZERO_API void run_ranks(int ranks, const WaitPolicy& policy, const std::function<void(const Communicator&)>& body);

}  // namespace zero
