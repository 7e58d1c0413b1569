// Communicators whose ranks are threads, the world of one, and what waits for processes (with a forked child).
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <stdexcept>

#include <ATen/ops/empty.h>

#include "comm/room.h"
#include "comm/team.h"
#include "comm/window.h"
#include "comm_conformance.h"
#include "support/catch.h"
#include "zero/thread.h"

using namespace zero;

namespace {

template <typename Action>
std::string message_of(const Action& action) {
  try {
    action();
  } catch (const c10::Error& error) {
    return error.msg();
  }
  return {};
}

WaitPolicy patience(int milliseconds) {
  WaitPolicy policy;
  policy.timeout = std::chrono::milliseconds(milliseconds);
  return policy;
}

}  // namespace

TEST_CASE("threads conform") {
  for (int ranks = 1; ranks <= 4; ++ranks) {
    for (const auto& check : conformance::kChecks) {
      INFO(check.name << " with " << ranks << " ranks");
      REQUIRE_NOTHROW(run_ranks(ranks, [&](const Communicator& comm) {
        conformance::expect(std::string(comm.backend()) == "thread" && comm.nodes() == 1 && comm.local_size() == comm.size(),
                            comm, "who it is");
        check.run(comm);
      }));
    }
  }
}

TEST_CASE("threads conform in small chunks") {
  setenv("ZERO_STAGING_BYTES", "50000", 1);
  for (int ranks = 2; ranks <= 4; ++ranks) {
    for (const auto& check : conformance::kMoving) {
      INFO(check.name << " with " << ranks << " ranks");
      REQUIRE_NOTHROW(run_ranks(ranks, check.run));
    }
  }
  unsetenv("ZERO_STAGING_BYTES");
}

TEST_CASE("a world of one conforms") {
  for (const auto& check : conformance::kChecks) {
    INFO(check.name);
    const auto comm = make_self_communicator();
    CHECK(std::string(comm.backend()) == "self");
    REQUIRE_NOTHROW(check.run(comm));
  }
}

TEST_CASE("an unattached communicator says so") {
  CHECK_FALSE(Communicator().defined());
  CHECK(message_of([] { Communicator().barrier(); }).find("not attached") != std::string::npos);
  CHECK(message_of([] { Buffer().data(); }).find("not allocated") != std::string::npos);
}

TEST_CASE("run_ranks rethrows the cause, with its type") {
  struct Mine : std::runtime_error {
    using std::runtime_error::runtime_error;
  };
  std::atomic<int> told{0};
  CHECK_THROWS_AS(run_ranks(4,
                            [&](const Communicator& comm) {
                              if (comm.rank() == 2) throw Mine("paper jam");
                              try {
                                comm.barrier("lunch");
                              } catch (const c10::Error& error) {
                                const auto& message = error.msg();
                                if (message.find("rank 2 failed: paper jam") != std::string::npos) ++told;
                                throw;
                              }
                            }),
                  Mine);
  CHECK(told == 3);
  CHECK(message_of([] { run_ranks(0, [](const Communicator&) {}); }).find("run_ranks") != std::string::npos);
}

TEST_CASE("a rank that throws is named by those who wait in a queue, whose last handle it has dropped") {
  std::atomic<int> begun{0};
  std::atomic<int> told{0};
  const auto body = [&](const Communicator& comm) {
    const auto queue = comm.open_queue("gradients");
    const auto buffer = comm.allocate(4 * 400, "input");
    std::vector<float> output(100);
    queue.begin(at::from_blob(buffer.data(), {400}, at::kFloat), at::from_blob(output.data(), {100}, at::kFloat));
    ++begun;
    while (begun < 4) std::this_thread::yield();  // begin() would throw as well
    if (comm.rank() == 2) throw std::runtime_error("paper jam");
    const auto message = conformance::expect_error(comm, {"rank 2 failed: paper jam"}, [&] {
      queue.wait(0);  // may be possible
      queue.wait_released(0);
    });
    if (message.find("queued reduce_scatter #") != std::string::npos) ++told;
  };
  CHECK_THROWS_AS(run_ranks(4, body), std::runtime_error);
  CHECK(told == 3);
}

TEST_CASE("a timeout in a queue names the operation and who is missing") {
  const auto message = message_of([] {
    run_ranks(3, patience(300), [](const Communicator& comm) {
      const auto queue = comm.open_queue("gradients");
      const auto buffer = comm.allocate(4 * 300, "input");
      std::vector<float> output(100);
      if (comm.rank() == 1) std::this_thread::sleep_for(std::chrono::milliseconds(800));
      queue.begin(at::from_blob(buffer.data(), {300}, at::kFloat), at::from_blob(output.data(), {100}, at::kFloat), 3);
      queue.wait_released(0);
    });
  });
  CHECK(message.find("queued reduce_scatter #0 of 100 Float over 3, 'gradients': waited 300 ms") != std::string::npos);
  CHECK(message.find("the timeout, for rank 1 to begin it") != std::string::npos);
}

TEST_CASE("a timeout names who is missing") {
  const auto message = message_of([] {
    run_ranks(3, patience(200), [](const Communicator& comm) {
      if (comm.rank() == 1) std::this_thread::sleep_for(std::chrono::milliseconds(700));
      comm.barrier("lunch");
    });
  });
  CHECK(message.find("barrier #1, 'lunch'") != std::string::npos);
  CHECK(message.find("200 ms, the timeout, for rank 1 ") != std::string::npos);
}

