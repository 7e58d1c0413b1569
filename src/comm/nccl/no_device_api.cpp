// Stands in for device_api.cpp in a build without CUDA.
#include "comm/nccl/device_api.h"
#include "core/check.h"

namespace zero {

int cuda_devices() {
  ZERO_FAIL("this build of zero has no CUDA: build it with a CUDA toolkit (-DZERO_WITH_CUDA=ON) and a LibTorch that has CUDA");
}

std::shared_ptr<DeviceApi> cuda_device(c10::Device device) {
  ZERO_FAIL("zero: ", device.str(),
            ": this build has no CUDA: build it with a CUDA toolkit (-DZERO_WITH_CUDA=ON) and a LibTorch that has CUDA");
}

}  // namespace zero
