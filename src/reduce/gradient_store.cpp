#include "reduce/gradient_store.h"

#include "kernels/kernels.h"

namespace zero {

double GradientContext::early(int space) const {
  const auto type = dtype(space);
  if (!division.late || (type != at::kHalf && type != at::kBFloat16)) return 1;
  double power = 1;
  while (power < comm.size()) power *= 2;
  return power;
}

void* GradientContext::in_bucket(void* bucket_memory, int parameter) const {
  return static_cast<char*>(bucket_memory) + layout.bytes_in_bucket(parameter);
}

at::Tensor GradientContext::region(void* bucket_memory, std::shared_ptr<void> keep, int parameter) const {
  // The parameter's own order of elements, so that shards of both belong together; row-major where it has gaps.
  const auto& tensor = parameters[parameter].tensor;
  return tensor_over(in_bucket(bucket_memory, parameter), std::move(keep), tensor.sizes(), layout_strides(tensor),
                     dtype(layout.slot(parameter).space), device);
}

void place_gradient(const at::Tensor& region, const at::Tensor& gradient) {
  const bool alike = gradient.scalar_type() == region.scalar_type() && gradient.sizes() == region.sizes() &&
                     gradient.strides() == region.strides() && gradient.is_non_overlapping_and_dense() && !gradient.is_conj() &&
                     !gradient.is_neg() && gradient.device().is_cpu() && region.device().is_cpu();
  if (!alike) {
    region.copy_(gradient);
    return;
  }
  kernels::bulk_copy(region.data_ptr(), gradient.const_data_ptr(), static_cast<std::int64_t>(gradient.nbytes()));
}

std::string GradientContext::label(const char* what, int unit) const {
  return "step " + std::to_string(steps + 1) + ": " + what + " " + name(unit);
}

std::string GradientContext::name(int unit) const {
  const auto& members = layout.members(unit);
  const auto called = [&](int i) {
    return parameters[i].plain_name.empty() ? parameters[i].name : "'" + parameters[i].plain_name + "'";
  };
  std::string out = "bucket " + std::to_string(unit);
  if (members.empty()) return out;
  out += " (" + called(members.front());
  if (members.size() > 1) out += " … " + called(members.back());
  return out + ")";
}

}  // namespace zero
