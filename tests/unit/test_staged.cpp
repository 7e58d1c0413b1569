// Tensors of a device over a communicator of the CPU: what every communicator has to do, in small chunks too, the fences, and errors.
#include <ATen/ops/from_blob.h>

#include <cstdlib>

#include "comm/staged_impl.h"
#include "comm_conformance.h"
#include "nccl_ranks.h"
#include "support/catch.h"
#include "support/fake_cuda.h"
#include "zero/nccl.h"
#include "zero/staged.h"
#include "zero/thread.h"

using namespace zero;

namespace {

WaitPolicy patience(int milliseconds) {
  WaitPolicy policy;
  policy.timeout = std::chrono::milliseconds(milliseconds);
  return policy;
}

using Body = std::function<void(const Communicator&, fake::FakeDevice&)>;

void run_staged(int ranks, const Body& body, const std::function<void(fake::FakeDevice&)>& prepare = {}) {
  run_ranks(ranks, patience(20000), [&](const Communicator& control) {
    const auto device = std::make_shared<fake::FakeDevice>(0, static_cast<unsigned>(control.rank() + 1));  // all share one
    if (prepare) prepare(*device);
    {
      const auto comm = StagedImpl::make(control, [&] { return device; });
      body(comm, *device);
      device->synchronize();
    }
    device->synchronize();
    conformance::expect(
        device->live_allocations() == 0 && device->live_events() == 0 && device->live_streams() == 0 && device->pinned() == 0,
        control, "something of the device is left over");
  });
}

const conformance::Check kChecks[] = {
    {"reductions", conformance::reductions},
    {"complex numbers", conformance::complex_numbers},
    {"gathers", conformance::gathers},
    {"broadcasts", conformance::broadcasts},
    {"messages", conformance::messages},
    {"mismatches", conformance::mismatches},
    {"bad arguments", conformance::bad_arguments},
    {"failures", conformance::failures},
    {"traffic", conformance::traffic},
    {"splits", conformance::splits},
    {"queues", conformance::queues},
    {"queues: input reused", conformance::queue_reuse},
    {"queues: traffic", conformance::queue_traffic},
};

}  // namespace

TEST_CASE("staged communicators conform, bit by bit") {
  for (int ranks = 1; ranks <= 3; ++ranks) {
    for (const auto& check : kChecks) {
      INFO(check.name << " with " << ranks << " ranks");
      const Body body = [&](const Communicator& comm, fake::FakeDevice& device) { check.run(fake::synced(comm, device, 1)); };
      REQUIRE_NOTHROW(run_staged(
          ranks, body, [](fake::FakeDevice& device) { device.default_stream().dawdle(std::chrono::microseconds(20)); }));
    }
  }
}

TEST_CASE("staged communicators conform in small chunks, and without pinned memory") {
  setenv("ZERO_STAGING_BYTES", "5000", 1);
  for (const auto& check : conformance::kMoving) {
    INFO(check.name);
    const Body body = [&](const Communicator& comm, fake::FakeDevice& device) { check.run(fake::synced(comm, device, 1)); };
    REQUIRE_NOTHROW(run_staged(3, body, [](fake::FakeDevice& device) {
      device.default_stream().dawdle(std::chrono::microseconds(0));
      device.can_pin = false;
    }));
  }
  unsetenv("ZERO_STAGING_BYTES");
}

namespace {

// A sum whose input is written late by the compute stream, and whose result the compute stream copies right after.
float late_sum(fake::Omit omit) {
  float result = -1;
  run_staged(2, [&](const Communicator& comm, fake::FakeDevice& device) {
    const auto warm = comm.allocate(4000, "numbers");
    auto* numbers = static_cast<float*>(warm.data());
    const auto tensor = at::from_blob(numbers, {1000}, at::kFloat);
    device.synchronize();
    device.omit = omit;
    auto& compute = device.compute();
    compute.push([=] {
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
      std::fill(numbers, numbers + 1000, 1.0f);
    });
    // The private stream is slower than the host and the compute stream, which would read too early.
    comm.all_reduce(tensor);
    float seen = -1;
    compute.push([&seen, numbers] { seen = numbers[999]; });
    compute.synchronize();
    device.omit = fake::Omit::nothing;
    device.synchronize();
    if (comm.rank() == 0) result = seen;
    comm.barrier();
  });
  return result;
}

}  // namespace

TEST_CASE("staged copies wait for the compute stream") {
  CHECK(late_sum(fake::Omit::nothing) == 2.0f);
  if (fake::kMayRace) CHECK(late_sum(fake::Omit::waits_of_private_streams) != 2.0f);  // the test sees a fence that isn't there
}

