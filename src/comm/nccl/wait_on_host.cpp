// See device_api.h.
#include <chrono>
#include <thread>

#include "comm/nccl/device_api.h"
#include "comm/wait.h"

namespace zero {

void wait_on_host(DeviceApi& api, DeviceApi::Event event, const std::function<void()>& meanwhile) {
  Backoff backoff(1);
  while (!api.done(event)) {
    if (backoff.pause()) continue;
    meanwhile();
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
}

}  // namespace zero
