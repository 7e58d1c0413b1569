// The state of each unit (a bucket): released → arriving → resident → leaving, pins by operators that use it, and whether it has been
// written. Knows nothing of tensors or ranks: memory moves through a Transport, and a Policy says who goes.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "paging/event.h"
#include "paging/policy.h"
#include "paging/transport.h"

namespace zero {

#ifdef ZERO_TEST_WITHOUT_LOCK  // a test's way to show that its other half would notice
struct PagerMutex {
  void lock() {}
  void unlock() {}
};
using PagerCondition = std::condition_variable_any;
#else
using PagerMutex = std::mutex;
using PagerCondition = std::condition_variable;
#endif

/// There is no room for a unit: everything that is resident is in use, or must not be stored now.
class OverBudget : public std::exception {
 public:
  explicit OverBudget(std::int64_t bytes) : needed(bytes) {}
  const char* what() const noexcept override { return "no room for a unit within the budget"; }
  std::int64_t needed;  ///< the least budget with which there were room
};

class Pager {
 public:
  struct Rules {
    /// Units that were written stay until store(), and the budget is that of the others: their content may not be stored at any time.
    bool keeps_written = false;
    /// What doesn't fit the budget is an OverBudget; otherwise what one operator needs may exceed it.
    bool strict = false;
  };
  /// What has happened since the last take_stats().
  struct Stats {
    std::int64_t fetches = 0;    ///< by pin()
    std::int64_t brought = 0;    ///< by bring()
    std::int64_t evictions = 0;  ///< for the room
    std::int64_t stores = 0;
    std::int64_t peak_bytes = 0;  ///< most that was resident or arriving at a time
    double waited_seconds = 0;    ///< pin() for a unit that another thread was moving
  };

  /// @param transport outlives this object
  /// @param budget bytes of resident units beyond which unused ones are released; units in use are never released
  Pager(Transport& transport, std::unique_ptr<Policy> policy, std::int64_t budget, Rules rules);
  Pager(Transport& transport, std::unique_ptr<Policy> policy, std::int64_t budget)
      : Pager(transport, std::move(policy), budget, Rules()) {}

  /// Makes the units resident, in the order given, and keeps them so until unpin(). Of several threads that want a released unit
  /// one fetches and the others wait. If a fetch throws, nothing stays pinned by this call.
  /// @param may_exceed in spite of Rules::strict
  void pin(const std::vector<int>& units, bool may_exceed = false);
  /// @param written the units that have been written and have to be stored before their memory goes
  /// @param done when the work that uses the memory ends; null: it has ended
  void unpin(const std::vector<int>& units, const std::vector<int>& written, const std::shared_ptr<Event>& done = nullptr);

  /// Ahead of its use: makes the unit resident in place of `victims`. Returns false, and does nothing or a part of it, where that
  /// can't be done now: a victim is in use or was written, the room doesn't suffice, or the unit isn't released.
  bool bring(int unit, const std::vector<int>& victims);

  /// Stores every unit that was written; they stay resident.
  void store();
  /// Stores and releases every unit that nobody uses (waits for their events).
  void release();
  /// The content is out of date: releases the unit without storing. Throws if it is in use.
  void discard(int unit);

  bool resident(int unit) const;
  std::int64_t resident_bytes() const;  ///< of units that are resident or moving
  std::int64_t peak_bytes() const;      ///< most that was resident or arriving at a time
  std::int64_t fetches() const;
  std::int64_t written_bytes() const { return written_bytes_; }  ///< of units that were written and not stored
  bool written(int unit) const;
  std::int64_t budget() const;
  void set_budget(std::int64_t bytes);
  Stats take_stats();

 private:
  enum class State : std::uint8_t { released, arriving, resident, leaving };
  struct Unit {
    State state = State::released;
    bool dirty = false;
    int pins = 0;
    std::vector<std::shared_ptr<Event>> users;  ///< not known to be ready
  };

  Unit& at(int unit);
  void make_room(std::unique_lock<PagerMutex>& lock, std::int64_t bytes, bool may_exceed);
  void drop(std::unique_lock<PagerMutex>& lock, int unit, bool store);
  static bool idle(const Unit& unit);
  bool fits(std::int64_t bytes) const { return counted_bytes() + bytes <= budget_; }
  std::int64_t counted_bytes() const { return resident_bytes_ - (rules_.keeps_written ? written_bytes_.load() : 0); }
  bool may_go(const Unit& unit) const { return idle(unit) && !(rules_.keeps_written && unit.dirty); }
  void wait_for_change(std::unique_lock<PagerMutex>& lock);
  void fetch(std::unique_lock<PagerMutex>& lock, int unit, const std::function<void()>& make_room_for);

  Transport& transport_;
  std::unique_ptr<Policy> policy_;
  std::int64_t budget_;
  Rules rules_;
  mutable PagerMutex mutex_;
  PagerCondition changed_;
  std::vector<Unit> units_;  ///< grows
  std::int64_t resident_bytes_ = 0, peak_bytes_ = 0, fetches_ = 0;
  std::atomic<std::int64_t> written_bytes_{0};
  Stats stats_;
  int working_ = 0;  ///< units that the transport is moving
};

}  // namespace zero
