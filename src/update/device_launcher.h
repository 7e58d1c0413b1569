// Puts the launches of a step on a device. The tables lie in the device's memory (kernels/cuda/tables.h). Tests have one that runs the
// kernels' bodies as loops, on CPU tensors.
#pragma once

#include <c10/core/Device.h>

#include <functional>
#include <memory>

#include "kernels/cuda/tables.h"
#include "kernels/kernels.h"

namespace zero {

class DeviceLauncher {
 public:
  virtual ~DeviceLauncher() = default;
  virtual void begin_step(kernels::cuda::StepRecord* record) = 0;
  virtual void add_statistics(kernels::Span grad, const kernels::cuda::SegmentTable& segments,
                              const kernels::cuda::ParameterStep* parameters, kernels::cuda::StatisticsWorkspace* workspace,
                              kernels::cuda::StepRecord* record) = 0;
  virtual void combine(const kernels::cuda::Statistics* of_ranks, int ranks, kernels::cuda::StepRecord* record) = 0;
  virtual void decide(const kernels::cuda::AdamDecision& tables, kernels::cuda::AdamPlan<float>* plans,
                      kernels::cuda::AdamPlan<double>* plans_double) = 0;
  virtual void decide(const kernels::cuda::SgdDecision& tables, kernels::cuda::SgdPlan<float>* plans,
                      kernels::cuda::SgdPlan<double>* plans_double) = 0;
  virtual void update(const kernels::AdamSpans& spans, const kernels::cuda::AdamTables& tables) = 0;
  virtual void update(const kernels::SgdSpans& spans, const kernels::cuda::SgdTables& tables) = 0;
};

/// The GPU's, in its current stream. @throws c10::Error in a build without CUDA
std::unique_ptr<DeviceLauncher> make_cuda_launcher(c10::Device device);

/// For tests: where it returns one, CPU tensors are updated as a GPU's are, by this launcher.
using LauncherMaker = std::function<std::unique_ptr<DeviceLauncher>()>;
LauncherMaker& launcher_for_cpu_tensors();

/// What parameters on this device are updated by; null: the CPU's own pass.
std::unique_ptr<DeviceLauncher> make_launcher(c10::Device device);

}  // namespace zero
