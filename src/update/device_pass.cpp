#include "update/device_pass.h"

#include "core/parameter.h"
#include "update/device_tables.h"

namespace zero {

namespace cuda = kernels::cuda;

namespace {

cuda::AdamPlan<float> plan_of(const kernels::AdamArgs& a, float) {
  return {kernels::make_adam_scalars<float>(a), kernels::decay_of(a), 0, 1};
}
cuda::AdamPlan<double> plan_of(const kernels::AdamArgs& a, double) {
  return {kernels::make_adam_scalars<double>(a), kernels::decay_of(a), 0, 1};
}
template <class T>
cuda::SgdPlan<T> plan_of(const kernels::SgdArgs& a, T) {
  return {kernels::make_sgd_scalars<T>(a), kernels::momentum_of(a), a.weight_decay != 0, 1};
}

}  // namespace

at::Tensor DevicePass::to_device(const void* data, std::size_t bytes) const {
  // The copy has left this memory when it returns: the driver stages what isn't pinned.
  return tensor_over(const_cast<void*>(data), nullptr, {static_cast<std::int64_t>(bytes)}, {1}, at::kByte)
      .to(device_, at::kByte, false, true);
}

const DevicePass::Table& DevicePass::table_of(std::int64_t n) {
  auto [it, is_new] = tables_.try_emplace(n);
  if (is_new) {
    const std::vector<cuda::Segment> segments{{0, n, 0, 0}};
    const auto first = cuda::make_tile_map(segments, n);
    it->second = {to_device(segments.data(), sizeof segments[0]), to_device(first.data(), first.size() * sizeof first[0])};
  }
  return it->second;
}

void DevicePass::adam(const kernels::AdamSpans& spans, std::int64_t n, const kernels::AdamArgs& args) {
  const auto& table = table_of(n);
  const bool wide = spans.param.dtype == kernels::DType::f64;
  auto narrow_plan = plan_of(args, float{});
  auto wide_plan = plan_of(args, double{});
  narrow_plan.amsgrad = wide_plan.amsgrad = spans.max_exp_avg_sq.data != nullptr;
  const auto plan = wide ? to_device(&wide_plan, sizeof wide_plan) : to_device(&narrow_plan, sizeof narrow_plan);
  DeviceLauncher::Adam tables{};
  tables.segments = {static_cast<const cuda::Segment*>(table.segments.const_data_ptr()),
                     static_cast<const std::int32_t*>(table.first.const_data_ptr()), 1, n};
  (wide ? static_cast<void>(tables.plans_double = static_cast<const cuda::AdamPlan<double>*>(plan.const_data_ptr()))
        : static_cast<void>(tables.plans = static_cast<const cuda::AdamPlan<float>*>(plan.const_data_ptr())));
  launcher_->adam(spans, tables);  // LibTorch's allocator hands the plan's memory out again in this stream only
}

void DevicePass::sgd(const kernels::SgdSpans& spans, std::int64_t n, const kernels::SgdArgs& args) {
  const auto& table = table_of(n);
  const bool wide = spans.param.dtype == kernels::DType::f64;
  const auto narrow_plan = plan_of(args, float{});
  const auto wide_plan = plan_of(args, double{});
  const auto plan = wide ? to_device(&wide_plan, sizeof wide_plan) : to_device(&narrow_plan, sizeof narrow_plan);
  DeviceLauncher::Sgd tables{};
  tables.segments = {static_cast<const cuda::Segment*>(table.segments.const_data_ptr()),
                     static_cast<const std::int32_t*>(table.first.const_data_ptr()), 1, n};
  (wide ? static_cast<void>(tables.plans_double = static_cast<const cuda::SgdPlan<double>*>(plan.const_data_ptr()))
        : static_cast<void>(tables.plans = static_cast<const cuda::SgdPlan<float>*>(plan.const_data_ptr())));
  launcher_->sgd(spans, tables);
}

}  // namespace zero
