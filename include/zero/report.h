// What the optimizer tells about itself: the last step, and the memory it keeps.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "zero/export.h"

namespace zero {

/// What one call of ZeroOptimizer::step() did, on this rank.
struct ZERO_API StepReport {
  std::int64_t number = 0;  ///< 1 for the first step; 0: no step yet
  bool applied = false;     ///< false: skipped
  std::string reason;       ///< why it was skipped; empty otherwise
  double loss_scale = 1;    ///< that the losses of this step were multiplied by (LossScaler); the next step's may be another
  std::optional<double>
      grad_norm;           ///< 2-norm of the averaged gradient over all parameters, unscaled, before clipping; when asked for
  double clip_factor = 1;  ///< what every gradient was multiplied by
  std::string first_nonfinite;  ///< first parameter with an inf or NaN in its averaged gradient, when looked for
  int nonfinite_rank = -1;      ///< on which rank; -1: not known. Looked for after a skipped step, and at the least loss scale
  std::int64_t bytes_sent = 0;  ///< tensors' bytes this rank sent in this step (clip_grad_norm_ included)
  std::int64_t control_bytes = 0;  ///< flags, norms, hashes
  double seconds_reduce = 0;       ///< in reduce-scatter (stage 0: and in gathering the averages)
  double seconds_update = 0;       ///< in the optimizer's own arithmetic
  double seconds_gather = 0;       ///< in gathering updated parameters; stage 3: that this thread spent on it or waited for it

  // Stage 3, from one step's end to the next's. A fault: an operator touched parameters of a bucket that wasn't resident.
  std::int64_t faults = 0;           ///< buckets that were gathered when they were touched
  std::int64_t prefetch_hits = 0;    ///< buckets that had been gathered when they were touched
  std::int64_t deviations = 0;       ///< times that the order of touches wasn't that of a step before
  double late_prefetch_seconds = 0;  ///< waited for buckets that were on their way
  std::int64_t evictions = 0;        ///< buckets that went for others, within the budget
  std::int64_t write_backs = 0;      ///< edited buckets whose slice went to this rank's shard
  std::int64_t bytes_gathered = 0;   ///< of other ranks' shards, copied or (large buckets) mapped; part of bytes_sent
  std::int64_t predicted_bytes = 0;  ///< the same, expected from the steps before; 0: nothing was known
  std::int64_t peak_resident_parameter_bytes = 0;  ///< most that was whole at a time
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
