// Arrivals and waits over slots in shared memory, see team.h.
#include "comm/team.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <exception>
#include <utility>

#include "core/check.h"

namespace zero {
namespace {

// A missed wake-up costs this much at most, and so does noticing that a peer has gone.
constexpr std::chrono::microseconds kSleep = std::chrono::milliseconds(50);
// Where messages between nodes have to be moved on meanwhile.
constexpr std::chrono::microseconds kNap{50};
// Where peers may come to need this rank's work meanwhile.
constexpr std::chrono::microseconds kServe = std::chrono::milliseconds(1);
constexpr std::chrono::milliseconds kLastWords{200};

}  // namespace

std::string name_ranks(const std::vector<int>& ranks) {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    if (i > 0) text += i + 1 == ranks.size() ? " and " : ", ";
    text += std::to_string(ranks[i]);
  }
  return text;
}

Team::Team(Setup setup) : setup_(std::move(setup)), watch_(setup_.pids), exceptions_(std::uncaught_exceptions()) {}

Team::~Team() {
  if (unwinding()) fail(rank_in_world(rank()), "failed: an exception ended its work");
  auto expected = Status::here;
  if (slot(rank()).status.compare_exchange_strong(expected, Status::left)) ring();
}

bool Team::unwinding() const { return std::uncaught_exceptions() > exceptions_; }

std::string Team::here() const {
  return detail::text("rank ", rank_in_world(rank()), " of ", world(), " (", backend(), "): ", describe(current_));
}

void Team::ring() {
  Slot& own = slot(rank());
  own.bell.fetch_add(1);
  // A peer counts itself among the sleepers before it looks at the bell for the last time (in the kernel), so either it sees
  // the new value or we see the sleeper.
  if (own.sleepers.load() > 0) futex_wake_all(own.bell);
}

void Team::sync() {
  ++sequence_;
  slot(rank()).arrived.store(sequence_);
  if (size() == 1) return;
  ring();
  const auto there = [this](int member) { return slot(member).arrived.load(std::memory_order_acquire) >= sequence_; };
  for (int member = 0; member < size(); ++member) {
    if (!there(member)) return await({there, nullptr, ""});
  }
}

void Team::await(const Goal& goal) {
  Wait wait{goal};
  for (int member = 0; member < size(); ++member) {
    if (!goal.there(member)) wait_for(member, wait);
  }
}

Page& Team::next_page() { return slot(rank()).pages[(sequence_ + 1) % 2]; }

const Page& Team::page(int member) const { return slot(member).pages[sequence_ % 2]; }

void Team::wait_for(int member, Wait& wait) {
  Slot& other = slot(member);
  Backoff backoff(size());
  while (backoff.pause()) {
    if (wait.goal.there(member)) return;
  }
  if (wait.began == Clock::time_point{}) wait.began = Clock::now();
  while (!look_around(member, wait)) {
    if (progress) progress();
    const bool more = serve && serve();
    const auto waited = std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - wait.began);
    const auto left = std::max(policy.timeout + patience - waited, std::chrono::milliseconds(1));
    const auto nap = std::min<std::chrono::microseconds>(left, progress ? kNap : more ? kServe : kSleep);
    other.sleepers.fetch_add(1);
    const auto bell = other.bell.load();
    if (!wait.goal.there(member)) futex_wait(other.bell, bell, nap);
    other.sleepers.fetch_sub(1);
  }
}

