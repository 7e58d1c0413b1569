// The states of units, with a transport, a policy and events that only keep account. Compiled a second time without the pager's lock
// (ZERO_TEST_WITHOUT_LOCK), where ThreadSanitizer has to complain: see tests/CMakeLists.txt.
#include "paging/pager.h"

#include <atomic>
#include <chrono>
#include <functional>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>

#include "support/catch.h"

using zero::Pager;

namespace {

// Units of 10 bytes. Says what it was asked to do, and checks that nobody else moves the same unit meanwhile.
class FakeTransport : public zero::Transport {
 public:
  void fetch(int unit) override {
    const Moving moving(*this, unit);
    if (during_fetch) during_fetch(unit);
    if (unit == failing) throw std::runtime_error("no fetch");
    if (here[unit]) wrong = "fetched twice";
    here[unit] = true;
    note('f', unit);
  }
  void store(int unit) override {
    if (!here[unit]) wrong = "stored without being there";
    if (unit == failing_store) throw std::runtime_error("no store");
    note('s', unit);
  }
  void release(int unit) override {
    const Moving moving(*this, unit);
    if (!here[unit]) wrong = "released without being there";
    if (users[unit] > 0) wrong = "released while in use";
    here[unit] = false;
    note('r', unit);
  }
  std::int64_t bytes(int) const override { return 10; }

  static constexpr int kUnits = 6;
  std::atomic<bool> here[kUnits] = {};
  std::atomic<int> users[kUnits] = {}, moving_[kUnits] = {};
  std::atomic<const char*> wrong{nullptr};
  std::atomic<int> failing{-1}, failing_store{-1};
  std::function<void(int unit)> during_fetch;
  bool keeps_log = true;
  std::string log;

 private:
  struct Moving {
    Moving(FakeTransport& t, int unit) : at(t.moving_[unit]) {
      if (at.fetch_add(1) != 0) t.wrong = "moved by two threads";
    }
    ~Moving() { at.fetch_sub(1); }
    std::atomic<int>& at;
  };
  void note(char what, int unit) {
    if (keeps_log) log += what + std::to_string(unit);
  }
};

class FakeEvent : public zero::Event {
 public:
  bool ready() const override { return done; }
  void wait() override {
    if (fails) throw std::runtime_error("no end");
    ++waits, done = true;
  }
  bool done = false, fails = false;
  int waits = 0;
};

// Something that a thread stops at until it is opened.
struct Gate {
  void pass() {
    reached = true;
    while (!open) std::this_thread::yield();
  }
  void wait_until_reached() const {
    while (!reached) std::this_thread::yield();
  }
  std::atomic<bool> reached{false}, open{false};
};

std::unique_ptr<zero::Policy> lru() { return std::make_unique<zero::LeastRecentlyUsed>(); }

}  // namespace

TEST_CASE("a unit is fetched when it is pinned, once, and stays within the budget") {
  FakeTransport transport;
  Pager pager(transport, lru(), 20);
  pager.pin({0, 1});
  pager.pin({1});
  REQUIRE(transport.log == "f0f1");
  REQUIRE(pager.resident_bytes() == 20);
  pager.unpin({0, 1}, {});
  pager.unpin({1}, {});
  REQUIRE(transport.log == "f0f1");  // nothing wants the room
  pager.pin({0}), pager.unpin({0}, {});
  pager.pin({2}), pager.unpin({2}, {});
  REQUIRE(transport.log == "f0f1r1f2");  // 1 was used least recently
  REQUIRE((pager.resident(0) && !pager.resident(1) && pager.resident(2)));
  REQUIRE((pager.peak_bytes() == 20 && pager.fetches() == 3));
}

