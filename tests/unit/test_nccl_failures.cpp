// All the ways in which NCCL, a device or a rank may fail under an NCCL communicator, by the doubles of tests/support. See test_nccl.cpp.
#include <ATen/ops/from_blob.h>

#include "nccl_runs.h"
#include "support/catch.h"

using namespace zero;
using namespace fake::runs;

TEST_CASE("a communicator that doesn't come about names the ranks, and is aborted once by each") {
  fake::reset_nccl();
  std::atomic<int> told{0};
  fake::nccl_state().never_initialised = 1;
  const auto api = fake::nccl_api();
  run_ranks(3, patience(300), [&](const Communicator& control) {
    const auto message = message_of([&] {
      NcclImpl::make(
          control, [&] { return std::make_shared<fake::FakeDevice>(control.rank()); }, [&] { return api; });
    });
    if (contains(message, "ranks 0, 1 and 2") && contains(message, "300 ms")) ++told;
    control.barrier("the control works on");
  });
  CHECK(told == 3);
  CHECK(fake::nccl_state().aborts == 3);
  CHECK(fake::nccl_state().live == 0);
}

TEST_CASE("a rank that stays away is named") {
  fake::reset_nccl();
  std::atomic<int> told{0};
  const auto api = fake::nccl_api();
  std::atomic<int> asked{0};
  CHECK_THROWS(run_ranks(3, patience(300), [&](const Communicator& control) {
    auto device = std::make_shared<fake::FakeDevice>(control.rank());
    // Between agreeing and joining: its double of NCCL doesn't return.
    NcclApi mine = api;
    if (control.rank() == 2) {
      mine.CommInitRankConfig = [](ncclComm_t*, int, ncclUniqueId, int, ncclConfig_t*) {
        std::this_thread::sleep_for(std::chrono::milliseconds(2000));
        return ncclSystemError;
      };
    }
    try {
      NcclImpl::make(
          control, [&] { return device; }, [&] { return mine; });
    } catch (const c10::Error& error) {
      ++asked;
      if (control.rank() != 2 && contains(error.msg(), "for rank 2")) ++told;
      throw;
    }
  }));
  CHECK(asked == 3);
  CHECK(told == 2);
  CHECK(fake::nccl_state().live == 0);
}

TEST_CASE("NCCL's refusal on one rank reaches the others at once") {
  fake::reset_nccl();
  fake::nccl_state().init_fails_on = 1;
  std::atomic<int> told{0};
  const auto api = fake::nccl_api();
  const auto began = std::chrono::steady_clock::now();
  CHECK_THROWS(run_ranks(3, patience(15000), [&](const Communicator& control) {
    try {
      NcclImpl::make(
          control, [&] { return std::make_shared<fake::FakeDevice>(control.rank()); }, [&] { return api; });
    } catch (const c10::Error& error) {
      if (contains(error.msg(), "ncclCommInitRankConfig: unhandled system error: the double says so")) ++told;
      throw;
    }
  }));
  CHECK(told == 3);
  CHECK(std::chrono::steady_clock::now() - began < std::chrono::seconds(5));
  CHECK(fake::nccl_state().live == 0);
}

TEST_CASE("an error that NCCL reports later breaks the communicator, everywhere") {
  std::atomic<int> told{0};
  Run how;
  how.ranks = 3;
  run_nccl(how, [&](const Communicator& comm, fake::FakeDevice& device) {
    std::vector<float> numbers(100, 1.0f);
    const auto tensor = at::from_blob(numbers.data(), {100}, at::kFloat);
    comm.all_reduce(tensor);
    device.synchronize();
    comm.barrier();
    if (comm.rank() == 1) fake::nccl_state().async_error_on = 1;
    const auto message = message_of([&] {
      for (int i = 0; i < 2000; ++i) {
        comm.all_reduce(tensor, 1, "lost");
        nap(1);
      }
    });
    if (contains(message, "'lost'") && contains(message, "remote process exited") &&
        contains(message, comm.rank() == 1 ? "rank 1 of 3 (nccl): all_reduce #" : "rank 1 failed: NCCL has met an error"))
      ++told;
    conformance::expect(message_of([&] { comm.all_reduce(tensor); }) == message, comm, "it isn't repeated");
    device.synchronize();
  });
  CHECK(told == 3);
  CHECK(fake::nccl_state().aborts == 3);
  CHECK(fake::nccl_state().destroys == 0);
}

