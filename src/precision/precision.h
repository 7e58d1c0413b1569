// Which type what is kept and sent has, given a parameter's own: Options::master_weights, reduce_dtype and state_dtype resolved.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>

#include "core/wrapped.h"
#include "layout/layout.h"
#include "zero/options.h"

namespace zero {

inline bool is_16_bit(at::ScalarType type) { return type == at::kHalf || type == at::kBFloat16; }

class Precision {
 public:
  Precision() = default;
  explicit Precision(const Options& options);

  /// Do parameters of this type have float32 masters?
  bool has_master(at::ScalarType parameter) const { return masters_ && is_16_bit(parameter); }
  /// Gradients: kept and sent.
  at::ScalarType gradient(at::ScalarType parameter) const {
    return is_16_bit(parameter) && reduce_in_float_ ? at::kFloat : parameter;
  }
  /// State of the fused classes.
  at::ScalarType state(at::ScalarType parameter) const { return parameter == at::kDouble ? at::kDouble : state_; }
  /// Where gradients lie: the parameters' places, in the gradients' types.
  Layout gradient_layout(const Layout& parameters) const;

  /// Why a class can't train parameters of this type like that; empty if it can.
  std::string problem(WrappedClass kind, at::ScalarType parameter) const;

 private:
  bool masters_ = true, forced_off_ = false, reduce_in_float_ = false;
  at::ScalarType state_ = at::kFloat;
};

/// What is wrong with the options by themselves; empty if nothing.
std::string precision_problem(const Options& options);

}  // namespace zero
