// The fused pass on a GPU: one launch for a run of memory, in the current stream. Values that change from step to step (learning rate,
// bias corrections, clip factor) go over with the launch; the host waits for nothing.
#pragma once

#include <ATen/core/Tensor.h>

#include <map>
#include <memory>

#include "kernels/kernels.h"

namespace zero {

/// Puts a pass on a device. The tables lie in the device's memory (kernels/cuda/bind.h). Tests have one that runs the kernels' bodies as
/// loops.
class DeviceLauncher {
 public:
  struct Adam;  ///< kernels::cuda::AdamTables
  struct Sgd;   ///< kernels::cuda::SgdTables
  virtual ~DeviceLauncher() = default;
  virtual void adam(const kernels::AdamSpans& spans, const Adam& tables) = 0;
  virtual void sgd(const kernels::SgdSpans& spans, const Sgd& tables) = 0;
};

/// The GPU's. @throws c10::Error in a build without CUDA
std::unique_ptr<DeviceLauncher> make_cuda_launcher(c10::Device device);

class DevicePass {
 public:
  DevicePass(c10::Device device, std::unique_ptr<DeviceLauncher> launcher) : device_(device), launcher_(std::move(launcher)) {}

  void adam(const kernels::AdamSpans& spans, std::int64_t n, const kernels::AdamArgs& args);
  void sgd(const kernels::SgdSpans& spans, std::int64_t n, const kernels::SgdArgs& args);

 private:
  struct Table {
    at::Tensor segments, first;  ///< in the device's memory
  };
  const Table& table_of(std::int64_t n);
  /// Fills in the run and its scalars. @returns what holds the latter
  template <class Tables, class MakePlan>
  at::Tensor prepare(Tables& tables, std::int64_t n, kernels::Span param, const MakePlan& make_plan);
  at::Tensor to_device(const void* data, std::size_t bytes) const;

  c10::Device device_;
  std::unique_ptr<DeviceLauncher> launcher_;
  std::map<std::int64_t, Table> tables_;  ///< by the length of a run: one segment
};

}  // namespace zero
