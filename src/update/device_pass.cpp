#include "update/device_pass.h"

#include "core/parameter.h"
#include "update/device_tables.h"

namespace zero {

namespace cuda = kernels::cuda;

namespace {

template <class T>
const T* in_device(const at::Tensor& bytes) {
  return static_cast<const T*>(bytes.const_data_ptr());
}

}  // namespace

// The copy has left this memory when it returns: what isn't pinned is staged by the driver.
at::Tensor DevicePass::to_device(const void* data, std::size_t bytes) const {
  return tensor_over(const_cast<void*>(data), nullptr, {static_cast<std::int64_t>(bytes)}, {1}, at::kByte)
      .to(device_, at::kByte, /*non_blocking=*/true, /*copy=*/true);
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

template <class Tables, class MakePlan>
at::Tensor DevicePass::prepare(Tables& tables, std::int64_t n, kernels::Span param, const MakePlan& make_plan) {
  const auto& table = table_of(n);
  tables.segments = {in_device<cuda::Segment>(table.segments), in_device<std::int32_t>(table.first), 1, n};
  const auto place = [&](const auto& plan, auto& in_tables) {
    auto memory = to_device(&plan, sizeof plan);
    in_tables = in_device<std::decay_t<decltype(plan)>>(memory);
    return memory;
  };
  return param.dtype == kernels::DType::f64 ? place(make_plan(double{}), tables.plans_double)
                                            : place(make_plan(float{}), tables.plans);
}

// A plan's memory may go when the launch is made: LibTorch's allocator hands it out again in the order of the same stream.
void DevicePass::adam(const kernels::AdamSpans& spans, std::int64_t n, const kernels::AdamArgs& args) {
  DeviceLauncher::Adam tables{};
  const bool amsgrad = spans.max_exp_avg_sq.data != nullptr;
  const auto plan = prepare(tables, n, spans.param, [&](auto arithmetic) { return cuda::plan_of(args, amsgrad, arithmetic); });
  launcher_->adam(spans, tables);
}

void DevicePass::sgd(const kernels::SgdSpans& spans, std::int64_t n, const kernels::SgdArgs& args) {
  DeviceLauncher::Sgd tables{};
  const auto plan = prepare(tables, n, spans.param, [&](auto arithmetic) { return cuda::plan_of(args, arithmetic); });
  launcher_->sgd(spans, tables);
}

}  // namespace zero
