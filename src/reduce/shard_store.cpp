#include "reduce/shard_store.h"

#include <ATen/ops/empty.h>

#include <utility>

#include "core/memory.h"

namespace zero {

ShardStore::ShardStore(GradientContext context) : context_(std::move(context)), stream_(context_) {
  stream_.sink.before = [this](int unit) { before_change(unit); };
  stream_.sink.shard = [this](int unit) { return raw(unit); };
  stream_.sink.has_gradient = [this](int parameter) { return has_gradient(parameter); };
  stream_.sink.merge = [this](int unit, const at::Tensor& sum, const std::vector<char>& onto) { merge(unit, sum, onto); };
}

void ShardStore::allocate() {
  const auto& spaces = context_.layout.spaces();
  for (std::size_t s = shards_.size(); s < spaces.size(); ++s) {
    shards_.push_back(context_.comm.allocate(spaces[s].shard * spaces[s].itemsize,
                                             "shards of the gradients of parameter group " + std::to_string(spaces[s].group)));
  }
  units_.resize(context_.layout.units());
  stream_.allocate();
}

at::Tensor ShardStore::raw(int unit) const {
  const auto [space, bucket] = context_.layout.place(unit);
  const auto& s = context_.layout.spaces()[space];
  const auto& b = s.buckets[bucket];
  return tensor_over(static_cast<char*>(shards_[space].data()) + b.shards_before * s.itemsize, shards_[space].impl(), {b.shard},
                     {1}, context_.dtype(space), context_.device);
}

void ShardStore::divide(int unit) {
  auto& u = units_[unit];
  if (u.divided) return;
  u.divided = true;
  u.by = context_.division.by / context_.early(context_.layout.place(unit).space);
  if (u.by != 1) raw(unit).div_(u.by);
}

void ShardStore::undivide(int unit) {
  auto& u = units_[unit];
  if (!context_.division.late || !u.divided) return;
  u.divided = false;
  if (u.by != 1) raw(unit).mul_(u.by);
}

at::Tensor ShardStore::average(int unit) {
  divide(unit);
  return raw(unit);
}

// Only now is what was there on the way to being added to: sums with sums.
void ShardStore::merge(int unit, const at::Tensor& sum, const std::vector<char>& onto) {
  if (!sum.defined()) {
    if (context_.division.late) units_[unit].divided = false;
    return;
  }
  undivide(unit);
  const auto [space, bucket] = context_.layout.place(unit);
  const auto& members = context_.layout.spaces()[space].buckets[bucket].parameters;
  const auto shard = raw(unit);
  std::size_t at = 0;
  for (const auto& segment : context_.layout.segments(space, bucket, context_.comm.rank())) {
    while (members[at] != segment.parameter) ++at;
    auto to = shard.narrow(0, segment.in_shard, segment.numel);
    const auto from = sum.narrow(0, segment.in_shard, segment.numel);
    onto[at] ? to.add_(from) : to.copy_(from);
  }
}

void ShardStore::add(int parameter, const at::Tensor& gradient, bool onto) { stream_.add(parameter, gradient, onto); }
void ShardStore::add_nothing(int) {}  // the stream adds zeros where nothing has arrived

void ShardStore::for_each_part(int parameter, const std::function<void(const at::Tensor&)>& run) {
  const auto& slot = context_.layout.slot(parameter);
  for (const auto& segment : context_.layout.segments(slot.space, slot.bucket, context_.comm.rank()))
    if (segment.parameter == parameter)
      run(average(context_.layout.unit_of(parameter)).narrow(0, segment.in_shard, segment.numel).detach());
}

void ShardStore::multiply(int parameter, double factor) {
  for_each_part(parameter, [&](const at::Tensor& part) { part.mul_(factor); });
}

bool ShardStore::edit(int parameter, bool, const std::function<void(const at::Tensor&)>& run) {
  for_each_part(parameter, run);
  return true;
}

std::uint8_t ShardStore::flags(int parameter) const { return static_cast<std::uint8_t>(kAveraged | stream_.flags(parameter)); }

void ShardStore::finish(const GradientAgreement& agreed) { stream_.finish(agreed); }

void ShardStore::fetch(int unit) {
  auto& whole = units_[unit].whole;
  const auto bytes = context_.layout.bytes(unit);
  for (auto& spare : spares_) {
    if (spare.defined() && spare.numel() >= bytes) {
      whole = std::exchange(spare, at::Tensor());
      break;
    }
  }
  if (!whole.defined()) whole = at::empty({bytes}, context_.bytes());
  try {
    context_.comm.all_gather(average(unit), bucket(unit), context_.label("gathering gradients,", unit));
  } catch (...) {
    whole.reset();
    throw;
  }
}

at::Tensor ShardStore::bucket(int unit) {
  const auto& whole = units_[unit].whole;
  const auto [space, b] = context_.layout.place(unit);
  return tensor_over(whole.data_ptr(), std::make_shared<at::Tensor>(whole),
                     {context_.layout.spaces()[space].buckets[b].shard * context_.layout.ranks()}, {1}, context_.dtype(space),
                     context_.device);
}

void ShardStore::store(int unit) {
  const auto mine = average(unit);
  const auto bytes = static_cast<std::int64_t>(mine.nbytes());
  if (bytes == 0) return;
  const auto* whole = static_cast<const char*>(units_[unit].whole.const_data_ptr());
  copy_bytes(mine.data_ptr(), whole + bytes * context_.comm.rank(), bytes, context_.device);
}

void ShardStore::release(int unit) {
  auto& whole = units_[unit].whole;
  // Two are kept: fresh pages are slow, and who reads one gradient reads the next.
  if (spares_.size() < 2) spares_.resize(2);
  for (auto& spare : spares_) {
    if (!spare.defined() || spare.numel() < whole.numel()) {
      spare = whole;
      break;
    }
  }
  whole.reset();
}

void* ShardStore::memory(int parameter) const {
  return context_.in_bucket(units_[context_.layout.unit_of(parameter)].whole.data_ptr(), parameter);
}

std::shared_ptr<void> ShardStore::keeper(int unit) const { return std::make_shared<at::Tensor>(units_[unit].whole); }

std::int64_t ShardStore::gradient_bytes() const {
  std::int64_t sum = 0;
  for (const auto& shard : shards_) sum += shard.bytes();
  return sum;
}

std::int64_t ShardStore::buffer_bytes() const {
  std::int64_t sum = stream_.buffer_bytes();
  for (const auto& unit : units_)
    if (unit.whole.defined()) sum += unit.whole.numel();
  for (const auto& spare : spares_)
    if (spare.defined()) sum += spare.numel();
  return sum;
}

}  // namespace zero
