#include "paging/pager.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "core/check.h"

namespace zero {

Pager::Pager(Transport& transport, std::unique_ptr<Policy> policy, std::int64_t budget, Rules rules)
    : transport_(transport), policy_(std::move(policy)), budget_(budget), rules_(rules) {}

Pager::Unit& Pager::at(int unit) {
  if (units_.size() <= static_cast<std::size_t>(unit)) units_.resize(static_cast<std::size_t>(unit) + 1);
  return units_[unit];
}

bool Pager::idle(const Unit& unit) { return unit.state == State::resident && unit.pins == 0; }

void Pager::wait_for_change(std::unique_lock<PagerMutex>& lock) {
  const auto start = std::chrono::steady_clock::now();
  changed_.wait(lock);
  stats_.waited_seconds += std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// The unit is arriving, and ours alone. Leaves it resident, or released if it throws.
void Pager::fetch(std::unique_lock<PagerMutex>& lock, int unit, const std::function<void()>& make_room_for) {
  std::int64_t taken = 0;
  bool began = false;
  std::exception_ptr error;
  try {
    const auto bytes = transport_.bytes(unit);
    make_room_for();
    // From here on, not from its arrival: threads that fetch at the same time share one budget.
    taken = bytes;
    resident_bytes_ += taken;
    peak_bytes_ = std::max(peak_bytes_, resident_bytes_);
    stats_.peak_bytes = std::max(stats_.peak_bytes, resident_bytes_);
    ++working_;
    began = true;
    lock.unlock();
    transport_.fetch(unit);
  } catch (...) {
    error = std::current_exception();
  }
  if (!lock.owns_lock()) lock.lock();
  if (began) --working_;
  at(unit).state = error == nullptr ? State::resident : State::released;
  changed_.notify_all();
  if (error != nullptr) {
    resident_bytes_ -= taken;
    std::rethrow_exception(error);
  }
  ++fetches_;
}

void Pager::pin(const std::vector<int>& units, bool may_exceed) {
  std::unique_lock<PagerMutex> lock(mutex_);
  std::size_t done = 0;
  try {
    for (; done < units.size(); ++done) {
      const int unit = units[done];
      policy_->touched(unit);
      for (;;) {
        // While a unit moves, the thread that moves it has it to itself. (References don't survive a wait: units_ may grow.)
        if (at(unit).state == State::arriving || at(unit).state == State::leaving) {
          wait_for_change(lock);
          continue;
        }
        if (at(unit).state == State::resident) break;
        at(unit).state = State::arriving;
        fetch(lock, unit, [&] { make_room(lock, transport_.bytes(unit), may_exceed); });
        ++stats_.fetches;
        break;
      }
      ++at(unit).pins;
    }
  } catch (...) {
    while (done-- > 0) --at(units[done]).pins;
    changed_.notify_all();
    throw;
  }
}

bool Pager::bring(int unit, const std::vector<int>& victims) {
  std::unique_lock<PagerMutex> lock(mutex_);
  if (at(unit).state != State::released) return false;
  const auto bytes = transport_.bytes(unit);
  std::int64_t room = budget_ - counted_bytes();
  for (const int victim : victims) {
    const auto& v = at(victim);
    if (v.state == State::released) continue;
    if (!may_go(v) || v.dirty) return false;
    room += transport_.bytes(victim);
  }
  if (room < bytes) return false;
  at(unit).state = State::arriving;
  try {
    fetch(lock, unit, [&] {
      for (const int victim : victims) {
        if (!may_go(at(victim))) continue;  // somebody has been quicker
        drop(lock, victim, true);
        ++stats_.evictions;
      }
      if (!fits(bytes)) throw OverBudget(counted_bytes() + bytes);  // or has taken the room
    });
  } catch (const OverBudget&) {
    return false;
  }
  ++stats_.brought;
  return true;
}

void Pager::unpin(const std::vector<int>& units, const std::vector<int>& written, const std::shared_ptr<Event>& done) {
  const std::lock_guard<PagerMutex> lock(mutex_);
  for (const int unit : written) {
    if (!at(unit).dirty) written_bytes_ += transport_.bytes(unit);
    at(unit).dirty = true;
  }
  for (const int unit : units) {
    auto& u = at(unit);
    --u.pins;
    if (done == nullptr) continue;
    // A unit that stays would collect them for ever.
    u.users.erase(std::remove_if(u.users.begin(), u.users.end(), [](const auto& event) { return event->ready(); }),
                  u.users.end());
    u.users.push_back(done);
  }
  changed_.notify_all();
}

void Pager::make_room(std::unique_lock<PagerMutex>& lock, std::int64_t bytes, bool may_exceed) {
  while (!fits(bytes)) {
    std::vector<int> candidates;
    for (std::size_t unit = 0; unit < units_.size(); ++unit)
      if (may_go(units_[unit])) candidates.push_back(static_cast<int>(unit));
    if (candidates.empty()) {
      if (rules_.strict && working_ > 0) {  // what another thread moves may be free then
        wait_for_change(lock);
        continue;
      }
      if (rules_.strict && !may_exceed) throw OverBudget(counted_bytes() + bytes);
      return;
    }
    drop(lock, policy_->victim(candidates), true);
    ++stats_.evictions;
  }
}

void Pager::drop(std::unique_lock<PagerMutex>& lock, int unit, bool store) {
  at(unit).state = State::leaving;
  auto users = std::exchange(at(unit).users, {});
  const bool dirty = std::exchange(at(unit).dirty, false);
  if (dirty) written_bytes_ -= transport_.bytes(unit);
  if (store && dirty) ++stats_.stores;
  std::exception_ptr error;
  std::int64_t bytes = 0;
  ++working_;
  lock.unlock();
  try {
    for (const auto& event : users)
      if (!event->ready()) event->wait();
    if (store && dirty) transport_.store(unit);
    bytes = transport_.bytes(unit);
    transport_.release(unit);
  } catch (...) {
    error = std::current_exception();
  }
  lock.lock();
  --working_;
  at(unit).state = error == nullptr ? State::released : State::resident;
  if (error == nullptr) {
    resident_bytes_ -= bytes;
  } else {  // nothing is lost: it can be tried again
    at(unit).dirty = dirty;
    if (dirty) written_bytes_ += transport_.bytes(unit);
    at(unit).users = std::move(users);
  }
  changed_.notify_all();
  if (error != nullptr) std::rethrow_exception(error);
}

void Pager::store() {
  std::unique_lock<PagerMutex> lock(mutex_);
  for (std::size_t unit = 0; unit < units_.size(); ++unit) {
    const int u = static_cast<int>(unit);
    while (at(u).state == State::arriving || at(u).state == State::leaving) changed_.wait(lock);
    if (at(u).state != State::resident || !at(u).dirty) continue;
    const auto users = at(u).users;
    at(u).dirty = false;
    written_bytes_ -= transport_.bytes(u);
    ++stats_.stores;
    ++at(u).pins;
    lock.unlock();
    std::exception_ptr error;
    try {
      for (const auto& event : users)
        if (!event->ready()) event->wait();
      transport_.store(u);
    } catch (...) {
      error = std::current_exception();
    }
    lock.lock();
    --at(u).pins;
    if (error != nullptr && !at(u).dirty) at(u).dirty = true, written_bytes_ += transport_.bytes(u);
    changed_.notify_all();
    if (error != nullptr) std::rethrow_exception(error);
  }
}

void Pager::release() {
  std::unique_lock<PagerMutex> lock(mutex_);
  for (std::size_t unit = 0; unit < units_.size(); ++unit) {
    while (units_[unit].state == State::leaving) changed_.wait(lock);  // another thread's: stored when we return
    if (idle(units_[unit])) drop(lock, static_cast<int>(unit), true);
  }
}

void Pager::discard(int unit) {
  std::unique_lock<PagerMutex> lock(mutex_);
  while (at(unit).state == State::arriving || at(unit).state == State::leaving) changed_.wait(lock);
  if (at(unit).state == State::released) return;
  ZERO_CHECK_EQ(at(unit).pins, 0, "an operator uses unit ", unit, ", which is out of date");
  drop(lock, unit, false);
}

bool Pager::resident(int unit) const {
  const std::lock_guard<PagerMutex> lock(mutex_);
  return static_cast<std::size_t>(unit) < units_.size() && units_[unit].state == State::resident;
}

std::int64_t Pager::resident_bytes() const {
  const std::lock_guard<PagerMutex> lock(mutex_);
  return resident_bytes_;
}
std::int64_t Pager::peak_bytes() const {
  const std::lock_guard<PagerMutex> lock(mutex_);
  return peak_bytes_;
}
std::int64_t Pager::fetches() const {
  const std::lock_guard<PagerMutex> lock(mutex_);
  return fetches_;
}
bool Pager::written(int unit) const {
  const std::lock_guard<PagerMutex> lock(mutex_);
  return static_cast<std::size_t>(unit) < units_.size() && units_[unit].dirty;
}
std::int64_t Pager::budget() const {
  const std::lock_guard<PagerMutex> lock(mutex_);
  return budget_;
}
Pager::Stats Pager::take_stats() {
  const std::lock_guard<PagerMutex> lock(mutex_);
  auto out = std::exchange(stats_, Stats());
  stats_.peak_bytes = resident_bytes_;
  return out;
}
void Pager::set_budget(std::int64_t bytes) {
  const std::lock_guard<PagerMutex> lock(mutex_);
  budget_ = bytes;
}

}  // namespace zero
