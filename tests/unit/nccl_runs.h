// Runs ranks on doubles of NCCL and of its devices, each with a device of its own. For test_nccl*.cpp.
#pragma once

#include <ATen/ops/from_blob.h>

#include <functional>
#include <string>
#include <vector>

#include "comm/nccl/nccl_impl.h"
#include "comm_conformance.h"
#include "nccl_ranks.h"
#include "support/fake_nccl.h"
#include "zero/thread.h"

namespace fake::runs {

using namespace zero;

inline WaitPolicy patience(int milliseconds) {
  WaitPolicy policy;
  policy.timeout = std::chrono::milliseconds(milliseconds);
  return policy;
}

template <typename Action>
std::string message_of(const Action& action) {
  try {
    action();
  } catch (const c10::Error& error) {
    return error.msg();
  }
  return {};
}

inline bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

using Body = std::function<void(const Communicator&, fake::FakeDevice&)>;

struct Run {
  int ranks = 2;
  int timeout = 15000;
  std::vector<std::string> missing;  ///< symbols
};

// Each rank with a device of its own. Nothing may be left over.
inline void run_nccl(const Run& how, const Body& body) {
  fake::reset_nccl();
  const auto api = fake::nccl_api(how.missing);
  run_ranks(how.ranks, patience(how.timeout), [&](const Communicator& control) {
    const auto device = std::make_shared<fake::FakeDevice>(control.rank(), static_cast<unsigned>(control.rank() + 1));
    {
      const auto comm = NcclImpl::make(
          control, [&] { return device; }, [&] { return api; });
      body(comm, *device);
    }
    device->synchronize();
    conformance::expect(device->live_allocations() == 0 && device->live_events() == 0 && device->live_streams() == 0, control,
                        "something of the device is left over: ", device->live_allocations(), ' ', device->live_events(), ' ',
                        device->live_streams());
  });
  const auto& state = fake::nccl_state();
  if (state.live.load() != 0 || state.allocated.load() != state.freed.load() ||
      state.aborts.load() + state.destroys.load() != state.inits.load())
    throw std::runtime_error("something of NCCL is left over");
}

inline at::Tensor floats(const Buffer& buffer, std::int64_t begin, std::int64_t count) {
  return at::from_blob(static_cast<float*>(buffer.data()) + begin, {count}, at::kFloat);
}

inline void nap(int milliseconds) { std::this_thread::sleep_for(std::chrono::milliseconds(milliseconds)); }

}  // namespace fake::runs
