// How a loss scale follows overflows: one rule that covers torch.amp.GradScaler's and DeepSpeed's, called by the CPU step and by
// the CUDA step's deciding kernel.
#pragma once

#include <cstdint>

#include "host_device.h"

namespace zero::kernels {

struct LossScaleRule {
  double growth = 2;     ///< the scale is multiplied by this after `growth_interval` clean steps,
  double backoff = 0.5;  ///< and by this after an overflow
  std::int64_t growth_interval = 2000;
  double minimum = 0;           ///< the scale stays at least this
  std::int32_t hysteresis = 1;  ///< so many overflows before the scale gives way; refilled when the scale grows
};

struct LossScaleState {
  double scale = 65536;
  std::int64_t clean = 0;      ///< clean steps since the last overflow or growth
  std::int32_t tolerated = 1;  ///< overflows until the scale gives way
  std::int32_t skipped_in_a_row = 0;
};

/// A scale is a float32 number, so that loss × scale and gradient / scale mean the same scale.
ZERO_HOST_DEVICE double as_float(double x) { return static_cast<double>(static_cast<float>(x)); }

/// What a step does to the state: `overflow` is whether the averaged gradient had an inf or NaN.
ZERO_HOST_DEVICE void follow_step(const LossScaleRule& rule, LossScaleState& state, bool overflow) {
  if (overflow) {
    state.clean = 0;
    ++state.skipped_in_a_row;
    if (state.tolerated > 1) {
      --state.tolerated;
      return;
    }
    const double lower = state.scale * rule.backoff;
    state.scale = as_float(lower < rule.minimum ? rule.minimum : lower);
    return;
  }
  state.skipped_in_a_row = 0;
  if (++state.clean < rule.growth_interval) return;
  state.clean = 0;
  state.tolerated = rule.hysteresis;
  // A scale that the loss can't be multiplied by in float32 is none.
  if (const double higher = state.scale * rule.growth; higher <= 3.4028234663852886e38) state.scale = as_float(higher);
}

}  // namespace zero::kernels
