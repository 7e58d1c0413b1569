// The statistics of gradients: a sum per thread (statistics_body.h), per block by CUB, and over the blocks in a second launch of one
// block. Both orders are fixed by the number of blocks, so there are no atomics and no fence that a test on the host couldn't see.
#include <cub/block/block_reduce.cuh>

#include "bind.h"
#include "cuda_kernels.h"
#include "launch.h"

namespace zero::kernels::cuda {
namespace {

struct Both {
  __device__ Statistics operator()(const Statistics& a, const Statistics& b) const { return both(a, b); }
};
using Reduce = cub::BlockReduce<Statistics, kThreads>;

template <class Body>
__global__ void __launch_bounds__(kThreads)
    partial_statistics(const __grid_constant__ Body body, StatisticsWorkspace* workspace) {
  __shared__ typename Reduce::TempStorage memory;
  const Statistics all = Reduce(memory).Reduce(body(here()), Both{});
  if (threadIdx.x == 0) workspace->partial[blockIdx.x] = all;
}

__global__ void __launch_bounds__(kThreads) add_partials(const StatisticsWorkspace* workspace, int blocks, StepRecord* record) {
  __shared__ typename Reduce::TempStorage memory;
  Statistics mine;
  for (int k = static_cast<int>(threadIdx.x); k < blocks; k += kThreads) mine = Both{}(mine, workspace->partial[k]);
  const Statistics all = Reduce(memory).Reduce(mine, Both{});
  if (threadIdx.x != 0) return;
  add(all, *record);
}

__global__ void reset(StepRecord* record) { begin(*record); }

}  // namespace

void begin_step(StepRecord* record, Stream stream) {
  reset<<<1, 1, 0, static_cast<cudaStream_t>(stream)>>>(record);
  check(cudaGetLastError(), "the kernel that begins a step");
}

void add_statistics(Span grad, const SegmentTable& segments, const ParameterStep* parameters, StatisticsWorkspace* workspace,
                    StepRecord* record, Stream stream) {
  const int blocks = statistics_blocks(segments.elements);
  if (blocks == 0) return;
  const auto on = static_cast<cudaStream_t>(stream);
  bind_statistics(grad, segments, parameters, [&](const auto& body) {
    partial_statistics<<<static_cast<unsigned>(blocks), kThreads, 0, on>>>(body, workspace);
  });
  check(cudaGetLastError(), "the kernel of gradient statistics");
  add_partials<<<1, kThreads, 0, on>>>(workspace, blocks, record);
  check(cudaGetLastError(), "the kernel that adds gradient statistics");
}

}  // namespace zero::kernels::cuda
