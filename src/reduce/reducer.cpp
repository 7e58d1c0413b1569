#include "reduce/reducer.h"

#include <ATen/ops/empty.h>

namespace zero {

Reducer::Reducer(GradientContext context, Gradients& gradients, bool whole)
    : context_(std::move(context)), gradients_(gradients), whole_(whole) {}

void Reducer::allocate() {
  if (nothing_to_do() && !context_.division.late) return;  // the gradient is the average
  if (gradients_.sharded()) return;                        // the shards are there
  const std::int64_t bytes = layout().largest_bucket_bytes();
  if (whole_) {
    if (!whole_scratch_.defined() || whole_scratch_.bytes() < bytes)
      whole_scratch_ = context_.comm.allocate(bytes, "averages of one bucket");
  } else if (!shard_scratch_.defined() || shard_scratch_.numel() < bytes / context_.comm.size()) {
    shard_scratch_ = at::empty({bytes / context_.comm.size()}, context_.bytes());
  }
}

at::Tensor Reducer::kept(int space, int bucket) {
  const auto& s = layout().spaces()[space];
  if (kept_.size() < layout().spaces().size()) kept_.resize(layout().spaces().size());
  if (!kept_[space].defined())
    kept_[space] =
        at::empty({s.shard}, at::TensorOptions().dtype(static_cast<at::ScalarType>(s.dtype)).device(context_.device));
  const auto& b = s.buckets[bucket];
  return kept_[space].narrow(0, b.shards_before, b.shard);
}

at::Tensor Reducer::shard(int space, int bucket, bool keep) {
  const auto& s = layout().spaces()[space];
  const auto& b = s.buckets[bucket];
  const auto dtype = static_cast<at::ScalarType>(s.dtype);
  const int unit = layout().unit(space, bucket);
  if (gradients_.averaged(unit)) return gradients_.average(unit);
  auto mine = gradients_.bucket(unit);
  if (nothing_to_do()) return mine;
  if (keep && kept_valid_) return kept(space, bucket);
  at::Tensor out;
  if (keep) {
    out = kept(space, bucket);
  } else if (whole_) {
    auto* base = static_cast<char*>(whole_scratch_.data()) + b.shard * context_.comm.rank() * s.itemsize;
    out = tensor_over(base, whole_scratch_.impl(), {b.shard}, {1}, dtype, context_.device);
  } else {
    out = tensor_over(shard_scratch_.data_ptr(), std::make_shared<at::Tensor>(shard_scratch_), {b.shard}, {1}, dtype,
                      context_.device);
  }
  context_.comm.reduce_scatter(mine, out, context_.division.by, context_.label("reducing gradients,", unit));
  return out;
}

at::Tensor Reducer::whole(int space, int bucket, const at::Tensor& shard) {
  if (context_.comm.size() == 1) return shard;
  const int unit = layout().unit(space, bucket);
  if (gradients_.averaged(unit)) return gradients_.bucket(unit);
  const auto& s = layout().spaces()[space];
  const auto& b = s.buckets[bucket];
  auto out = tensor_over(whole_scratch_.data(), whole_scratch_.impl(), {b.shard * context_.comm.size()}, {1},
                         static_cast<at::ScalarType>(s.dtype), context_.device);
  auto mine = out.narrow(0, b.shard * context_.comm.rank(), b.shard);
  if (mine.data_ptr() != shard.data_ptr()) mine.copy_(shard);
  context_.comm.all_gather(mine, out, context_.label("gathering averages,", unit));
  return out;
}

std::int64_t Reducer::bytes() const {
  std::int64_t sum = whole_scratch_.defined() ? whole_scratch_.bytes() : 0;
  if (shard_scratch_.defined()) sum += shard_scratch_.numel();
  for (const auto& kept : kept_)
    if (kept.defined()) sum += static_cast<std::int64_t>(kept.nbytes());
  return sum;
}

}  // namespace zero