TEST_CASE("what is pinned is never released: one operator may exceed the budget") {
  FakeTransport transport;
  Pager pager(transport, lru(), 10);
  pager.pin({0, 1, 2});
  REQUIRE((pager.resident_bytes() == 30 && transport.log == "f0f1f2"));
  pager.release();
  REQUIRE(pager.resident_bytes() == 30);
  REQUIRE_THROWS(pager.discard(1));
  pager.unpin({0, 1, 2}, {});
  pager.pin({3});
  REQUIRE(pager.resident_bytes() == 10);
  pager.unpin({3}, {});
  pager.set_budget(0);
  pager.pin({4});
  REQUIRE((pager.resident(4) && !pager.resident(3)));
}

TEST_CASE("what was written is stored exactly once, before it goes") {
  FakeTransport transport;
  Pager pager(transport, lru(), 100);
  pager.pin({0, 1}), pager.unpin({0, 1}, {1});
  pager.store(), pager.store();
  REQUIRE(transport.log == "f0f1s1");
  pager.pin({0}), pager.unpin({0}, {0});
  pager.release();
  REQUIRE(transport.log == "f0f1s1s0r0r1");
  pager.pin({2}), pager.unpin({2}, {2});
  pager.discard(2);  // out of date
  pager.discard(2);
  REQUIRE(transport.log == "f0f1s1s0r0r1f2r2");
  REQUIRE(pager.resident_bytes() == 0);
}

TEST_CASE("memory goes when the work that uses it has ended") {
  FakeTransport transport;
  Pager pager(transport, lru(), 10);
  const auto event = std::make_shared<FakeEvent>();
  pager.pin({0}), pager.unpin({0}, {0}, event);
  pager.pin({0}), pager.unpin({0}, {});
  REQUIRE(event->waits == 0);
  pager.pin({1}), pager.unpin({1}, {});
  REQUIRE((event->waits == 1 && transport.log == "f0s0r0f1"));
}

TEST_CASE("a fetch that fails leaves nothing pinned, and can be tried again") {
  FakeTransport transport;
  Pager pager(transport, lru(), 20);
  transport.failing = 1;
  REQUIRE_THROWS_WITH(pager.pin({0, 1, 2}), "no fetch");
  REQUIRE((pager.resident(0) && !pager.resident(1) && !pager.resident(2)));
  pager.release();  // 0 isn't in use
  REQUIRE(pager.resident_bytes() == 0);
  transport.failing = -1;
  pager.pin({1});
  REQUIRE(pager.resident(1));
}

TEST_CASE("a store that fails loses nothing") {
  FakeTransport transport;
  Pager pager(transport, lru(), 10);
  const auto event = std::make_shared<FakeEvent>();
  pager.pin({0}), pager.unpin({0}, {0}, event);
  event->fails = true;
  REQUIRE_THROWS_WITH(pager.release(), "no end");
  REQUIRE_THROWS_WITH(pager.store(), "no end");
  event->fails = false;
  transport.failing_store = 0;
  REQUIRE_THROWS_WITH(pager.store(), "no store");
  REQUIRE_THROWS_WITH(pager.release(), "no store");
  REQUIRE_THROWS_WITH(pager.pin({1}), "no store");  // needs the room
  REQUIRE((pager.resident(0) && !pager.resident(1) && pager.resident_bytes() == 10));
  transport.failing_store = -1;
  pager.pin({1});
  REQUIRE((transport.log == "f0s0r0f1" && pager.resident_bytes() == 10 && event->waits == 1));
}

TEST_CASE("a unit that stays keeps no events that are ready") {
  FakeTransport transport;
  Pager pager(transport, lru(), 100);
  std::vector<std::weak_ptr<FakeEvent>> events;
  for (int i = 0; i < 3; ++i) {
    const auto event = std::make_shared<FakeEvent>();
    event->done = i != 1;
    pager.pin({0}), pager.unpin({0}, {}, event);
    events.push_back(event);
  }
  REQUIRE((events[0].expired() && !events[1].expired() && !events[2].expired()));
  pager.release();
  REQUIRE((events[1].expired() && events[2].expired()));
}

