// Averages over ranks, one bucket at a time: this rank's shard of a bucket, and from the shards the whole bucket (stage 0).
//
// Where gradients are averaged already (stage 2, or somebody has read them) that average is used. Elsewhere the average goes to
// scratch that the next bucket reuses, or, where every shard must be known before anything is written (a norm, a user's
// optimizer), to shards that are kept until the step ends; the rank's own gradients are not overwritten.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "layout/layout.h"
#include "reduce/gradients.h"
#include "zero/communicator.h"

namespace zero {

class Reducer {
 public:
  /// @param whole buckets will be wanted whole (stage 0)
  Reducer(GradientContext context, Gradients& gradients, bool whole);

  /// Collective. Makes scratch for the layout as it is now.
  void allocate();

  /// Collective. The average of this rank's shard: `shard` elements of the bucket, valid until the next call for any bucket,
  /// or with `keep` until drop(). In a world of one this is the gradient itself: read only.
  at::Tensor shard(int space, int bucket, bool keep);

  /// Collective. The whole bucket's averages from the ranks' shards; valid until the next call.
  at::Tensor whole(int space, int bucket, const at::Tensor& shard);

  /// Averages of all buckets are kept and still wanted?
  bool keeps() const { return kept_valid_; }
  void set_kept(bool valid) { kept_valid_ = valid; }

  /// Bytes of scratch and kept shards on this rank.
  std::int64_t bytes() const;

 private:
  at::Tensor kept(int space, int bucket);
  const Layout& layout() const { return context_.layout; }
  bool nothing_to_do() const { return context_.comm.size() == 1 && context_.division.by == 1; }

  GradientContext context_;
  Gradients& gradients_;
  bool whole_;
  Buffer whole_scratch_;          ///< stage 0: one bucket, in reach of the peers
  at::Tensor shard_scratch_;      ///< stage 1: one shard of the largest bucket, as bytes
  std::vector<at::Tensor> kept_;  ///< per space: this rank's shards of all buckets
  bool kept_valid_ = false;
};

}  // namespace zero
