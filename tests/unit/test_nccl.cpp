// The NCCL communicator on doubles of the device and of the library (tests/support): what every communicator has to do, how sums are divided,
// groups, memory. Fences and queues are in test_nccl_fences.cpp, failures in test_nccl_failures.cpp.
#include <ATen/ops/from_blob.h>

#include <cstdlib>
#include <limits>

#include "comm/nccl/averaging.h"
#include "comm/nccl/choose_device.h"
#include "comm_conformance.h"
#include "nccl_runs.h"
#include "support/catch.h"

using namespace zero;
using namespace fake::runs;

namespace {

const conformance::Check kChecks[] = {
    {"reductions", conformance::reductions},
    {"complex numbers", conformance::complex_numbers},
    {"gathers", conformance::gathers},
    {"broadcasts", conformance::broadcasts},
    {"messages", conformance::messages},
    {"traffic", conformance::traffic},
    {"splits", conformance::splits},
    {"queues: input reused", conformance::queue_reuse},
    {"queues: traffic", conformance::queue_traffic},
};

}  // namespace

TEST_CASE("communicators over NCCL conform") {
  for (int ranks = 1; ranks <= 3; ++ranks) {
    for (const auto& check : kChecks) {
      INFO(check.name << " with " << ranks << " ranks");
      Run how;
      how.ranks = ranks;
      // Divided by 3 a float16 or bfloat16 is rounded twice: compared within a tolerance. One rank divides by 1 only.
      const int nodes = ranks > 1 ? ranks + 1 : 1;
      if (ranks == 1 && std::string(check.name) == "reductions") continue;
      REQUIRE_NOTHROW(run_nccl(how, [&](const Communicator& comm, fake::FakeDevice& device) {
        conformance::expect(std::string(comm.backend()) == "nccl" && comm.device().is_cpu(), comm, "who it is");
        check.run(fake::synced(comm, device, nodes));
      }));
      CHECK(fake::nccl_state().aborts == 0);
    }
  }
}

TEST_CASE("with calls compared, mistakes are agreed on and the communicator works on") {
  setenv("ZERO_NCCL_COMPARE", "1", 1);
  for (
      const auto& check :
      {conformance::Check{
           "mismatches",
           [](const Communicator& comm) {
             const bool other = comm.rank() == comm.size() - 1;
             std::vector<float> numbers(64, 1.0f);
             const auto tensor = [&](std::int64_t count) { return at::from_blob(numbers.data(), {count}, at::kFloat); };
             conformance::expect_error(
                 comm, {"rank 0 calls all_reduce", "of 3 Float", "rank 2 calls all_reduce", "of 4 Float", "'flag'"},
                 [&] { comm.all_reduce(tensor(other ? 4 : 3), 1, "flag"); });
             conformance::expect_error(comm, {"from rank 0", "from rank 2"}, [&] { comm.broadcast(tensor(3), other ? 2 : 0); });
             comm.barrier("still in step");
           }},
       conformance::Check{"bad arguments", conformance::bad_arguments}}) {
    INFO(check.name);
    Run how;
    how.ranks = 3;
    CHECK_NOTHROW(
        run_nccl(how, [&](const Communicator& comm, fake::FakeDevice& device) { check.run(fake::synced(comm, device, 1)); }));
    CHECK(fake::nccl_state().aborts == 0);
  }
  unsetenv("ZERO_NCCL_COMPARE");
}

TEST_CASE("without that a wrong argument on one rank reaches the others as its failure") {
  std::atomic<int> told{0};
  Run how;
  how.ranks = 3;
  run_nccl(how, [&](const Communicator& comm, fake::FakeDevice& device) {
    std::vector<std::int32_t> whole(16);
    std::vector<float> numbers(16);
    const auto message = message_of([&] {
      if (comm.rank() == 1) comm.all_reduce(at::from_blob(whole.data(), {16}, at::kInt), 1, "counts");
      for (int i = 0; i < 2000; ++i) {
        comm.all_reduce(at::from_blob(numbers.data(), {16}, at::kFloat), 1, "counts");
        nap(1);
      }
    });
    if (contains(message, "cannot add") && contains(message, "'counts'") && contains(message, "(nccl)")) ++told;
    device.synchronize();
    conformance::expect(message_of([&] { comm.barrier(); }) == message, comm, "it isn't repeated");
  });
  CHECK(told == 3);
  CHECK(fake::nccl_state().aborts == 3);
}

// --- fences ---------------------------------------------------------------------------------------------------------------------

