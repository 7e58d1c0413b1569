// Stands in for cuda_launcher.cpp in a build without CUDA.
#include "core/check.h"
#include "update/device_launcher.h"

namespace zero {

std::unique_ptr<DeviceLauncher> make_cuda_launcher(c10::Device device) {
  ZERO_FAIL("parameters are on ", device, ", but this build of zero has no CUDA: build it with -DZERO_WITH_CUDA=ON");
}

}  // namespace zero