TEST_CASE("threads that fetch at the same time share one budget") {
  FakeTransport transport;
  Pager pager(transport, lru(), 20);
  pager.pin({0}), pager.unpin({0}, {});
  Gate gate;
  transport.during_fetch = [&](int unit) {
    if (unit == 1) gate.pass();
  };
  std::thread other([&] { pager.pin({1}); });
  gate.wait_until_reached();
  pager.pin({2});  // 0 is resident, 1 arrives
  const bool gone = !pager.resident(0);
  gate.open = true;
  other.join();
  REQUIRE((gone && pager.resident_bytes() == 20 && pager.peak_bytes() == 20));
}

TEST_CASE("a thread that waits for another one's fetch tries itself when that fails") {
  FakeTransport transport;
  Pager pager(transport, lru(), 20);
  Gate gate;
  std::atomic<int> attempts{0};
  transport.failing = 1;
  transport.during_fetch = [&](int) {
    if (attempts.fetch_add(1) == 0) return gate.pass();
    transport.failing = -1;
  };
  std::string error;
  std::thread first([&] {
    try {
      pager.pin({1});
    } catch (const std::exception& e) {
      error = e.what();
    }
  });
  gate.wait_until_reached();
  std::thread second([&] { pager.pin({1}); });
  std::this_thread::sleep_for(std::chrono::milliseconds(20));  // until it waits; if it doesn't yet, nothing is lost
  gate.open = true;
  first.join(), second.join();
  REQUIRE((error == "no fetch" && transport.log == "f1" && transport.wrong == nullptr));
  REQUIRE((pager.fetches() == 1 && pager.resident_bytes() == 10));
}

TEST_CASE("many threads: a unit has one mover, and never goes while it is used") {
  FakeTransport transport;
  transport.keeps_log = false;
  Pager pager(transport, lru(), 30);
  const auto work = [&](unsigned seed) {
    std::mt19937 random(seed);
    for (int i = 0; i < 3000; ++i) {
      std::vector<int> units{static_cast<int>(random() % FakeTransport::kUnits)};
      if (const int other = static_cast<int>(random() % FakeTransport::kUnits); other != units[0]) units.push_back(other);
      pager.pin(units);
      for (const int unit : units) {
        ++transport.users[unit];
        if (!transport.here[unit]) transport.wrong = "pinned but not there";
      }
      if (i % 16 == 0) std::this_thread::yield();
      for (const int unit : units) --transport.users[unit];
      pager.unpin(units, random() % 4 == 0 ? units : std::vector<int>{});
      if (i % 100 == 0) pager.store();
      if (i % 250 == 0) pager.release();
    }
  };
  std::vector<std::thread> threads;
  for (unsigned t = 0; t < 4; ++t) threads.emplace_back(work, t);
  for (auto& thread : threads) thread.join();
  INFO((transport.wrong != nullptr ? transport.wrong.load() : ""));
  REQUIRE(transport.wrong == nullptr);
  pager.release();
  REQUIRE(pager.resident_bytes() == 0);
}

TEST_CASE("units that were written are outside of the budget where they have to stay") {
  FakeTransport transport;
  Pager pager(transport, lru(), 20, Pager::Rules{true, true});
  pager.pin({0}), pager.unpin({0}, {0});
  pager.pin({1, 2}), pager.unpin({1, 2}, {});
  REQUIRE(transport.log == "f0f1f2");  // room for two others
  pager.pin({3});
  REQUIRE(transport.log == "f0f1f2r1f3");  // not the one that was written
  REQUIRE_THROWS_AS(pager.pin({1, 2}), zero::OverBudget);
  pager.unpin({3}, {});
  pager.store();
  pager.pin({4});
  REQUIRE(transport.log == "f0f1f2r1f3r2f1s0r0r3f4");
  pager.unpin({4}, {});
}
