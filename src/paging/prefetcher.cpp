#include "paging/prefetcher.h"

#include <algorithm>
#include <optional>
#include <utility>

namespace zero {
namespace {

constexpr std::size_t kPlans = 4;

}  // namespace

Prefetcher::~Prefetcher() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stop_ = true;
  }
  wake_.notify_all();
  if (thread_.joinable()) thread_.join();
}

void Prefetcher::new_touch(int unit, const std::vector<int>& held) {
  last_ = unit;
  recorded_.push_back({unit, held});
  std::optional<Fetch> due;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (following_) {
      const auto& trace = plans_[current_].trace;
      const auto next = static_cast<std::size_t>(cursor_) + 1;  // −1 before the first
      if (next < trace.size() && trace[next].unit == unit) {
        ++cursor_;
      } else {
        ++stats_.deviations;
        follow_another();
      }
    }
    if (static_cast<std::size_t>(unit) < brought_.size() && std::exchange(brought_[unit], 0)) ++stats_.hits;
    if (following_) {
      const auto& fetches = plans_[current_].fetches;
      if (next_ < fetches.size() && fetches[next_].position <= cursor_) due = fetches[next_++];
    }
  }
  if (ahead_) wake_.notify_one();
  // By the plan's own choice of victims; if that isn't possible now, pin() makes its own.
  if (due) pager_.bring(due->unit, due->victims);
}

// A plan that begins like what has been touched so far, or none.
void Prefetcher::follow_another() {
  following_ = false;
  for (std::size_t p = 0; p < plans_.size() && !following_; ++p) {
    const auto& trace = plans_[p].trace;
    if (p == current_ || !plans_[p].fits || trace.size() < recorded_.size()) continue;
    if (!std::equal(recorded_.begin(), recorded_.end(), trace.begin(),
                    [](const auto& a, const auto& b) { return a.unit == b.unit; }))
      continue;
    following_ = true;
    current_ = p;
    cursor_ = static_cast<int>(recorded_.size()) - 1;
    const auto& fetches = plans_[p].fetches;
    next_ = static_cast<std::size_t>(
        std::find_if(fetches.begin(), fetches.end(), [&](const Fetch& f) { return f.position >= cursor_; }) - fetches.begin());
  }
}

bool Prefetcher::may_fetch() const {
  if (!running_ || !following_ || blocked_ == cursor_) return false;
  const auto& fetches = plans_[current_].fetches;
  return next_ < fetches.size() && (fetches[next_].after < 0 || fetches[next_].after < cursor_);
}

void Prefetcher::run() {
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    wake_.wait(lock, [this] { return stop_ || may_fetch(); });
    if (stop_) return;
    const auto fetch = plans_[current_].fetches[next_++];
    const auto after = next_;
    in_flight_ = true;
    lock.unlock();
    bool done = false;
    try {
      done = pager_.bring(fetch.unit, fetch.victims);
    } catch (...) {
      // The training thread will want the unit and meet the same error, where somebody hears it.
    }
    lock.lock();
    in_flight_ = false;
    if (done) {
      ++stats_.ahead;
      if (brought_.size() <= static_cast<std::size_t>(fetch.unit)) brought_.resize(static_cast<std::size_t>(fetch.unit) + 1);
      if (fetch.position <= cursor_) {  // touched meanwhile: it waited
        ++stats_.hits;
      } else {
        brought_[fetch.unit] = 1;
      }
    } else if (fetch.position > cursor_ && next_ == after) {  // later, then
      --next_;
      blocked_ = cursor_;
    }
    landed_.notify_all();
  }
}

void Prefetcher::pause() {
  std::unique_lock<std::mutex> lock(mutex_);
  running_ = false;
  landed_.wait(lock, [this] { return !in_flight_; });
}

void Prefetcher::learn(const std::vector<std::int64_t>& unit_bytes, std::int64_t budget, bool record) {
  auto recorded = std::exchange(recorded_, {});
  last_ = -1;
  record = !std::exchange(disturbed_, false) && record;
  const std::lock_guard<std::mutex> lock(mutex_);
  if (budget != budget_) plans_.clear();
  budget_ = budget;
  if (record && !recorded.empty()) {
    const auto known = std::find_if(plans_.begin(), plans_.end(), [&](const Plan& p) { return p.trace == recorded; });
    if (known == plans_.end()) {
      plans_.push_front(make_plan(std::move(recorded), unit_bytes, budget));
      if (plans_.size() > kPlans) plans_.pop_back();
    } else if (known != plans_.begin()) {
      std::rotate(plans_.begin(), known, known + 1);
    }
  }
  current_ = 0, next_ = 0;
  cursor_ = -1, blocked_ = -2;
  following_ = !plans_.empty() && plans_.front().fits;
  running_ = true;
  std::fill(brought_.begin(), brought_.end(), 0);
  if (ahead_ && following_ && !thread_.joinable()) thread_ = std::thread([this] { run(); });
  if (ahead_) wake_.notify_one();
}

void Prefetcher::resume_disturbed() {
  disturbed_ = true;
  const std::lock_guard<std::mutex> lock(mutex_);
  following_ = false;
  running_ = true;
}

void Prefetcher::forget() {
  recorded_.clear();
  last_ = -1;
  disturbed_ = false;
  const std::lock_guard<std::mutex> lock(mutex_);
  plans_.clear();
  following_ = false;
  brought_.clear();
}

std::vector<std::int64_t> Prefetcher::touched() const {
  std::vector<std::int64_t> units;
  for (const auto& entry : recorded_) units.push_back(entry.unit);
  return units;
}

Plan Prefetcher::plan() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return plans_.empty() ? Plan() : plans_[following_ ? current_ : 0];
}

Prefetcher::Stats Prefetcher::take_stats() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return std::exchange(stats_, Stats());
}

}  // namespace zero
