// Plans from orders of touches, and the thread that carries them out, with a transport that only keeps account.
#include "paging/trace.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <functional>
#include <random>
#include <thread>

#include "paging/prefetcher.h"
#include "support/catch.h"

using zero::make_plan;
using zero::Plan;
using zero::TraceEntry;

namespace {

std::vector<TraceEntry> order(const std::vector<int>& units) {
  std::vector<TraceEntry> out;
  for (const int unit : units) out.push_back({unit, {}});
  return out;
}

// The least number of fetches by trying everything.
int fewest(const std::vector<int>& units, std::size_t at, std::vector<int> resident, std::size_t room) {
  while (at < units.size() && std::find(resident.begin(), resident.end(), units[at]) != resident.end()) ++at;
  if (at == units.size()) return 0;
  if (resident.size() < room) {
    resident.push_back(units[at]);
    return 1 + fewest(units, at + 1, resident, room);
  }
  int best = 1 << 20;
  for (std::size_t victim = 0; victim < resident.size(); ++victim) {
    auto next = resident;
    next[victim] = units[at];
    best = std::min(best, 1 + fewest(units, at + 1, next, room));
  }
  return best;
}

// What a plan says has to be possible: nothing is fetched that is there, nothing released that isn't, or is in use.
void check(const Plan& plan, const std::vector<std::int64_t>& bytes, std::int64_t budget) {
  std::vector<char> resident(bytes.size(), 0);
  std::int64_t used = 0, moved = 0;
  std::size_t next = 0;
  std::vector<int> last(bytes.size(), -1);
  for (std::size_t i = 0; i < plan.trace.size(); ++i) {
    if (next < plan.fetches.size() && plan.fetches[next].position == static_cast<int>(i)) {
      const auto& fetch = plan.fetches[next++];
      int after = -1;
      for (const int victim : fetch.victims) {
        REQUIRE(resident[victim]);
        const auto& held = plan.trace[i].held;
        REQUIRE(std::find(held.begin(), held.end(), victim) == held.end());
        resident[victim] = 0;
        used -= bytes[victim];
        after = std::max(after, last[victim]);
      }
      REQUIRE(fetch.after == after);
      REQUIRE(!resident[fetch.unit]);
      resident[fetch.unit] = 1;
      used += bytes[fetch.unit], moved += bytes[fetch.unit];
      REQUIRE((used <= budget || !plan.fits));
      REQUIRE(used <= plan.peak_bytes);
    }
    REQUIRE(resident[plan.trace[i].unit]);
    last[plan.trace[i].unit] = static_cast<int>(i);
    for (const int unit : plan.trace[i].held) last[unit] = static_cast<int>(i);
  }
  REQUIRE(next == plan.fetches.size());
  REQUIRE(moved == plan.bytes);
}

class CountingTransport : public zero::Transport {
 public:
  void fetch(int unit) override {
    if (delay.count() > 0) std::this_thread::sleep_for(delay);
    if (std::this_thread::get_id() != trainer) ++ahead;
    here[unit] = true;
    ++fetched;
  }
  void store(int) override {}
  void release(int unit) override { here[unit] = false; }
  std::int64_t bytes(int) const override { return 10; }
  std::atomic<bool> here[8] = {};
  std::atomic<int> fetched{0}, ahead{0};
  std::chrono::microseconds delay{0};
  std::thread::id trainer = std::this_thread::get_id();
};

void step(zero::Prefetcher& prefetcher, zero::Pager& pager, const std::vector<int>& units,
          std::chrono::microseconds work = {}) {
  for (const int unit : units) {
    prefetcher.touch(unit, {});
    pager.pin({unit});
    if (work.count() > 0) std::this_thread::sleep_for(work);
    pager.unpin({unit}, {});
  }
}

// What is fetched from `before` on belongs to the next step.
void end_step(
    zero::Prefetcher& prefetcher, zero::Pager& pager, std::int64_t budget, const std::function<void()>& before = [] {}) {
  prefetcher.pause();
  pager.release();
  before();
  prefetcher.learn(std::vector<std::int64_t>(8, 10), budget);
}

}  // namespace

TEST_CASE("a plan for forward and backward keeps what is used next") {
  const std::vector<std::int64_t> bytes(4, 10);
  const auto plan = make_plan(order({0, 1, 2, 3, 2, 1, 0}), bytes, 20);
  check(plan, bytes, 20);
  REQUIRE(plan.fetches.size() == 6);  // 3 and 2 are there at the turn
  REQUIRE(plan.peak_bytes == 20);
  REQUIRE(plan.fits);
  REQUIRE(make_plan(order({0, 1, 2, 3, 2, 1, 0}), bytes, 40).fetches.size() == 4);
  REQUIRE(make_plan(order({0, 1, 2, 3, 2, 1, 0}), bytes, 1000).peak_bytes == 40);
  REQUIRE(make_plan({}, bytes, 20).fetches.empty());
  REQUIRE(!make_plan(order({0}), bytes, 9).fits);
}

TEST_CASE("what is held can't go, and if nothing can the plan says so") {
  const std::vector<std::int64_t> bytes(3, 10);
  const std::vector<TraceEntry> trace{{0, {}}, {1, {0}}, {2, {0}}, {1, {}}, {0, {}}};
  const auto plan = make_plan(trace, bytes, 20);
  check(plan, bytes, 20);
  REQUIRE(plan.fetches[2].victims == std::vector<int>{1});
  REQUIRE(!make_plan({{0, {}}, {1, {0}}}, bytes, 10).fits);
}