TEST_CASE("how a sum is divided") {
  using kernels::DType;
  for (const auto type : {DType::f32, DType::f64, DType::bf16, DType::f16}) {
    CHECK(averaging(type, 4, 4, true).by_nccl);
    CHECK_FALSE(averaging(type, 3, 3, true).by_nccl);
    CHECK_FALSE(averaging(type, 4, 2, true).by_nccl);
    CHECK_FALSE(averaging(type, 1, 1, true).by_nccl);
    const auto plain = averaging(type, 1, 4, true);
    CHECK((plain.before == 1 && plain.after == 1));
  }
  CHECK(averaging(DType::f32, 3, 3, true).after == 3);
  CHECK(averaging(DType::bf16, 6, 3, true).before == 1);
  // float16: a power of two before, no less than the divisor, and the rest after.
  const auto three = averaging(DType::f16, 3, 3, true);
  CHECK((three.before == 0.25 && three.after == 0.75));
  const auto eight = averaging(DType::f16, 8, 2, true);
  CHECK((eight.before == 0.125 && eight.after == 1));
  const auto negative = averaging(DType::f16, -3, 3, true);
  CHECK((negative.before == 0.25 && negative.after == -0.75));
  CHECK(averaging(DType::f16, 3, 3, false).after == 3);
  CHECK(averaging(DType::f16, 0.5, 3, true).after == 0.5);
  CHECK(averaging(DType::f16, std::numeric_limits<double>::infinity(), 3, true).before == 1);
  CHECK(averaging(DType::f16, 1e30, 3, true).before == std::ldexp(1.0, -24));
}

TEST_CASE("averages of large float16 don't overflow, where the library can help it") {
  for (const bool can : {true, false}) {
    for (const int ranks : {2, 3}) {
      Run how;
      how.ranks = ranks;
      if (!can) how.missing = {"ncclRedOpCreatePreMulSum"};
      run_nccl(how, [&](const Communicator& comm, fake::FakeDevice& device) {
        std::vector<c10::Half> numbers(64, c10::Half(48000.0f));
        comm.all_reduce(at::from_blob(numbers.data(), {64}, at::kHalf), 2.0 * ranks);
        device.synchronize();
        const auto got = static_cast<float>(numbers[63]);
        conformance::expect(can ? got == 24000.0f : std::isinf(got), comm, "average ", got);
      });
      CHECK(fake::nccl_state().scaled == (can ? ranks : 0));
    }
  }
}

TEST_CASE("the average over a power of two of ranks is NCCL's own, and has the bits of the threads'") {
  std::vector<float> expected(1000);
  const auto fill = [](std::vector<float>& numbers, int rank) {
    for (std::size_t i = 0; i < numbers.size(); ++i) numbers[i] = conformance::value<float>(rank, static_cast<std::int64_t>(i));
  };
  for (const int ranks : {2, 3}) {
    run_ranks(ranks, [&](const Communicator& comm) {
      std::vector<float> numbers(1000);
      fill(numbers, comm.rank());
      comm.all_reduce(at::from_blob(numbers.data(), {1000}, at::kFloat), ranks);
      if (comm.rank() == 0) expected = numbers;
    });
    Run how;
    how.ranks = ranks;
    run_nccl(how, [&](const Communicator& comm, fake::FakeDevice& device) {
      std::vector<float> numbers(1000);
      fill(numbers, comm.rank());
      comm.all_reduce(at::from_blob(numbers.data(), {1000}, at::kFloat), ranks);
      device.synchronize();
      conformance::expect(numbers == expected, comm, "other bits");
    });
    CHECK(fake::nccl_state().averages == (ranks == 2 ? 2 : 0));
    CHECK(fake::nccl_state().sums == (ranks == 2 ? 0 : 3));
  }
}

TEST_CASE("a group of calls goes to NCCL at once, and a dropped one breaks the communicator") {
  Run how;
  run_nccl(how, [](const Communicator& comm, fake::FakeDevice& device) {
    std::vector<std::vector<float>> buckets(5, std::vector<float>(100, 3.0f));
    Group group(*comm.impl());
    for (auto& bucket : buckets) comm.all_reduce(at::from_blob(bucket.data(), {100}, at::kFloat), 3);
    device.synchronize();
    conformance::expect(buckets[0][0] == 3.0f, comm, "sent before the end");
    group.end();
    device.synchronize();
    for (const auto& bucket : buckets) conformance::expect(bucket[99] == 2.0f, comm, "sum");
  });
  CHECK(fake::nccl_state().groups == 2);
  CHECK(fake::nccl_state().in_groups == 10);
  run_nccl(how, [](const Communicator& comm, fake::FakeDevice&) {
    std::vector<float> numbers(100);
    if (comm.rank() == 0) {
      Group group(*comm.impl());
      comm.all_reduce(at::from_blob(numbers.data(), {100}, at::kFloat));
    }
    conformance::expect_error(comm, {"an exception ended the group"}, [&] { comm.barrier(); });
  });
}

// --- memory and several communicators ---------------------------------------------------------------------------------------------

