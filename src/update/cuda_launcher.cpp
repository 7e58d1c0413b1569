// A step's launches on a GPU, in the current stream.
#include <c10/cuda/CUDAStream.h>

#include "kernels/cuda/cuda_kernels.h"
#include "update/device_launcher.h"

namespace zero {
namespace {

namespace cuda = kernels::cuda;

class CudaLauncher final : public DeviceLauncher {
 public:
  explicit CudaLauncher(c10::Device device) : device_(device) {}
  void begin_step(cuda::StepRecord* record) override { cuda::begin_step(record, stream()); }
  void add_statistics(kernels::Span grad, const cuda::SegmentTable& segments, const cuda::ParameterStep* parameters,
                      cuda::StatisticsWorkspace* workspace, cuda::StepRecord* record) override {
    cuda::add_statistics(grad, segments, parameters, workspace, record, stream());
  }
  void combine(const cuda::Statistics* of_ranks, int ranks, cuda::StepRecord* record) override {
    cuda::combine_statistics(of_ranks, ranks, record, stream());
  }
  void decide(const cuda::AdamDecision& tables, cuda::AdamPlan<float>* plans, cuda::AdamPlan<double>* plans_double) override {
    cuda::decide_adam(tables, plans, plans_double, stream());
  }
  void decide(const cuda::SgdDecision& tables, cuda::SgdPlan<float>* plans, cuda::SgdPlan<double>* plans_double) override {
    cuda::decide_sgd(tables, plans, plans_double, stream());
  }
  void update(const kernels::AdamSpans& spans, const cuda::AdamTables& tables) override { cuda::adam(spans, tables, stream()); }
  void update(const kernels::SgdSpans& spans, const cuda::SgdTables& tables) override { cuda::sgd(spans, tables, stream()); }

 private:
  cuda::Stream stream() const { return c10::cuda::getCurrentCUDAStream(device_.index()).stream(); }
  c10::Device device_;
};

}  // namespace

std::unique_ptr<DeviceLauncher> make_cuda_launcher(c10::Device device) { return std::make_unique<CudaLauncher>(device); }

}  // namespace zero
