// Loss scaling: losses are multiplied by a number so that small gradients don't vanish in float16, and the step divides by it.
//
//   zero::LossScaler scaler(opt);                      // after opt; torch's rules, or LossScalerOptions::deepspeed()
//   scaler.scale(loss).backward();
//   opt.step();                                        // unscales, skips on overflow, adapts the scale
//
// The overflow decision rides on the step's one exchange between ranks, before anything is written: all ranks update or none does.
// ZeroOptimizer::last_step() tells: applied, loss_scale, grad_norm (unscaled), first_nonfinite.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>

#include "zero/export.h"

namespace zero {

class ZeroOptimizer;
struct LossScaling;

/// How the scale follows overflows. Every setter returns *this.
class ZERO_API LossScalerOptions {
 public:
  /// torch.amp.GradScaler: starts at 2^16, doubles after 2000 clean steps, halves at each overflow, has no minimum.
  static LossScalerOptions torch() { return {}; }
  /// DeepSpeed's fp16 defaults: starts at 2^16, doubles after 1000 clean steps, halves at an overflow once two have been met since
  /// the scale last grew (hysteresis 2), at least 1.
  static LossScalerOptions deepspeed() { return LossScalerOptions().growth_interval(1000).hysteresis(2).minimum(1); }
  /// The scale never changes; a step that overflows is skipped.
  static LossScalerOptions fixed(double scale) {
    return LossScalerOptions().initial(scale).growth(1).backoff(1).minimum(scale);
  }

  LossScalerOptions& initial(double scale) { return initial_ = scale, *this; }
  LossScalerOptions& growth(double factor) { return growth_ = factor, *this; }    ///< ≥ 1
  LossScalerOptions& backoff(double factor) { return backoff_ = factor, *this; }  ///< in (0, 1]
  LossScalerOptions& growth_interval(std::int64_t clean_steps) { return growth_interval_ = clean_steps, *this; }
  /// Overflows until the scale gives way; counted anew when it grows.
  LossScalerOptions& hysteresis(int overflows) { return hysteresis_ = overflows, *this; }
  LossScalerOptions& minimum(double scale) { return minimum_ = scale, *this; }
  /// An overflow at the minimum ends in an error on every rank (after the step has been skipped). Default: a warning.
  LossScalerOptions& fail_at_minimum(bool on = true) { return fail_at_minimum_ = on, *this; }

  double initial() const { return initial_; }
  double growth() const { return growth_; }
  double backoff() const { return backoff_; }
  std::int64_t growth_interval() const { return growth_interval_; }
  int hysteresis() const { return hysteresis_; }
  double minimum() const { return minimum_; }
  bool fail_at_minimum() const { return fail_at_minimum_; }

 private:
  double initial_ = 65536, growth_ = 2, backoff_ = 0.5, minimum_ = 0;
  std::int64_t growth_interval_ = 2000;
  int hysteresis_ = 1;
  bool fail_at_minimum_ = false;
};

/// Scales the losses of one optimizer. A handle: copies are the same scaler; its state is the optimizer's and is saved with it. All
/// ranks make one, with the same options (compared at each step). For bfloat16, whose range is float32's, it is allowed and not
/// needed. With several optimizers, one each.
class ZERO_API LossScaler {
 public:
  /// @throws c10::Error if an option makes no sense, or the optimizer has another scaler already
  explicit LossScaler(ZeroOptimizer& optimizer, const LossScalerOptions& options = {});

  /// loss × scale, in float32 for 16-bit losses. Every loss whose gradients come together in one step is scaled; a step before which
  /// none was (on any rank) takes gradients as they are. Doesn't communicate.
  at::Tensor scale(const at::Tensor& loss) const;

  /// Divides the gradients by the scale now, for code that reads p.grad() before the step (torch::nn::utils::clip_grad_norm_). Every
  /// rank, after the last backward; a second call does nothing. Not needed for zero::clip_grad_norm_, grad_norm() and step(). Float16
  /// gradients lose what becomes too small by it. Doesn't communicate.
  void unscale() const;

  /// The scale of the next loss.
  double current() const;
  /// Another scale, on every rank. If losses have been scaled since the last step, it counts from the next step on.
  void set(double scale) const;
  /// Clean steps since the last overflow or growth.
  std::int64_t clean_steps() const;
  const LossScalerOptions& options() const;

 private:
  std::shared_ptr<LossScaling> state_;
};

}  // namespace zero
