// A double of NCCL: the ranks are threads, and a collective runs on their streams when all of them have reached it. Sums are formed in
// rank order, in float (double for double), and rounded once. Can be told to misbehave.
#pragma once

#include <atomic>
#include <chrono>
#include <string>
#include <vector>

#include "comm/nccl/nccl_api.h"
#include "fake_cuda.h"

namespace fake {

/// What the double does from now on, and what it has been asked to do. One for all ranks; reset_nccl() between tests.
struct Nccl {
  // Faults. A rank of -1 is nobody.
  std::atomic<int> never_initialised{-1};  ///< this rank's communicators stay ncclInProgress (and so do its peers')
  std::atomic<int> init_fails_on{-1};      ///< ncclCommInitRankConfig returns an error there
  std::atomic<int> async_error_on{-1};     ///< ncclCommGetAsyncError reports one there
  std::atomic<bool> stuck{false};          ///< collectives never end, until aborted
  std::atomic<bool> slow_start{false};     ///< every call is ncclInProgress at first
  std::atomic<bool> never_starts{false};   ///< and stays so
  std::atomic<bool> register_fails{false};
  std::atomic<bool> memory_fails{false};

  std::atomic<int> inits{0}, aborts{0}, finalizes{0}, destroys{0}, live{0};
  std::atomic<int> registered{0}, deregistered{0}, allocated{0}, freed{0};
  std::atomic<int> groups{0}, averages{0}, scaled{0}, sums{0}, in_groups{0};
};
Nccl& nccl_state();
void reset_nccl();

/// The table, without the symbols named, of another version if that isn't 0.
zero::NcclApi nccl_api(const std::vector<std::string>& missing = {}, int version = 0);
/// As a library's symbols.
zero::SymbolLookup nccl_symbols(const std::vector<std::string>& missing = {}, int version = 0);

}  // namespace fake