// True once `member` is there. Throws if somebody has failed, or if one that isn't there never will be.
bool Team::look_around(int member, Wait& wait) const {
  const Goal& goal = wait.goal;
  std::vector<int> missing;
  int gave_up = -1;
  const int failed = first_failed();  // before looking who is there: who got there and then failed has done its part, too
  for (int other = 0; other < size(); ++other) {
    // In this order: who got there and then left, or ended, has done its part.
    const auto status = slot(other).status.load(std::memory_order_acquire);
    const bool given_up = goal.given_up && goal.given_up(other);
    const bool ended = status == Status::here && !goal.there(other) && watch_.ended(other);
    if (goal.there(other)) {
      if (other == member) return true;
      continue;
    }
    if (status == Status::left) throw_peer_failure(other, "has destroyed its communicator");
    if (ended) throw_peer_failure(other, detail::text("has died (process ", watch_.pid(other), ")"));
    if (given_up) gave_up = other;
    if (goal.before_collectives) check_order(other, goal);
    missing.push_back(rank_in_world(other));
  }
  if (missing.empty()) return true;
  if (failed >= 0) throw_failure_of(failed);
  const auto now = Clock::now();
  if (gave_up >= 0) {
    if (wait.given_up == Clock::time_point{}) wait.given_up = now;
    // An exception that unwinds a queue there is about to tell what really happened: give it a moment.
    if (now - wait.given_up > kLastWords) throw_peer_failure(gave_up, "has closed its queue");
  }
  const auto waited = std::chrono::duration_cast<std::chrono::milliseconds>(now - wait.began);
  if (waited >= policy.timeout + patience) {
    ZERO_FAIL(here(), ": waited ", readable(policy.timeout), ", the timeout, for ", name_ranks(missing), goal.to_do,
              " (set by WaitPolicy or ZERO_TIMEOUT_SECONDS)");
  }
  if (!wait.warned && waited >= policy.warn_after) {
    wait.warned = true;
    std::fprintf(stderr, "zero: %s: has waited %s for %s%s\n", here().c_str(), readable(waited).c_str(),
                 name_ranks(missing).c_str(), goal.to_do);
  }
  return false;
}

// It can't go on from there without this rank: its page stays as it is.
void Team::check_order(int member, const Goal& goal) const {
  const auto arrived = slot(member).arrived.load(std::memory_order_acquire);
  if (arrived <= sequence_ || goal.there(member)) return;
  ZERO_FAIL(here(), ": the ranks are at different calls: rank ", rank_in_world(member), " hasn't begun this, and waits in ",
            describe(slot(member).pages[arrived % 2].call), " for the others");
}

int Team::first_failed() const {
  for (int member = 0; member < size(); ++member)
    if (slot(member).status.load(std::memory_order_acquire) == Status::failed) return member;
  return -1;
}

bool Team::peer_failed() const {
  for (int other = 0; other < size(); ++other)
    if (other != rank() && slot(other).status.load(std::memory_order_acquire) == Status::failed) return true;
  return false;
}

void Team::check_failures() const {
  if (const int failed = first_failed(); failed >= 0) throw_failure_of(failed);
}

void Team::throw_failure_of(int member) const {
  const Slot& its = slot(member);
  throw PeerFailure(detail::text(here(), ": rank ", its.origin, ' ', its.why), its.origin, its.why);
}

void Team::throw_peer_failure(int member, const std::string& reason) const {
  const int peer = rank_in_world(member);
  throw PeerFailure(detail::text(here(), ": rank ", peer, ' ', reason), peer, reason);
}

bool Team::fail(int origin, const std::string& why) {
  Slot& own = slot(rank());
  auto expected = Status::here;
  if (!own.status.compare_exchange_strong(expected, Status::writing)) return false;
  own.origin = origin;
  const auto length = std::min(why.size(), sizeof own.why - 1);
  std::memcpy(own.why, why.data(), length);
  own.why[length] = '\0';
  own.status.store(Status::failed);
  ring();
  return true;
}

std::vector<std::string> Team::exchange(const Call* call, std::string_view mine, const std::function<void()>& inspect) {
  constexpr auto kText = static_cast<std::size_t>(Page::kText);
  std::vector<std::string> all(static_cast<std::size_t>(size()));
  std::size_t longest = 0;
  for (std::size_t begin = 0; begin == 0 || begin < longest; begin += kText) {
    Page& own = next_page();
    if (begin == 0 && call != nullptr) own.call = *call;
    own.total = static_cast<std::int64_t>(mine.size());
    if (begin < mine.size()) std::memcpy(own.text, mine.data() + begin, std::min(kText, mine.size() - begin));
    sync();
    if (begin == 0 && inspect) inspect();
    for (int member = 0; member < size(); ++member) {
      const auto total = static_cast<std::size_t>(page(member).total);
      longest = std::max(longest, total);
      if (begin < total) all[static_cast<std::size_t>(member)].append(page(member).text, std::min(kText, total - begin));
    }
  }
  return all;
}

}  // namespace zero
