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

enum class Status : std::uint32_t { here, writing, left, failed };

/// Written by its rank, read by all. A page is published by the arrival whose number has its parity, and may be read until the
/// reader's own next arrival: its writer can't come back to it before every rank has arrived once more.
struct alignas(128) Slot {
  std::atomic<std::uint64_t> arrived{0};   ///< arrivals so far
  std::atomic<std::uint32_t> bell{0};      ///< futex word: changes after each arrival and each change of status
  std::atomic<std::uint32_t> sleepers{0};  ///< peers that may be asleep on the bell
  std::atomic<Status> status{Status::here};
  std::int32_t origin = -1;  ///< failed: the rank where it began
  char why[1000] = {};       ///< failed: what happened there
  alignas(128) Page pages[2];
};
static_assert(std::atomic<std::uint64_t>::is_always_lock_free && std::atomic<std::uint32_t>::is_always_lock_free);

}  // namespace zero
