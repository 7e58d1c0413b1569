// Fetches units before they are touched: learns the order of touches of one step, makes a plan of it (src/paging/trace.h), and
// carries the plan out ahead of the next step's touches, in a thread of its own. A plan is only a hint: where a step touches
// something else, its units come when they are touched, and the new order is learned.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <mutex>
#include <thread>
#include <vector>

#include "paging/pager.h"
#include "paging/trace.h"

namespace zero {

class Prefetcher {
 public:
  struct Stats {
    std::int64_t ahead = 0;       ///< fetches made before the touch
    std::int64_t hits = 0;        ///< touches of units that were fetched ahead
    std::int64_t deviations = 0;  ///< touches that the plan didn't expect
  };

  explicit Prefetcher(Pager& pager) : pager_(pager) {}
  ~Prefetcher();
  Prefetcher(const Prefetcher&) = delete;
  Prefetcher& operator=(const Prefetcher&) = delete;

  /// While it is paused. False, as at first: plans are followed for what goes, but each unit comes when it is touched (no thread).
  void set_ahead(bool ahead) { ahead_ = ahead; }

  /// The training thread is about to pin a unit, while it holds others. With the unit of the call before: nothing to do.
  void touch(int unit, const std::vector<int>& held) {
    if (unit != last_) new_touch(unit, held);
  }

  /// Nothing is fetched ahead until learn(): what peers keep is going to change.
  void pause();
  /// A step is over, nothing is resident: learns what it has touched. `record` false: forget it, the step wasn't one.
  void learn(const std::vector<std::int64_t>& unit_bytes, std::int64_t budget, bool record = true);
  /// All units have gone in the middle of a step: this one can't be planned.
  void resume_disturbed();
  /// Units have another meaning from now on.
  void forget();

  /// What the next step is expected to do; no trace: nothing has been learned.
  Plan plan() const;
  /// Units in the order in which this step has touched them so far. On the training thread.
  std::vector<std::int64_t> touched() const;
  /// Since the last call.
  Stats take_stats();

 private:
  void new_touch(int unit, const std::vector<int>& held);
  void follow_another();
  bool may_fetch() const;
  void run();

  Pager& pager_;
  bool ahead_ = false;

  // Of the training thread alone.
  int last_ = -1;
  std::vector<TraceEntry> recorded_;
  bool disturbed_ = false;

  mutable std::mutex mutex_;
  std::condition_variable wake_, landed_;
  std::deque<Plan> plans_;  ///< of the last different steps, the latest first: training and evaluation may alternate
  std::int64_t budget_ = 0;
  std::size_t current_ = 0;  ///< which of them is followed
  bool following_ = false, running_ = false, in_flight_ = false, stop_ = false;
  int cursor_ = -1;       ///< position of the last touch
  int blocked_ = -2;      ///< the position at which the next fetch was not possible
  std::size_t next_ = 0;  ///< of the plan's fetches
  std::vector<char> brought_;
  Stats stats_;
  std::thread thread_;
};

}  // namespace zero
