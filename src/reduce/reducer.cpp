#include "reduce/reducer.h"

#include <ATen/ops/empty.h>

namespace zero {

Reducer::Reducer(Communicator comm, const std::vector<Parameter>& parameters, const Layout& layout, Gradients& gradients,
                 double divisor, bool whole)
    : comm_(std::move(comm)),
      parameters_(parameters),
      layout_(layout),
      gradients_(gradients),
      divisor_(divisor),
      whole_(whole) {}

void Reducer::allocate() {
  if (comm_.size() == 1 && divisor_ == 1) return;  // the gradient is the average
  const std::int64_t bytes = layout_.largest_bucket_bytes();
  if (whole_) {
    if (!whole_scratch_.defined() || whole_scratch_.bytes() < bytes)
      whole_scratch_ = comm_.allocate(bytes, "averages of one bucket");
  } else if (!shard_scratch_.defined() || shard_scratch_.numel() < bytes / comm_.size()) {
    shard_scratch_ = at::empty({bytes / comm_.size()}, at::kByte);
  }
}

std::string Reducer::label(const char* what, int space, int bucket) const {
  const auto& members = layout_.spaces()[space].buckets[bucket].parameters;
  std::string out = std::string(what) + " bucket " + std::to_string(bucket);
  if (members.empty()) return out;
  out += " (" + parameters_[members.front()].name;
  if (members.size() > 1) out += " … " + parameters_[members.back()].name;
  return out + ")";
}

at::Tensor Reducer::kept(int space, int bucket) {
  const auto& s = layout_.spaces()[space];
  if (kept_.size() < layout_.spaces().size()) kept_.resize(layout_.spaces().size());
  if (!kept_[space].defined())
    kept_[space] = at::empty({s.shard}, at::TensorOptions().dtype(static_cast<at::ScalarType>(s.dtype)));
  const auto& b = s.buckets[bucket];
  return kept_[space].narrow(0, b.shards_before, b.shard);
}

at::Tensor Reducer::shard(int space, int bucket, bool keep) {
  const auto& s = layout_.spaces()[space];
  const auto& b = s.buckets[bucket];
  const auto dtype = static_cast<at::ScalarType>(s.dtype);
  auto mine = gradients_.bucket(space, bucket);
  if (comm_.size() == 1 && divisor_ == 1) return mine;
  if (keep && kept_valid_) return kept(space, bucket);
  at::Tensor out;
  if (keep) {
    out = kept(space, bucket);
  } else if (whole_) {
    auto* base = static_cast<char*>(whole_scratch_.data()) + b.shard * comm_.rank() * s.itemsize;
    out = tensor_over(base, whole_scratch_.impl(), {b.shard}, {1}, dtype);
  } else {
    out = tensor_over(shard_scratch_.data_ptr(), std::make_shared<at::Tensor>(shard_scratch_), {b.shard}, {1}, dtype);
  }
  comm_.reduce_scatter(mine, out, divisor_, label("reducing gradients of", space, bucket));
  return out;
}

at::Tensor Reducer::whole(int space, int bucket, const at::Tensor& shard) {
  if (comm_.size() == 1) return shard;
  const auto& s = layout_.spaces()[space];
  const auto& b = s.buckets[bucket];
  auto out = tensor_over(whole_scratch_.data(), whole_scratch_.impl(), {b.shard * comm_.size()}, {1},
                         static_cast<at::ScalarType>(s.dtype));
  auto mine = out.narrow(0, b.shard * comm_.rank(), b.shard);
  if (mine.data_ptr() != shard.data_ptr()) mine.copy_(shard);
  comm_.all_gather(mine, out, label("gathering averages of", space, bucket));
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
