// See zero/nccl.h and choose_device.h.
#include "comm/nccl/choose_device.h"

#include <unistd.h>

#include <cstdlib>
#include <string>

#include "comm/nccl/device_api.h"
#include "core/check.h"
#include "zero/nccl.h"

namespace zero {
namespace {

// By the environment; no index: not set.
c10::Device wanted() {
  c10::Device device(c10::DeviceType::CUDA);
  const char* value = std::getenv("ZERO_DEVICE");
  if (value == nullptr || *value == '\0') return device;
  const std::string text = value;
  const auto colon = text.rfind("cuda:", 0) == 0 ? 5 : 0;
  const auto digits = text.substr(colon);
  ZERO_CHECK(!digits.empty() && digits.size() < 3 && digits.find_first_not_of("0123456789") == std::string::npos,
             "ZERO_DEVICE=", value, ": must name a GPU: cuda:0, or 0");
  return c10::Device(c10::DeviceType::CUDA, static_cast<c10::DeviceIndex>(std::stoi(digits)));
}

}  // namespace

c10::Device device_of(const Communicator& control, int devices) {
  char host[256] = {};
  gethostname(host, sizeof host - 1);
  // What is wrong on one rank has to be an error on all, and the host's name can't begin with a minus sign.
  std::string mine = host;
  c10::Device device(c10::DeviceType::CUDA);
  try {
    ZERO_CHECK(devices > 0, "sees no GPU (no driver, or CUDA_VISIBLE_DEVICES is empty): check nvidia-smi, or stay on the CPU");
    device = wanted();
    ZERO_CHECK(device.index() < devices, "ZERO_DEVICE asks for ", device.str(), ", but there are only ", devices);
  } catch (const c10::Error& error) {
    mine = '-' + error.msg();
  }
  const auto all = control.exchange(mine, "choosing a device");
  int before = 0;  // ranks of this host
  for (std::size_t r = 0; r < all.size(); ++r) {
    ZERO_CHECK(all[r].empty() || all[r][0] != '-', "zero::choose_device: rank ", r, ": ", all[r].substr(1));
    if (static_cast<int>(r) < control.rank() && all[r] == mine) ++before;
  }
  if (device.has_index()) return device;
  return c10::Device(c10::DeviceType::CUDA, static_cast<c10::DeviceIndex>(before % devices));
}

c10::Device choose_device(const Communicator& control) { return device_of(control, cuda_devices()); }

}  // namespace zero
