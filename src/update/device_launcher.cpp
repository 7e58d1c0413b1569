#include "update/device_launcher.h"

namespace zero {

LauncherMaker& launcher_for_cpu_tensors() {
  static LauncherMaker maker;
  return maker;
}

std::unique_ptr<DeviceLauncher> make_launcher(c10::Device device) {
  if (!device.is_cpu()) return make_cuda_launcher(device);
  const auto& maker = launcher_for_cpu_tensors();
  return maker ? maker() : nullptr;
}

}  // namespace zero
