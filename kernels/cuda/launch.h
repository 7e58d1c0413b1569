// Launches a body (place.h) as a kernel. For nvcc only.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <atomic>
#include <stdexcept>
#include <string>

#include "place.h"

namespace zero::kernels::cuda {

inline void check(cudaError_t code, const char* what) {
  if (code == cudaSuccess) return;
  cudaGetLastError();  // else the next launch of somebody else would report it again
  throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(code) + " (" + cudaGetErrorName(code) + ")");
}

__device__ __forceinline__ Place here() {
  return {static_cast<int>(blockIdx.x), static_cast<int>(gridDim.x), static_cast<int>(threadIdx.x)};
}

template <class Body>
__global__ void __launch_bounds__(kThreads, Body::kBlocksPerMultiprocessor) run(const __grid_constant__ Body body) {
  body(here());
}

/// As many blocks as the device of this thread runs at once: a block takes its next tile when it is done with one, so more would only
/// wait. Asked for once per kernel and device.
template <class Body>
int resident_blocks(const char* what) {
  constexpr int kDevices = 64;
  static std::atomic<int> known[kDevices] = {};  // ranks may be threads; whoever is first, it is the same number
  int device = 0;
  check(cudaGetDevice(&device), what);
  int blocks = device < kDevices ? known[device].load() : 0;
  if (blocks == 0) {
    int processors = 0, each = 0;
    check(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device), what);
    check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&each, run<Body>, kThreads, 0), what);
    blocks = std::max(1, processors * each);
    if (device < kDevices) known[device] = blocks;
  }
  return blocks;
}

/// @param work     blocks that have something to do
/// @param at_most  0: as many as are resident
template <class Body>
void launch(const Body& body, std::int64_t work, int at_most, void* stream, const char* what) {
  if (work <= 0) return;
  const int most = at_most > 0 ? at_most : resident_blocks<Body>(what);
  run<Body>
      <<<static_cast<unsigned>(std::min<std::int64_t>(work, most)), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(body);
  check(cudaGetLastError(), what);
}

}  // namespace zero::kernels::cuda
