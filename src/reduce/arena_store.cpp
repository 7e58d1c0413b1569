#include "reduce/arena_store.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

namespace zero {

void ArenaStore::allocate() {
  const auto& spaces = context_.layout.spaces();
  for (std::size_t s = arenas_.size(); s < spaces.size(); ++s) {
    arenas_.push_back(context_.comm.allocate(spaces[s].size * spaces[s].itemsize,
                                             "gradients of parameter group " + std::to_string(spaces[s].group)));
  }
  averaged_.resize(context_.layout.units());
  regions_.resize(context_.parameters.size());
}

const at::Tensor& ArenaStore::region(int parameter) {
  auto& region = regions_[parameter];
  if (!region.defined()) {
    const auto& slot = context_.layout.slot(parameter);
    const auto& space = context_.layout.spaces()[slot.space];
    auto* bucket = static_cast<char*>(arenas_[slot.space].data()) + space.buckets[slot.bucket].begin * space.itemsize;
    region = context_.region(bucket, arenas_[slot.space].impl(), parameter);
  }
  return region;
}

void ArenaStore::forget(int parameter) {
  if (parameter < static_cast<int>(regions_.size())) regions_[parameter].reset();
}

void* ArenaStore::memory(int parameter) const {
  const auto& slot = context_.layout.slot(parameter);
  return static_cast<char*>(arenas_[slot.space].data()) + slot.offset * context_.layout.spaces()[slot.space].itemsize;
}

at::Tensor ArenaStore::bucket(int unit) {
  const auto [space, bucket] = context_.layout.place(unit);
  const auto& s = context_.layout.spaces()[space];
  const auto& b = s.buckets[bucket];
  return tensor_over(static_cast<char*>(arenas_[space].data()) + b.begin * s.itemsize, arenas_[space].impl(),
                     {b.shard * context_.layout.ranks()}, {1}, context_.dtype(space), context_.device);
}

at::Tensor ArenaStore::average(int unit) {
  const auto whole = bucket(unit);
  const auto shard = whole.numel() / context_.layout.ranks();
  return whole.narrow(0, shard * context_.comm.rank(), shard);
}

void ArenaStore::make_local(int unit) {
  if (!averaged(unit)) return;
  before_change(unit);
  const double factor = share(averaged_[unit].by);
  if (factor != 1) bucket(unit).mul_(factor);
  averaged_[unit].by = 0;
}

void ArenaStore::add(int parameter, const at::Tensor& gradient, bool onto) {
  make_local(context_.layout.unit_of(parameter));
  onto ? static_cast<void>(region(parameter).add_(gradient)) : place_gradient(region(parameter), gradient);
}

void ArenaStore::add_nothing(int parameter) {
  make_local(context_.layout.unit_of(parameter));
  region(parameter).zero_();
}

void ArenaStore::multiply(int parameter, double factor) { region(parameter).mul_(factor); }

bool ArenaStore::edit(int parameter, bool overwrites, const std::function<void(const at::Tensor&)>& run) {
  if (!overwrites) return false;
  const auto& mine = region(parameter);
  run(mine);
  // Local: this rank's part of the new average.
  if (const double factor = share(context_.division.by); !averaged(context_.layout.unit_of(parameter)) && factor != 1)
    mine.mul_(factor);
  return true;
}

std::uint8_t ArenaStore::flags(int parameter) const { return averaged(context_.layout.unit_of(parameter)) ? kAveraged : 0; }

void ArenaStore::finish(const GradientAgreement& agreed) {
  for (int unit = 0; unit < static_cast<int>(averaged_.size()); ++unit) {
    if (!averaged(unit)) continue;
    const auto [space, bucket] = context_.layout.place(unit);
    // All parameters of a unit have the same flag: one is enough.
    const int one = context_.layout.spaces()[space].buckets[bucket].parameters.front();
    for (const auto& rank : agreed.flags)
      if (!(rank[one] & kAveraged)) make_local(unit);
  }
}

void ArenaStore::fetch(int unit) {
  if (averaged(unit)) return;
  const auto whole = bucket(unit);
  const auto mine = average(unit);
  context_.comm.reduce_scatter(whole, mine, context_.division.by, context_.label("reducing gradients,", unit));
  if (context_.comm.size() > 1) context_.comm.all_gather(mine, whole, context_.label("gathering gradients,", unit));
  averaged_[unit].by = context_.division.by;
}

at::Tensor ArenaStore::scratch(std::size_t first_space) const {
  if (arenas_.size() <= first_space) return at::empty({0}, context_.bytes());
  return tensor_over(arenas_.back().data(), arenas_.back().impl(), {arenas_.back().bytes()}, {1}, at::kByte, context_.device);
}

std::int64_t ArenaStore::gradient_bytes() const {
  std::int64_t sum = 0;
  for (const auto& arena : arenas_) sum += arena.bytes();
  return sum;
}

}  // namespace zero
