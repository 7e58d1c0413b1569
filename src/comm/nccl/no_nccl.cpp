// Stands in for nccl.cpp in a build without CUDA or without nccl.h.
#include "core/check.h"
#include "zero/nccl.h"

namespace zero {

Communicator make_nccl_communicator(const Communicator& /*control*/, std::optional<c10::Device> /*device*/) {
  ZERO_FAIL(
      "zero::make_nccl_communicator: this build of zero has no NCCL: build it with a CUDA toolkit (-DZERO_WITH_CUDA=ON), a "
      "LibTorch "
      "that has CUDA, and nccl.h (-DZERO_NCCL_INCLUDE=<its folder>); CMake's summary says what is missing");
}

}  // namespace zero
