// What a shard consists of: segments, one per parameter that has a piece in it, and a map from tiles of the shard to segments. Made
// once per layout on the host and kept in device memory; what changes from step to step is elsewhere (step.h).
//
// Why a map and not a search: a block finds its segment with one load of four bytes per tile. A binary search over all segments would
// be ten dependent loads, each the latency of the L2 cache, before the first element is asked for. Where a tile holds several
// segments a thread searches among those only.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <vector>

namespace zero::kernels::cuda {

/// Elements per tile: what a block works on at a time, eight per thread.
constexpr std::int64_t kTile = 2048;

/// The most elements that one load takes.
constexpr int kMaxPack = 8;

/// Elements [begin, end) of the shard belong to one parameter. Segments are in order and don't overlap; what lies between them
/// (padding) is neither read for a result nor written.
struct Segment {
  std::int64_t begin, end;
  std::int32_t parameter;  ///< its number, as a non-finite gradient is reported
  std::int32_t entry;      ///< its place in the tables of step.h
};

/// Both arrays in device memory.
struct SegmentTable {
  const Segment* segments;
  const std::int32_t* first;  ///< of each tile, from make_tile_map()
  std::int32_t count;         ///< of segments
  std::int64_t elements;      ///< of the shard
};

/// For each tile the first segment that may reach into it, and `segments.size()` for the places behind the last.
///
/// A launch may begin its tiles up to kMaxPack - 1 elements before the shard, so that loads are aligned (alignment.h). So an entry is
/// for elements from kMaxPack before the tile on, and element x of tile t belongs to a segment in [first[t], first[t + 2]].
inline std::vector<std::int32_t> make_tile_map(const std::vector<Segment>& segments, std::int64_t elements) {
  std::int64_t before = 0;
  for (const Segment& s : segments) {
    if (s.begin < before || s.end < s.begin || s.end > elements)
      throw std::invalid_argument("make_tile_map: segments must be in order, apart, and inside the shard");
    before = s.end;
  }
  const std::int64_t tiles = (elements + kMaxPack - 1) / kTile + 1;
  std::vector<std::int32_t> first(static_cast<std::size_t>(tiles + 2));
  std::size_t s = 0;
  for (std::size_t t = 0; t < first.size(); ++t) {
    while (s < segments.size() && segments[s].end <= static_cast<std::int64_t>(t) * kTile - kMaxPack) ++s;
    first[t] = static_cast<std::int32_t>(s);
  }
  return first;
}

}  // namespace zero::kernels::cuda
