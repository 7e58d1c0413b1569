// See device_windows.h.
#include "comm/nccl/device_windows.h"

#include <algorithm>
#include <utility>

#include "comm/communicator_impl.h"
#include "comm/errors.h"
#include "comm/room.h"
#include "core/check.h"

namespace zero {

std::shared_ptr<Buffer::Impl> DeviceWindows::allocate(const Communicator& control, const Call& call, const std::string& here,
                                                      const std::function<std::shared_ptr<Mapping>()>& make) {
  auto window = std::make_shared<Buffer::Impl>();
  window->bytes = call.count;
  std::string problem;
  try {
    window->parts.push_back(make());
  } catch (const c10::Error& error) {
    problem = error.what_without_backtrace();
  } catch (const std::exception& error) {
    problem = error.what();
  }
  // An allocate on another rank that is of another size, or another call altogether, is noticed by the control.
  Call shown = call;
  shown.op = Op::exchange;
  const auto all = control.impl()->exchange(shown, problem);
  for (std::size_t r = 0; r < all.size(); ++r) {
    if (all[r].empty()) continue;
    throw AgreedError(
        detail::text(here, ": no memory for '", call.what, "' (", readable_bytes(call.count), ") on rank ", r, ": ", all[r]));
  }
  window->id = next_++;
  windows_.push_back(window);
  return window;
}

std::shared_ptr<Buffer::Impl> DeviceWindows::find(const void* data, std::int64_t bytes) {
  windows_.erase(std::remove_if(windows_.begin(), windows_.end(), [](const auto& window) { return window.expired(); }),
                 windows_.end());
  for (const auto& candidate : windows_) {
    auto window = candidate.lock();
    if (window == nullptr) continue;
    const auto offset = reinterpret_cast<std::intptr_t>(data) - reinterpret_cast<std::intptr_t>(window->data(0));
    if (offset >= 0 && offset + bytes <= window->bytes) return window;
  }
  return nullptr;
}

}  // namespace zero
