// What zero-run's processes find each other by: one block of shared memory that the launcher made and keeps.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstdint>
#include <memory>

#include "comm/control_block.h"
#include "comm/window.h"
#include "zero/communicator.h"

namespace zero {

/// At the start of the block; the slots of all ranks follow.
struct alignas(128) LaunchBoard {
  static constexpr int kMostRanks = 256;
  std::atomic<std::int32_t> pids[kMostRanks];  ///< 0: that rank has not come to make_communicator() yet

  static std::int64_t bytes(int ranks) {
    return static_cast<std::int64_t>(sizeof(LaunchBoard) + sizeof(Slot) * static_cast<std::size_t>(ranks));
  }
  Slot* slots() { return reinterpret_cast<Slot*>(this + 1); }
};

/// Names the block, the rank and the number of ranks: "pid:fd:rank:ranks".
inline constexpr const char* kLaunchVariable = "ZERO_LAUNCHED";

/// Undefined in a process that zero-run didn't start. The first call waits for all ranks; later ones are collective, too.
Communicator launched_communicator();

}  // namespace zero
