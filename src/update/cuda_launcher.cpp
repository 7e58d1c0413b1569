// Passes on a GPU, in the current stream.
#include <c10/cuda/CUDAStream.h>

#include "kernels/cuda/cuda_kernels.h"
#include "update/device_tables.h"

namespace zero {
namespace {

class CudaLauncher final : public DeviceLauncher {
 public:
  explicit CudaLauncher(c10::Device device) : device_(device) {}
  void adam(const kernels::AdamSpans& spans, const Adam& tables) override { kernels::cuda::adam(spans, tables, stream()); }
  void sgd(const kernels::SgdSpans& spans, const Sgd& tables) override { kernels::cuda::sgd(spans, tables, stream()); }

 private:
  kernels::cuda::Stream stream() const { return c10::cuda::getCurrentCUDAStream(device_.index()).stream(); }
  c10::Device device_;
};

}  // namespace

std::unique_ptr<DeviceLauncher> make_cuda_launcher(c10::Device device) { return std::make_unique<CudaLauncher>(device); }

}  // namespace zero
