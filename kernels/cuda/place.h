// Where in a launch a thread stands, and the one way that kernels are written here: a body is a functor over Place, without shared
// memory, that a generic kernel (launch.h) calls on a device and run_on_host() calls on a host. So all that can go wrong in indexing,
// tails, segments and types is tested on machines without a GPU.
#pragma once

#include "../host_device.h"

#if defined(__CUDA_ARCH__)
#define ZERO_UNROLL _Pragma("unroll")
#define ZERO_NO_UNROLL _Pragma("unroll 1")
#else
#define ZERO_UNROLL
#define ZERO_NO_UNROLL
#endif

namespace zero::kernels::cuda {

/// Threads per block, of every kernel here.
constexpr int kThreads = 256;

struct Place {
  int block, blocks, thread;
};

/// A launch of `blocks` blocks, as loops. Threads don't depend on each other, so their order doesn't matter.
template <class Body>
void run_on_host(const Body& body, int blocks) {
  for (int block = 0; block < blocks; ++block) {
    for (int thread = 0; thread < kThreads; ++thread) body(Place{block, blocks, thread});
  }
}

}  // namespace zero::kernels::cuda
