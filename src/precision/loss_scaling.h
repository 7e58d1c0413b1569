// What a LossScaler and its optimizer share.
#pragma once

#include <functional>
#include <optional>

#include "core/agreement.h"
#include "kernels/loss_scale.h"
#include "zero/loss_scaler.h"

namespace zero {

struct LossScaling {
  const LossScalerOptions options;
  kernels::LossScaleRule rule;
  kernels::LossScaleState state;
  bool scaled = false;            ///< a loss, since the last step, by state.scale
  bool unscaled = false;          ///< gradients, by unscale(), since the last step
  bool warned = false;            ///< of overflows at the minimum, since the last clean step
  std::optional<double> pending;  ///< set() after scale(): from the next step on
  /// Gradients × factor; empty when the optimizer is gone.
  std::function<void(double factor)> multiply_gradients;

  explicit LossScaling(const LossScalerOptions& options);

  /// Has the step before been skipped, or can the scale not become less? Then arriving gradients are looked at one by one.
  bool suspicious() const { return state.skipped_in_a_row > 0 || at_minimum(); }
  bool at_minimum() const { return state.scale <= rule.minimum; }
  void unscale();
  void end_of_step(bool overflow);
  /// For the comparison between ranks.
  void describe(Facts& out) const;
};

}  // namespace zero
