#include "precision/precision.h"

#include "core/check.h"

namespace zero {

Precision::Precision(const Options& options)
    : masters_(options.master_weights().value_or(true)),
      forced_off_(options.force_masters_off()),
      reduce_in_float_(options.reduce_dtype() == at::kFloat),
      state_(options.state_dtype()) {}

Layout Precision::gradient_layout(const Layout& parameters) const {
  return parameters.in_types([this](int dtype, int) {
    const auto type = gradient(static_cast<at::ScalarType>(dtype));
    return std::pair<int, int>(static_cast<int>(type), static_cast<int>(c10::elementSize(type)));
  });
}

std::string Precision::problem(WrappedClass kind, at::ScalarType parameter) const {
  const bool adam = kind == WrappedClass::kAdam || kind == WrappedClass::kAdamW;
  if (parameter == at::kHalf && adam && !masters_ && !forced_off_)
    return "float16 parameters without master weights: Adam's updates of about lr are lost wherever a weight is more than 2048 "
           "times as large. Leave Options::master_weights() on, or say master_weights(false, true) if you mean it";
  return {};
}

std::string precision_problem(const Options& options) {
  if (const auto reduce = options.reduce_dtype(); reduce && *reduce != at::kFloat)
    return detail::text("Options::reduce_dtype is ", *reduce,
                        "; it can be Float. Left out, gradients are sent in the parameters' own type");
  if (options.state_dtype() != at::kFloat && options.state_dtype() != at::kBFloat16)
    return detail::text("Options::state_dtype is ", options.state_dtype(), "; it can be Float (default) or BFloat16");
  return {};
}

}  // namespace zero