TEST_CASE("with units of one size no order of releases needs fewer fetches") {
  std::mt19937 random(7);
  for (int n = 0; n < 300; ++n) {
    const int units = 2 + static_cast<int>(random() % 4);
    const std::size_t room = 1 + random() % static_cast<unsigned>(units);
    std::vector<int> touched(3 + random() % 8);
    for (auto& unit : touched) unit = static_cast<int>(random() % static_cast<unsigned>(units));
    const std::vector<std::int64_t> bytes(static_cast<std::size_t>(units), 10);
    const auto plan = make_plan(order(touched), bytes, static_cast<std::int64_t>(room) * 10);
    check(plan, bytes, static_cast<std::int64_t>(room) * 10);
    REQUIRE(static_cast<int>(plan.fetches.size()) == fewest(touched, 0, {}, room));
  }
}

TEST_CASE("random traces with units of different sizes make plans that can be carried out") {
  std::mt19937 random(11);
  for (int n = 0; n < 300; ++n) {
    const std::size_t units = 2 + random() % 7;
    std::vector<std::int64_t> bytes(units);
    for (auto& b : bytes) b = 1 + static_cast<std::int64_t>(random() % 20);
    std::vector<TraceEntry> trace(5 + random() % 40);
    for (auto& entry : trace) {
      entry.unit = static_cast<int>(random() % units);
      if (random() % 4 == 0) entry.held.push_back(static_cast<int>(random() % units));
      if (!entry.held.empty() && entry.held[0] == entry.unit) entry.held.clear();
    }
    // Held units have been touched before, or they aren't there.
    std::vector<char> seen(units, 0);
    for (auto& entry : trace) {
      if (!entry.held.empty() && !seen[entry.held[0]]) entry.held.clear();
      seen[entry.unit] = 1;
    }
    const auto plan = make_plan(trace, bytes, 25 + static_cast<std::int64_t>(random() % 60));
    if (plan.fits && std::all_of(trace.begin(), trace.end(), [](const auto& e) { return e.held.empty(); }))
      check(plan, bytes, 1000);
  }
}

TEST_CASE("the second step is fetched ahead, within the budget, and fetches what the plan says") {
  CountingTransport transport;
  zero::Pager pager(transport, std::make_unique<zero::LeastRecentlyUsed>(), 30, zero::Pager::Rules{true, true});
  zero::Prefetcher prefetcher(pager);
  prefetcher.set_ahead(true);
  const std::vector<int> touched{0, 1, 2, 3, 4, 5, 4, 3, 2, 1, 0};
  step(prefetcher, pager, touched);
  int fetched = 0;
  const auto next = [&] { fetched = transport.fetched, (void)pager.take_stats(), (void)prefetcher.take_stats(); };
  end_step(prefetcher, pager, 30, next);
  for (int n = 0; n < 20; ++n) {
    const auto plan = prefetcher.plan();
    step(prefetcher, pager, touched, std::chrono::microseconds(200));
    prefetcher.pause();
    const auto stats = prefetcher.take_stats();
    REQUIRE(transport.fetched - fetched == static_cast<int>(plan.fetches.size()));
    REQUIRE(stats.deviations == 0);
    REQUIRE(pager.take_stats().peak_bytes <= 30);
    end_step(prefetcher, pager, 30, next);
  }
  REQUIRE(transport.ahead > 20);  // of 20 × 9; the machine may be busy
}

TEST_CASE("another order is followed by faults and learned; one that was known is found again") {
  CountingTransport transport;
  zero::Pager pager(transport, std::make_unique<zero::LeastRecentlyUsed>(), 20, zero::Pager::Rules{true, true});
  zero::Prefetcher prefetcher(pager);
  const std::vector<int> a{0, 1, 2, 3, 2, 1}, b{0, 1, 4, 5, 4};
  const auto deviations = [&](const std::vector<int>& units) {
    (void)prefetcher.take_stats();
    step(prefetcher, pager, units);
    const auto n = prefetcher.take_stats().deviations;
    end_step(prefetcher, pager, 20);
    return n;
  };
  REQUIRE(deviations(a) == 0);  // nothing was expected
  REQUIRE(deviations(a) == 0);
  REQUIRE(deviations(b) == 1);
  REQUIRE(deviations(b) == 0);
  REQUIRE(deviations(a) == 1);  // where it begins to differ, the plan for a takes over
  REQUIRE(deviations(a) == 0);
  REQUIRE(deviations({7}) == 1);
  // … with its choice of what goes: the least recently used would be fetched 6 times for this one.
  const std::vector<int> cyclic{0, 1, 2, 0, 1, 2}, other{0, 1, 4, 5};
  (void)deviations(cyclic);
  (void)deviations(other);
  const int before = transport.fetched;
  REQUIRE(deviations(cyclic) == 1);
  REQUIRE(transport.fetched - before == 4);
  prefetcher.pause();
  prefetcher.forget();
  REQUIRE(prefetcher.plan().trace.empty());
}

TEST_CASE("touches of units that are on their way wait for them") {
  CountingTransport transport;
  transport.delay = std::chrono::microseconds(2000);
  zero::Pager pager(transport, std::make_unique<zero::LeastRecentlyUsed>(), 80, zero::Pager::Rules{true, true});
  zero::Prefetcher prefetcher(pager);
  prefetcher.set_ahead(true);
  const std::vector<int> touched{0, 1, 2, 3};
  step(prefetcher, pager, touched);
  end_step(prefetcher, pager, 80);
  std::this_thread::sleep_for(std::chrono::microseconds(500));  // the first is being fetched
  (void)pager.take_stats();
  step(prefetcher, pager, touched);
  REQUIRE(pager.take_stats().waited_seconds > 0.0001);
  for (const int unit : touched) REQUIRE(transport.here[unit]);
  prefetcher.pause();
}
