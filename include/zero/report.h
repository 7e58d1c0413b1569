// What the optimizer tells about itself: the last step, and the memory it keeps.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "zero/export.h"

namespace zero {

/// What one call of ZeroOptimizer::step() did, on this rank.
struct ZERO_API StepReport {
  std::int64_t number = 0;          ///< 1 for the first step; 0: no step yet
  bool applied = false;             ///< false: skipped
  std::string reason;               ///< why it was skipped; empty otherwise
  std::optional<double> grad_norm;  ///< 2-norm of the averaged gradient over all parameters, before clipping; when asked for
  double clip_factor = 1;           ///< what every gradient was multiplied by
  std::string first_nonfinite;      ///< first parameter with an inf or NaN in its averaged gradient, when looked for
  std::int64_t bytes_sent = 0;      ///< tensors' bytes this rank sent in this step (clip_grad_norm_ included)
  std::int64_t control_bytes = 0;   ///< flags, norms, hashes
  double seconds_reduce = 0;        ///< in reduce-scatter (stage 0: and in gathering the averages)
  double seconds_update = 0;        ///< in the optimizer's own arithmetic
  double seconds_gather = 0;        ///< in gathering updated parameters
};

/// Bytes that one rank keeps, by category.
struct ZERO_API Memory {
  std::int64_t parameters = 0;
  std::int64_t gradients = 0;
  std::int64_t optimizer_state = 0;
  std::int64_t buffers = 0;  ///< scratch of the reduction, padding excluded
  std::int64_t total() const { return parameters + gradients + optimizer_state + buffers; }
};

}  // namespace zero