TEST_CASE("a collective that never ends is noticed by a later call, after the timeout") {
  std::atomic<int> told{0};
  Run how;
  how.timeout = 300;
  run_nccl(how, [&](const Communicator& comm, fake::FakeDevice& device) {
    std::vector<float> numbers(100, 1.0f);
    fake::nccl_state().stuck = true;
    comm.all_reduce(at::from_blob(numbers.data(), {100}, at::kFloat), 1, "bucket 3");
    nap(600);
    const auto message = message_of([&] { comm.broadcast(at::from_blob(numbers.data(), {100}, at::kFloat), 0); });
    if (contains(message, "all_reduce #1 of 100 Float, 'bucket 3'") && contains(message, "300 ms")) ++told;
    device.synchronize();  // the abort has ended it
  });
  CHECK(told >= 1);  // the other may hear of it as its peer's failure
  CHECK(fake::nccl_state().aborts == 2);
}

TEST_CASE("a call that NCCL starts late is waited for, one that it never starts isn't") {
  Run how;
  run_nccl(how, [&](const Communicator& comm, fake::FakeDevice& device) {
    fake::nccl_state().slow_start = true;
    std::vector<float> numbers(100, 1.0f);
    for (int i = 0; i < 5; ++i) comm.all_reduce(at::from_blob(numbers.data(), {100}, at::kFloat), 2);
    device.synchronize();
    conformance::expect(numbers[99] == 1.0f, comm, "sum");
  });
  how.timeout = 300;
  run_nccl(how, [&](const Communicator& comm, fake::FakeDevice& device) {
    comm.barrier();
    fake::nccl_state().never_starts = true;
    std::vector<float> numbers(100, 1.0f);
    conformance::expect_error(comm, {"all_reduce #2 of 100 Float, 'bucket 3'", "ncclAllReduce"},
                              [&] { comm.all_reduce(at::from_blob(numbers.data(), {100}, at::kFloat), 1, "bucket 3"); });
    device.synchronize();
  });
  CHECK(fake::nccl_state().aborts == 2);
}

TEST_CASE("a peer that fails while this rank waits for NCCL or its device is named") {
  std::atomic<int> told{0};
  Run how;
  run_nccl(how, [&](const Communicator& comm, fake::FakeDevice& device) {
    std::vector<float> numbers(100, 1.0f);
    comm.barrier();
    if (comm.rank() == 0) fake::nccl_state().never_starts = true;
    if (comm.rank() == 1) {
      nap(100);
      comm.fail("no more paper");
      return;
    }
    const auto message =
        conformance::expect_error(comm, {"rank 0 of 2 (nccl): all_reduce", "rank 1 failed: no more paper"},
                                  [&] { comm.all_reduce(at::from_blob(numbers.data(), {100}, at::kFloat), 1, "lost"); });
    if (contains(message, "'lost'")) ++told;
    device.synchronize();
  });
  CHECK(told == 1);
  CHECK(fake::nccl_state().aborts == 2);  // also the rank that has nothing under way: it must not wait for the other
}

// Whatever its device is about when the communicator ends: nobody waits in ncclCommFinalize for a rank that doesn't come.
TEST_CASE("a rank that has failed, or whose peer has, ends its communicator by itself") {
  for (const bool busy : {false, true}) {
    std::atomic<bool> failed{false};
    std::vector<std::vector<float>> numbers(3,
                                            std::vector<float>(100, 1.0f));  // outlives the ranks: the device may still write
    Run how;
    how.ranks = 3;
    run_nccl(how, [&](const Communicator& comm, fake::FakeDevice& device) {
      comm.all_reduce(at::from_blob(numbers[static_cast<std::size_t>(comm.rank())].data(), {100}, at::kFloat));
      if (!busy) device.synchronize();
      comm.barrier();
      if (comm.rank() == 1) {
        comm.fail("no more paper");
        failed = true;
      }
      while (!failed) nap(1);
    });
    INFO("busy " << busy);
    CHECK(fake::nccl_state().aborts == 3);
    CHECK(fake::nccl_state().finalizes == 0);
  }
}

