// What a step keeps in device memory, so that the host needs to know nothing about it: statistics in, decisions out, and the scalars
// that the update multiplies by. Plain data; the host writes settings, groups and the `absent` flags by copies on the stream.
#pragma once

#include <cstdint>
#include <limits>

#include "../loss_scale.h"
#include "../update_rule.h"

namespace zero::kernels::cuda {

/// Statistics::first_nonfinite while all is finite: the largest number, so that ranks combine theirs by the minimum.
constexpr std::int64_t kAllFinite = std::numeric_limits<std::int64_t>::max();

/// What a rank has found in its part of the gradients.
struct Statistics {
  double sum_of_squares = 0;
  std::int64_t first_nonfinite = kAllFinite;  ///< the lowest number of a parameter whose average has an inf or NaN
  std::int64_t first_own = kAllFinite;        ///< the first whose own gradient, as it came, had one; where that was looked for
};

/// One step of one optimizer.
struct StepRecord {
  // Statistics, as above: this rank's after add_statistics(), all ranks' after combine_statistics().
  double sum_of_squares;  ///< of all gradients, as they are (scaled by the loss scale)
  std::int64_t first_nonfinite;
  std::int64_t first_own;
  std::int32_t rank_of_own;  ///< whose first_own this is, since combine_statistics(); -1: nobody's
  // Decisions.
  double grad_norm;                  ///< unscaled, before clipping
  double clip_factor;                ///< the product of all clips' factors
  double grad_factor;                ///< what the update multiplies gradients by: clip_factor / loss scale
  double loss_scale;                 ///< in force; 1: there is none
  std::int64_t nonfinite_parameter;  ///< when the step was decided: what overflowed first, and
  std::int32_t nonfinite_rank;       ///< on which rank; -1: not known
  std::int32_t overflow;             ///< a gradient isn't finite
  std::int32_t skip;                 ///< the update writes nothing
};

/// What the host wants of the step.
struct StepSettings {
  double clip_factor;           ///< of clips before the step, whose norms the host has been told
  double max_norm;              ///< the step's own clip; not above 0: none
  std::int32_t skip_nonfinite;  ///< an overflow skips the step; else it does what torch::optim does
  std::int32_t unscaled;        ///< gradients aren't to be divided by the loss scale: none was scaled, or somebody has done it
};

/// A parameter's own, by Segment::entry.
struct ParameterStep {
  std::int64_t steps;    ///< made so far; Adam's bias corrections are for the next one
  std::int32_t group;    ///< whose options are its own
  std::int32_t absent;   ///< no gradient in this step: nothing of it is touched
  std::int32_t started;  ///< SGD: the momentum buffer has been initialised
};

/// Options of a parameter group.
struct AdamGroup {
  double lr, beta1, beta2, eps, weight_decay;
  std::int32_t decoupled;  ///< AdamW
  std::int32_t amsgrad;
};
struct SgdGroup {
  double lr, momentum, dampening, weight_decay;
  std::int32_t nesterov;
};

/// What the update loads for a segment, by Segment::entry: written by decide_*(), three or five 16-byte loads.
template <class T>
struct alignas(16) AdamPlan {
  using Group = AdamGroup;
  AdamScalars<T> scalars;
  Decay decay;
  std::int32_t amsgrad;
  std::int32_t active;
};
template <class T>
struct alignas(16) SgdPlan {
  using Group = SgdGroup;
  SgdScalars<T> scalars;
  Momentum momentum;
  std::int32_t decay;
  std::int32_t active;
};

}  // namespace zero::kernels::cuda
