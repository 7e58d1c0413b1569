// Ranks that run out of data before the others.
#pragma once

#include "zero/export.h"
#include "zero/optimizer.h"

namespace zero {

/// For loops in which ranks have unequal numbers of batches. Made by every rank before the loop; a rank whose data has ended calls
/// wait() and then takes part in what the others still do, with gradients of zero, until all have come there:
///
///   zero::Join join(opt);
///   for (auto& batch : *loader) { opt.zero_grad(); loss(batch).backward(); opt.step(); }
///   join.wait();
///
/// All ranks end with the same parameters. The divisor stays what Options say (the mean is over all ranks, also those that have joined;
/// Reduction::kWeighted is the mean over what was really seen). Without Join, an error names the ranks' different calls.
///
/// While somebody has joined: gradients may be read, clipped by zero::clip_grad_norm_ and cleared; other in-place edits of
/// gradients can't reach the ranks that have joined and throw. The backwards have to be the same as long as a rank takes part (no rank
/// is in the middle of an accumulation when it joins). In the scope, stage 2 averages at the end of each backward and not during it:
/// until then it keeps whole gradients.
class ZERO_API Join {
 public:
  explicit Join(ZeroOptimizer& optimizer);
  ~Join();  ///< does not communicate: without wait() the others will miss this rank
  Join(const Join&) = delete;
  Join& operator=(const Join&) = delete;

  /// Collective with whatever the others do. @returns steps made here for others
  std::int64_t wait();

 private:
  ZeroOptimizer* optimizer_;
};

}  // namespace zero
