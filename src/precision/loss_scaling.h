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
  std::optional<double> said;     ///< by set(), the last time
  /// Gradients × factor; empty when the optimizer is gone.
  std::function<void(double factor)> multiply_gradients;
  /// Where a device decides steps: its scale, to multiply by. Undefined elsewhere.
  std::function<at::Tensor()> in_device;
  /// Waits for what a device has decided, if one does: then `state` is what is in force.
  std::function<void()> be_told;

  explicit LossScaling(const LossScalerOptions& options);

  /// Has the step before been skipped, or can the scale not become less? Then arriving gradients are looked at one by one.
  bool suspicious() const { return state.skipped_in_a_row > 0 || at_minimum(); }
  bool at_minimum() const { return state.scale <= rule.minimum; }
  void unscale();
  void end_of_step(bool overflow);
  void take_pending();
  void leave_optimizer() { multiply_gradients = nullptr, in_device = nullptr, be_told = nullptr; }
  /// For the comparison between ranks.
  /// @param with_state the host's is in force; it may know more or less of a device's than other ranks' hosts do
  void describe(Facts& out, bool with_state) const;
};

}  // namespace zero
