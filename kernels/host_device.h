// ZERO_HOST_DEVICE: a function that CPU loops and CUDA kernels call.
#pragma once

#if defined(__CUDACC__)
#define ZERO_HOST_DEVICE __host__ __device__ __forceinline__
#else
// always_inline is not about speed: the CPU loops are compiled once per instruction set, and an out-of-line copy of an inline
// function would be merged by the linker into whichever set's copy it met first.
#define ZERO_HOST_DEVICE __attribute__((always_inline)) inline
#endif
