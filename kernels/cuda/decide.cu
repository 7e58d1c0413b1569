// The decision of a step: one block, and before it one thread for what the ranks have found.
#include "cuda_kernels.h"
#include "decide_body.h"
#include "launch.h"

namespace zero::kernels::cuda {
namespace {

template <class Body>
__global__ void __launch_bounds__(kThreads) decide_kernel(const __grid_constant__ Body body) {
  const StepRecord record = body(here());
  __syncthreads();  // all have read what the step starts from
  if (threadIdx.x == 0) body.finish(record);
}

template <class Body>
void decide_with(const Body& body, Stream stream) {
  decide_kernel<<<1, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(body);
  check(cudaGetLastError(), "the kernel that decides a step");
}

__global__ void combine_kernel(const Statistics* of_ranks, int ranks, StepRecord* record) { combine(of_ranks, ranks, *record); }

}  // namespace

void combine_statistics(const Statistics* of_ranks, int ranks, StepRecord* record, Stream stream) {
  combine_kernel<<<1, 1, 0, static_cast<cudaStream_t>(stream)>>>(of_ranks, ranks, record);
  check(cudaGetLastError(), "the kernel that adds the ranks' gradient statistics");
}

void decide_adam(const AdamDecision& tables, AdamPlan<float>* plans, AdamPlan<double>* plans_double, Stream stream) {
  decide_with(DecideBody<AdamPlan, AdamGroup>{tables, plans, plans_double}, stream);
}

void decide_sgd(const SgdDecision& tables, SgdPlan<float>* plans, SgdPlan<double>* plans_double, Stream stream) {
  decide_with(DecideBody<SgdPlan, SgdGroup>{tables, plans, plans_double}, stream);
}

}  // namespace zero::kernels::cuda