TEST_CASE("Buffers are NCCL's memory, registered, zero-filled, and outlive their communicator") {
  const std::vector<std::string> no_memory{"ncclMemAlloc"};
  for (const auto& missing : {std::vector<std::string>{}, no_memory, std::vector<std::string>{"ncclCommRegister"}}) {
    Run how;
    how.missing = missing;
    std::atomic<int> others{0};
    run_nccl(how, [&](const Communicator& comm, fake::FakeDevice& device) {
      Buffer kept;
      {
        const auto copy = comm.duplicate();
        kept = copy.allocate(4000, "kept");
        device.synchronize();
        conformance::expect(kept.bytes() == 4000 && static_cast<const char*>(kept.data())[3999] == 0, comm, "zeros");
        others += device.live_allocations();
        std::fill_n(static_cast<float*>(kept.data()), 1000, 1.0f);
        copy.all_reduce(floats(kept, 0, 1000));
        auto brief = copy.allocate(8000, "freed while in use");
        copy.all_reduce(floats(brief, 0, 2000));
      }
      conformance::expect(static_cast<const float*>(kept.data())[999] == 2.0f, comm, "its end waits for what is under way");
    });
    const auto& state = fake::nccl_state();
    const bool nccls = missing != no_memory;
    CHECK(state.allocated == (nccls ? 4 : 0));
    CHECK(others == (nccls ? 0 : 2));
    CHECK(state.registered == (missing.empty() ? 4 : 0));
    CHECK(state.deregistered == (missing.empty() ? 2 : 0));  // the end of a communicator does the rest
  }
}

TEST_CASE("where NCCL has no memory the device's allocator is asked; where that has none all ranks hear of it") {
  Run how;
  run_nccl(how, [](const Communicator& comm, fake::FakeDevice& device) {
    fake::nccl_state().memory_fails = true;
    const auto buffer = comm.allocate(4000, "numbers");
    conformance::expect(device.live_allocations() == 1, comm, "the device's");
    if (comm.rank() == 1) device.room = 5000;
    conformance::expect_error(comm, {"allocate", "'the moon'", "rank 1", "out of memory"},
                              [&] { comm.allocate(6000, "the moon"); });
    comm.barrier("still in step");
  });
  CHECK(fake::nccl_state().aborts == 0);
}

TEST_CASE("several communicators at once keep to themselves") {
  Run how;
  how.ranks = 3;
  run_nccl(how, [](const Communicator& comm, fake::FakeDevice& device) {
    const auto copy = comm.duplicate();
    const auto pair = comm.split(comm.rank() < 2 ? 0 : -1, 0);
    conformance::expect(pair.defined() == (comm.rank() < 2), comm, "a split");
    std::vector<float> a(1000, 1.0f);
    std::vector<float> b(1000, 10.0f);
    std::vector<float> c(1000, 100.0f);
    for (int i = 0; i < 5; ++i) {
      comm.all_reduce(at::from_blob(a.data(), {1000}, at::kFloat), 3);
      copy.all_reduce(at::from_blob(b.data(), {1000}, at::kFloat), 3);
      if (pair.defined()) pair.all_reduce(at::from_blob(c.data(), {1000}, at::kFloat), 2);
    }
    device.synchronize();
    conformance::expect(a[999] == 1.0f && b[999] == 10.0f && c[999] == 100.0f, comm, "sums");
  });
  CHECK(fake::nccl_state().inits == 8);
  CHECK(fake::nccl_state().destroys == 8);
}

TEST_CASE("ranks of a host count through its devices; the environment overrules it") {
  const auto chosen = [](int ranks, int devices) {
    std::vector<int> indices(static_cast<std::size_t>(ranks));
    run_ranks(ranks, patience(5000), [&](const Communicator& control) {
      indices[static_cast<std::size_t>(control.rank())] = device_of(control, devices).index();
    });
    return indices;
  };
  CHECK(chosen(4, 4) == std::vector<int>{0, 1, 2, 3});
  CHECK(chosen(3, 2) == std::vector<int>{0, 1, 0});
  CHECK(contains(message_of([&] { chosen(2, 0); }), "sees no GPU"));
  for (const char* value : {"1", "cuda:1"}) {
    setenv("ZERO_DEVICE", value, 1);
    CHECK(chosen(2, 2) == std::vector<int>{1, 1});
  }
  CHECK(contains(message_of([&] { chosen(2, 1); }), "only 1"));
  for (const char* value : {"cpu", "cuda:", "-1", "cuda:x"}) {
    setenv("ZERO_DEVICE", value, 1);
    CHECK(contains(message_of([&] { chosen(2, 2); }), "must name a GPU"));
  }
  unsetenv("ZERO_DEVICE");
}

#ifdef ZERO_TEST_NCCL_LIBRARY
TEST_CASE("NCCL itself fills the table, without a GPU") {
  const auto api = load_nccl({ZERO_TEST_NCCL_LIBRARY});
  CHECK(api.version >= NCCL_VERSION_CODE / 100 * 100);
  CHECK(api.registers());
  CHECK(api.allocates());
  CHECK(api.RedOpCreatePreMulSum != nullptr);
  CHECK(contains(api.library, "libnccl"));
  CHECK(contains(api.GetErrorString(ncclInvalidUsage), "usage"));
}
#endif