TEST_CASE("an exception that unwinds the communicator aborts it and reaches the peers") {
  fake::reset_nccl();
  const auto api = fake::nccl_api();
  std::atomic<int> told{0};
  const auto ranks = [&] {
    run_ranks(2, patience(15000), [&](const Communicator& control) {
      const auto device = std::make_shared<fake::FakeDevice>(control.rank());
      const auto comm = NcclImpl::make(
          control, [&] { return device; }, [&] { return api; });
      const auto buffer = comm.allocate(4000, "numbers");
      if (control.rank() == 1) throw std::runtime_error("paper jam");
      comm.all_reduce(floats(buffer, 0, 1000));  // which rank 1 never joins
      const auto message = message_of([&] {
        for (int i = 0; i < 2000; ++i) {
          comm.all_reduce(floats(buffer, 0, 1000));
          nap(1);
        }
      });
      if (contains(message, "rank 1 failed")) ++told;
    });
  };
  CHECK_THROWS_AS(ranks(), std::runtime_error);
  CHECK(told == 1);
  CHECK(fake::nccl_state().aborts == 2);
  CHECK(fake::nccl_state().live == 0);
}

// --- bringing it up -----------------------------------------------------------------------------------------------------------------

TEST_CASE("two ranks on one device are refused on every rank, before NCCL is asked") {
  fake::reset_nccl();
  const auto api = fake::nccl_api();
  run_ranks(3, patience(5000), [&](const Communicator& control) {
    conformance::expect_error(control, {"ranks 0 and 2 use one GPU", "fake GPU 0", "make_staged_communicator"}, [&] {
      NcclImpl::make(
          control, [&] { return std::make_shared<fake::FakeDevice>(control.rank() % 2); }, [&] { return api; });
    });
    control.barrier();
  });
  CHECK(fake::nccl_state().inits == 0);
}

TEST_CASE("a library that doesn't fit, or isn't there, is one error that says what to do") {
  fake::reset_nccl();
  const auto older = message_of([] { fake::nccl_api({}, NCCL_VERSION_CODE - 100); });
  CHECK(contains(older, "is loaded (a double), but this build needs 2."));
  CHECK(contains(older, "ZERO_NCCL_INCLUDE"));
  CHECK(contains(message_of([] { fake::nccl_api({}, 30000); }), "NCCL 3.0.0"));
  CHECK_NOTHROW(fake::nccl_api({}, NCCL_VERSION_CODE + 100));
  CHECK(contains(message_of([] { fake::nccl_api({"ncclAllGather"}); }), "has no ncclAllGather"));
  CHECK(contains(message_of([] { load_nccl({"libnccl-that-nobody-has.so.2"}); }), "LD_LIBRARY_PATH"));
  run_ranks(3, patience(5000), [&](const Communicator& control) {
    conformance::expect_error(control, {"rank 1: zero: NCCL", "ZERO_NCCL_INCLUDE"}, [&] {
      NcclImpl::make(
          control, [&] { return std::make_shared<fake::FakeDevice>(control.rank()); },
          [&] {
            static std::mutex mutex;  // the double's version is everybody's
            const std::lock_guard<std::mutex> lock(mutex);
            auto api = fake::nccl_api({}, control.rank() == 1 ? NCCL_VERSION_CODE - 100 : 0);
            return api;
          });
    });
    conformance::expect_error(control, {"rank 0 has NCCL", "but rank 2 has"}, [&] {
      NcclImpl::make(
          control, [&] { return std::make_shared<fake::FakeDevice>(control.rank()); },
          [&] {
            NcclApi api;
            api.version = NCCL_VERSION_CODE + (control.rank() == 2 ? 1 : 0);
            return api;
          });
    });
    control.barrier();
  });
  CHECK(fake::nccl_state().inits == 0);
}
