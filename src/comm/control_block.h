// The memory through which the ranks of one node see each other: one slot per rank. It lies in ordinary memory for threads and
// in a shared mapping for processes, so everything in it is lock-free atomics and plain data whose reading is ordered by them.
#pragma once

#include <atomic>
#include <cstdint>

#include "comm/call.h"

namespace zero {

/// What one arrival carries: the call, and the first part of a message.
struct Page {
  static constexpr std::int64_t kText = 4096;
  Call call;
  std::int64_t total = 0;  ///< bytes of the whole message
  char text[kText] = {};
};

/// One queue of reduce-scatters on one rank. Operation t lies in calls[t % kDepth]: written before `posted` exceeds t, read by the
/// peers after that and before their `taken` exceeds t. `taken` also says: this rank has read all inputs of the operations before.
struct alignas(128) Lane {
  static constexpr std::int64_t kDepth = 4;
  std::atomic<std::int64_t> posted{0};  ///< operations that this rank has begun
  std::atomic<std::int64_t> taken{0};   ///< operations whose slice this rank has summed
  std::atomic<bool> closed{false};      ///< nothing more will come
  alignas(128) Call calls[kDepth];
};

enum class Status : std::uint32_t { here, writing, left, failed };

/// Written by its rank, read by all. A page is published by the arrival whose number has its parity, and may be read until the
/// reader's own next arrival: its writer can't come back to it before every rank has arrived once more.
struct alignas(128) Slot {
  static constexpr int kLanes = 8;
  std::atomic<std::uint64_t> arrived{0};   ///< arrivals so far
  std::atomic<std::uint32_t> bell{0};      ///< futex word: changes after each arrival and each change of status
  std::atomic<std::uint32_t> sleepers{0};  ///< peers that may be asleep on the bell
  std::atomic<Status> status{Status::here};
  std::int32_t origin = -1;  ///< failed: the rank where it began
  char why[1000] = {};       ///< failed: what happened there
  alignas(128) Page pages[2];
  Lane lanes[kLanes];
};
static_assert(std::atomic<std::uint64_t>::is_always_lock_free && std::atomic<std::uint32_t>::is_always_lock_free);
static_assert(std::atomic<std::int64_t>::is_always_lock_free && std::atomic<bool>::is_always_lock_free);

}  // namespace zero
