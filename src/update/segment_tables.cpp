#include "update/segment_tables.h"

#include <algorithm>

#include "core/memory.h"

namespace zero {

namespace cuda = kernels::cuda;

namespace {

bool same(const cuda::Segment& a, const cuda::Segment& b) {
  return a.begin == b.begin && a.end == b.end && a.parameter == b.parameter && a.entry == b.entry;
}

}  // namespace

cuda::SegmentTable SegmentTables::of(Key key, const std::vector<cuda::Segment>& segments, std::int64_t elements) {
  auto& table = tables_[key];
  if (table.elements != elements || table.segments.size() != segments.size() ||
      !std::equal(segments.begin(), segments.end(), table.segments.begin(), same)) {
    const auto first = cuda::make_tile_map(segments, elements);
    table = {segments, elements, to_device(segments.data(), segments.size() * sizeof segments[0], device_),
             to_device(first.data(), first.size() * sizeof first[0], device_)};
  }
  return {static_cast<const cuda::Segment*>(table.segments_there.const_data_ptr()),
          static_cast<const std::int32_t*>(table.first_there.const_data_ptr()),
          static_cast<std::int32_t>(table.segments.size()), elements};
}

}  // namespace zero
