#include "layout/layout.h"

#include <algorithm>
#include <functional>
#include <map>
#include <numeric>

#include "core/check.h"

namespace zero {
namespace {

std::int64_t round_up(std::int64_t n, std::int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

}  // namespace

Layout::Layout(int ranks, std::int64_t bucket_bytes, std::int64_t page_shards_from)
    : ranks_(ranks), bucket_bytes_(bucket_bytes), page_shards_from_(page_shards_from) {
  ZERO_CHECK(ranks >= 1, "a layout needs at least one rank, got ", ranks);
  ZERO_CHECK(bucket_bytes >= 1, "bucket_bytes must be positive, got ", bucket_bytes);
  ZERO_CHECK(page_shards_from >= 0, "mapped_shard_bytes must not be negative, got ", page_shards_from);
}

const Slot& Layout::slot(int parameter) const {
  static const Slot kNone;
  return parameter >= 0 && parameter < static_cast<int>(slots_.size()) ? slots_[parameter] : kNone;
}

void Layout::append(const std::vector<ParameterSpec>& specs, const std::vector<int>& parameters) {
  ZERO_CHECK(specs.size() == parameters.size(), specs.size(), " specs for ", parameters.size(), " parameters");
  const int old_spaces = static_cast<int>(spaces_.size());
  std::map<std::tuple<int, int, int>, int> space_of;
  for (std::size_t i = 0; i < specs.size(); ++i) {
    const auto& spec = specs[i];
    const int parameter = parameters[i];
    ZERO_CHECK(slot(parameter).space < 0, "parameter ", parameter, " has a place already");
    auto [it, is_new] = space_of.try_emplace({spec.group, spec.dtype, spec.device}, static_cast<int>(spaces_.size()));
    if (is_new) {
      spaces_.emplace_back();
      auto& made = spaces_.back();
      made.group = spec.group, made.dtype = spec.dtype, made.device = spec.device, made.itemsize = spec.itemsize;
    }
    auto& space = spaces_[it->second];
    const std::int64_t align = std::max<std::int64_t>(1, kAlignment / space.itemsize);
    const std::int64_t bucket_limit = std::max<std::int64_t>(align, bucket_bytes_ / space.itemsize);
    // While a bucket is open, `space.size` is the end of what it holds, and its `shard` is not known yet.
    if (space.buckets.empty() ||
        (space.size > space.buckets.back().begin && space.size - space.buckets.back().begin + spec.numel > bucket_limit)) {
      if (!space.buckets.empty()) close(space);
      space.buckets.emplace_back();
      space.buckets.back().begin = space.size;
    }
    if (static_cast<int>(slots_.size()) <= parameter) slots_.resize(parameter + 1);
    slots_[parameter] = {it->second, static_cast<int>(space.buckets.size()) - 1, space.size, spec.numel};
    space.buckets.back().parameters.push_back(parameter);
    space.size = round_up(space.size + spec.numel, align);
  }
  for (std::size_t s = old_spaces; s < spaces_.size(); ++s) {
    auto& space = spaces_[s];
    space.first_unit = s == 0 ? 0 : spaces_[s - 1].first_unit + static_cast<int>(spaces_[s - 1].buckets.size());
    close(space);
    for (auto& bucket : space.buckets) {
      bucket.shards_before = space.shard;
      space.shard += bucket.shard;
    }
  }
}

// The last bucket gets no more parameters: cuts it into shards.
void Layout::close(Space& space) const {
  auto& bucket = space.buckets.back();
  const std::int64_t elements = (space.size - bucket.begin + ranks_ - 1) / ranks_;
  const bool pages = page_shards_from_ > 0 && elements * space.itemsize >= page_shards_from_;
  const std::int64_t align = pages ? kPage : kAlignment;
  bucket.shard = round_up(elements, std::max<std::int64_t>(1, align / space.itemsize));
  space.size = bucket.begin + bucket.shard * ranks_;
}

Layout Layout::in_types(const std::function<std::pair<int, int>(int, int)>& type_of) const {
  Layout out = *this;
  for (auto& space : out.spaces_) std::tie(space.dtype, space.itemsize) = type_of(space.dtype, space.itemsize);
  return out;
}

int Layout::units() const {
  return spaces_.empty() ? 0 : spaces_.back().first_unit + static_cast<int>(spaces_.back().buckets.size());
}

Layout::Place Layout::place(int unit) const {
  const auto after =
      std::upper_bound(spaces_.begin(), spaces_.end(), unit, [](int u, const Space& s) { return u < s.first_unit; });
  const auto space = static_cast<int>(after - spaces_.begin()) - 1;
  return {space, unit - spaces_[space].first_unit};
}

std::vector<Segment> Layout::cut(int space, int bucket, std::int64_t lo, std::int64_t hi) const {
  std::vector<Segment> out;
  for (int parameter : spaces_.at(space).buckets.at(bucket).parameters) {
    const auto& place = slots_[parameter];
    const std::int64_t begin = std::max(lo, place.offset), end = std::min(hi, place.offset + place.numel);
    if (begin < end) out.push_back({parameter, begin - place.offset, begin, begin - lo, end - begin});
  }
  return out;
}

std::vector<Segment> Layout::segments(int space, int bucket, int rank) const {
  const auto& b = spaces_.at(space).buckets.at(bucket);
  return cut(space, bucket, b.begin + b.shard * rank, b.begin + b.shard * (rank + 1));
}

std::vector<Segment> Layout::whole(int space, int bucket) const {
  const auto& b = spaces_.at(space).buckets.at(bucket);
  return cut(space, bucket, b.begin, b.begin + b.shard * ranks_);
}

const Bucket& Layout::bucket(int unit) const {
  const auto at = place(unit);
  return spaces_[at.space].buckets[at.bucket];
}

std::int64_t Layout::shard_bytes(int unit) const {
  const auto at = place(unit);
  return spaces_[at.space].buckets[at.bucket].shard * spaces_[at.space].itemsize;
}

std::int64_t Layout::bytes_in_bucket(int parameter) const {
  const auto& at = slot(parameter);
  const auto& space = spaces_[at.space];
  return (at.offset - space.buckets[at.bucket].begin) * space.itemsize;
}

std::int64_t Layout::padded_numel() const {
  std::int64_t sum = 0;
  for (const auto& space : spaces_) sum += space.size;
  return sum;
}

std::int64_t Layout::padded_bytes() const {
  std::int64_t sum = 0;
  for (const auto& space : spaces_) sum += space.size * space.itemsize;
  return sum;
}

std::int64_t Layout::largest_buckets_bytes(std::size_t how_many) const {
  std::vector<std::int64_t> sizes;
  for (const auto& space : spaces_)
    for (const auto& bucket : space.buckets) sizes.push_back(bucket.shard * ranks_ * space.itemsize);
  std::sort(sizes.begin(), sizes.end(), std::greater<>());
  sizes.resize(std::min(sizes.size(), how_many));
  return std::accumulate(sizes.begin(), sizes.end(), std::int64_t{0});
}

}  // namespace zero
