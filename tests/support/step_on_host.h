// A device's step without a device: the bodies of the CUDA kernels as loops, on CPU tensors. Once it is installed, every optimizer of
// this process decides and updates as on a GPU.
#pragma once

#include <memory>

#include "update/device_launcher.h"

namespace step_on_host {

std::unique_ptr<zero::DeviceLauncher> make_launcher();

/// From now on, for the optimizers that are made while it lives.
class Installed {
 public:
  Installed() { zero::launcher_for_cpu_tensors() = make_launcher; }
  ~Installed() { zero::launcher_for_cpu_tensors() = nullptr; }
  Installed(const Installed&) = delete;
  Installed& operator=(const Installed&) = delete;
};

}  // namespace step_on_host