TEST_CASE("the environment sets the default patience") {
  setenv("ZERO_TIMEOUT_SECONDS", "1.5", 1);
  CHECK(WaitPolicy().timeout == std::chrono::milliseconds(1500));
  setenv("ZERO_TIMEOUT_SECONDS", "soon", 1);
  CHECK(message_of([] { WaitPolicy(); }).find("ZERO_TIMEOUT_SECONDS=soon") != std::string::npos);
  unsetenv("ZERO_TIMEOUT_SECONDS");
}

TEST_CASE("a buffer outlives its peers' handles") {
  run_ranks(3, [](const Communicator& comm) {
    auto buffer = comm.allocate(64, "shared");
    conformance::expect(reinterpret_cast<std::uintptr_t>(buffer.data()) % 64 == 0, comm, "alignment");
    auto kept = comm.rank() == 0 ? buffer : Buffer();
    buffer = Buffer();
    comm.barrier();
    if (comm.rank() == 0) static_cast<char*>(kept.data())[63] = 1;
    // A window that only one rank still has is not used by collectives.
    std::vector<float> numbers(2000, 1.0f);
    comm.all_reduce(at::from_blob(numbers.data(), {2000}, at::kFloat));
    conformance::expect(numbers[1999] == 3.0f, comm, "sum");
  });
  CHECK(bytes_held() == 0);
}

TEST_CASE("a process that dies is noticed, one that arrived and then ended is not an error") {
  const auto memory = Mapping::create(2 * sizeof(Slot), true);
  auto* slots = reinterpret_cast<Slot*>(memory->data());
  new (slots) Slot;
  new (slots + 1) Slot;
  const auto team_of = [&](int rank, pid_t child) {
    Team::Setup setup;
    setup.rank = rank;
    setup.ranks = {0, 1};
    setup.world = 2;
    setup.backend = "mpi";
    setup.slots = {memory, slots};
    setup.pids = {getpid(), child};
    return setup;
  };
  const pid_t parent = getpid();
  const pid_t child = fork();
  REQUIRE(child >= 0);
  if (child == 0) {
    auto setup = team_of(1, getpid());
    setup.pids[0] = parent;
    Team team(std::move(setup));
    team.sync();
    team.lane(1, 0).posted.store(1);
    team.sync();
    _exit(0);  // no destructor: as if killed
  }
  Team team(team_of(0, child));
  team.sync();
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  team.sync();
  int status = 0;
  const auto began = std::chrono::steady_clock::now();
  const auto message = message_of([&] { team.sync(); });
  CHECK(std::chrono::steady_clock::now() - began < std::chrono::seconds(1));
  CHECK(message.find("rank 1 has died (process " + std::to_string(child)) != std::string::npos);
  // In a queue as well: it has begun an operation and will never sum its slice.
  CHECK_NOTHROW(team.await({[&](int member) { return member == 0 || team.lane(member, 0).posted > 0; }, nullptr, ""}));
  const auto wait = [&] {
    team.await({[&](int member) { return member == 0 || team.lane(member, 0).taken > 0; }, nullptr, ""});
  };
  CHECK(message_of(wait).find("rank 1 has died (process " + std::to_string(child)) != std::string::npos);
  CHECK(waitpid(child, &status, 0) == child);
}

TEST_CASE("a rank that did its part and then failed or left doesn't fail who still waits for that part") {
  const auto wait_for_one_that = [](bool leaves, int moment) {
    const std::shared_ptr<Slot> slots(new Slot[2], std::default_delete<Slot[]>());
    const auto team_of = [&](int rank) {
      Team::Setup setup;
      setup.rank = rank;
      setup.ranks = {0, 1};
      setup.world = 2;
      setup.slots = slots;
      return std::make_unique<Team>(std::move(setup));
    };
    const auto team = team_of(0);
    auto peer = team_of(1);
    int looks = 0;
    team->await({[&](int member) {
                   if (member == 0 || looks > moment) return true;
                   if (++looks < moment) return false;
                   ++looks;  // there, but only just after this look, and gone at once
                   if (leaves)
                     peer.reset();
                   else
                     peer->fail(1, "failed: in a later call");
                   return false;
                 },
                 nullptr, ""});
  };
  // One of the looks is the bad moment: while it spins, and at each place of the first look around after that.
  for (const bool leaves : {false, true})
    for (int moment = 1; moment <= 64; ++moment) CHECK_NOTHROW(wait_for_one_that(leaves, moment));
}

TEST_CASE("a failure that is there before a queued operation is met in that one, not in the call before") {
  std::string message;
  const auto ranks = [&] {
    zero::run_ranks(2, [&](const zero::Communicator& comm) {
      const auto queue = comm.open_queue("q");
      const auto buffer = comm.allocate(128, "b");
      comm.barrier("the call before");
      if (comm.rank() == 1) throw std::runtime_error("no more data");
      std::this_thread::sleep_for(std::chrono::milliseconds(200));
      try {
        (void)queue.begin(at::from_blob(buffer.data(), {32}, at::kFloat), at::empty({16}, at::kFloat), 1, "the next one");
      } catch (const c10::Error& error) {
        message = error.msg();
        throw;
      }
    });
  };
  CHECK_THROWS(ranks());
  INFO(message);
  CHECK(message.find("the next one") != std::string::npos);
  CHECK(message.find("no more data") != std::string::npos);
}

TEST_CASE("room is what the smallest limit leaves") {
  const auto all = available_room(0);
  CHECK(all.bytes > 0);
  setenv("ZERO_SHM_LIMIT_BYTES", "1000", 1);
  CHECK(available_room(600).bytes == 400);
  CHECK(available_room(600).limited_by == "ZERO_SHM_LIMIT_BYTES");
  CHECK(available_room(2000).bytes == 0);
  unsetenv("ZERO_SHM_LIMIT_BYTES");
  CHECK(readable_bytes(4000000) == "3.815 MiB");
}