TEST_CASE("the compute stream waits for the staged copies back") {
  const auto seen = [](fake::Omit omit) {
    float result = -1;
    run_staged(1, [&](const Communicator& comm, fake::FakeDevice& device) {
      const auto buffer = comm.allocate(4000, "numbers");
      auto* numbers = static_cast<float*>(buffer.data());
      device.compute().push([=] { std::fill(numbers, numbers + 1000, 4.0f); });
      device.synchronize();
      device.default_stream().dawdle(std::chrono::microseconds(0));
      int copies = 0;
      device.on_copy = [&] {
        if (++copies == 2) device.private_stream().push([] { std::this_thread::sleep_for(std::chrono::milliseconds(100)); });
      };
      device.omit = omit;
      comm.all_reduce(at::from_blob(numbers, {1000}, at::kFloat), 2);
      float at_once = -1;
      device.compute().push([&at_once, numbers] { at_once = numbers[999]; });
      device.compute().synchronize();
      device.synchronize();
      result = at_once;
    });
    return result;
  };
  CHECK(seen(fake::Omit::nothing) == 2.0f);
  if (fake::kMayRace) CHECK(seen(fake::Omit::waits_of_the_compute_stream) != 2.0f);
}

TEST_CASE("an error of one rank's device reaches the others by name") {
  std::atomic<int> told{0};
  const auto body = [&](const Communicator& comm, fake::FakeDevice& device) {
    std::vector<float> numbers(2000, 1.0f);
    const auto tensor = at::from_blob(numbers.data(), {2000}, at::kFloat);
    comm.all_reduce(tensor);
    device.synchronize();
    if (comm.rank() == 1) device.on_copy = [] { throw std::runtime_error("fell off the bus"); };
    try {
      comm.all_reduce(tensor, 1, "lost");
    } catch (const c10::Error& error) {
      if (error.msg().find("rank 1 failed: fell off the bus") != std::string::npos) ++told;
    } catch (const std::runtime_error&) {
      conformance::expect(comm.rank() == 1, comm, "another rank's exception");
    }
    device.on_copy = {};
    device.synchronize();
    conformance::expect_error(comm, {"fell off the bus"}, [&] { comm.barrier(); });
  };
  REQUIRE_NOTHROW(run_staged(3, body));
  CHECK(told == 2);
}

TEST_CASE("too little memory on one device is an error on all, and the communicator works on") {
  run_staged(3, [](const Communicator& comm, fake::FakeDevice& device) {
    if (comm.rank() == 2) device.room = 1000;
    conformance::expect_error(comm, {"'the moon'", "rank 2", "out of memory"}, [&] { comm.allocate(4000, "the moon"); });
    conformance::expect(comm.allocate(100, "a pebble").bytes() == 100, comm, "a small buffer");
  });
}

TEST_CASE("a device that one rank can't have is an error on all") {
  run_ranks(3, patience(5000), [](const Communicator& control) {
    conformance::expect_error(control, {"rank 1: no such device"}, [&] {
      StagedImpl::make(control, [&]() -> std::shared_ptr<DeviceApi> {
        if (control.rank() == 1) ZERO_FAIL("no such device");
        return std::make_shared<fake::FakeDevice>(0);
      });
    });
    control.barrier();
  });
}

TEST_CASE("without a GPU the makers say so, on every rank") {
  if (std::getenv("CUDA_VISIBLE_DEVICES") == nullptr) setenv("CUDA_VISIBLE_DEVICES", "", 1);
  run_ranks(2, patience(5000), [](const Communicator& control) {
    // A build without CUDA names the option, one with it the missing GPU.
    const auto says = [&](const std::function<void()>& action) {
      const auto message = conformance::expect_error(control, {"GPU", "CUDA"}, [&] {
        try {
          action();
        } catch (const c10::Error& error) {
          ZERO_FAIL(error.msg(), " GPU");  // the word is in one of the two messages only
        }
      });
      conformance::expect(
          message.find("ZERO_WITH_CUDA") != std::string::npos || message.find("sees no GPU") != std::string::npos, control,
          message);
    };
    says([&] { make_staged_communicator(control, c10::Device(c10::DeviceType::CUDA, 0)); });
    says([&] { make_nccl_communicator(control); });
    says([&] { make_nccl_communicator(control, c10::Device(c10::DeviceType::CUDA, 0)); });
    control.barrier();
  });
}
