// The walk of a launch over a shard: which thread works on which elements, and of which segment they are. Update and statistics share
// it; what they do with a pack is the visitor's.
//
// Tiles go round the blocks. Almost every tile of a large parameter lies in one segment: then each thread asks for its eight elements
// at once (several independent 16-byte loads in flight) under scalars that are loaded once. A tile in which segments begin or end
// goes pack by pack, with a short search each; a pack that a segment's edge cuts goes element by element, in order.
#pragma once

#include "alignment.h"
#include "place.h"
#include "segments.h"

namespace zero::kernels::cuda {

/// The first segment in [low, high] that ends behind element i, which high does or is the end.
ZERO_HOST_DEVICE std::int32_t find_segment(const Segment* segments, std::int32_t low, std::int32_t high, std::int64_t i) {
  while (low < high) {
    const std::int32_t middle = low + (high - low) / 2;
    if (segments[middle].end > i) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  return low;
}

/// How many tiles a walk has.
ZERO_HOST_DEVICE std::int64_t tiles_of(std::int64_t elements, int origin) { return (elements - origin + kTile - 1) / kTile; }

/// The pack of elements [i, i + V): whole, or its parts by elements.
template <int V, class Visitor>
ZERO_HOST_DEVICE void visit_pack(const SegmentTable& table, std::int32_t s, std::int64_t i, Visitor& visitor) {
  ZERO_NO_UNROLL
  for (; s < table.count; ++s) {
    const Segment segment = table.segments[s];
    if (segment.begin >= i + V) return;
    if (segment.begin <= i && segment.end >= i + V) {
      visitor.template visit<V, 1, false>(i, 0, segment);
      return;
    }
    const std::int64_t begin = segment.begin > i ? segment.begin : i;
    const std::int64_t end = segment.end < i + V ? segment.end : i + V;
    ZERO_NO_UNROLL
    for (std::int64_t k = begin; k < end; ++k) visitor.template visit<1, 1, false>(k, 0, segment);
    if (segment.end >= i + V) return;
  }
}

/// Calls visitor.visit<V, U, aligned>(i, stride, segment) for packs of V elements at i, i + stride, … (U of them), so that each
/// element of each segment is visited once. aligned: all streams, known when the call is compiled.
template <int V, class Visitor>
ZERO_HOST_DEVICE void walk(const SegmentTable& table, const Alignment& alignment, Place at, Visitor& visitor) {
  constexpr int kPacks = static_cast<int>(kTile) / (kThreads * V);
  static_assert(kPacks * kThreads * V == kTile && V <= kMaxPack, "a tile is a whole number of packs per thread");
  const std::int64_t tiles = tiles_of(table.elements, alignment.origin);
  ZERO_NO_UNROLL
  for (std::int64_t t = at.block; t < tiles; t += at.blocks) {
    const std::int64_t begin = alignment.origin + t * kTile, end = begin + kTile;
    std::int32_t s = table.first[t];
    // At most kMaxPack times: the map looks a little further back.
    while (s < table.count && table.segments[s].end <= begin) ++s;
    if (s >= table.count) return;
    const Segment segment = table.segments[s];
    if (segment.begin >= end) continue;
    const bool whole = segment.begin <= begin && segment.end >= end;
    if (whole && alignment.all) {
      visitor.template visit<V, kPacks, true>(begin + at.thread * V, kThreads * V, segment);
      continue;
    }
    const std::int32_t last = table.first[t + 2];
    ZERO_NO_UNROLL
    for (int u = 0; u < kPacks; ++u) {
      const std::int64_t i = begin + (static_cast<std::int64_t>(u) * kThreads + at.thread) * V;
      visit_pack<V>(table, whole ? s : find_segment(table.segments, s, last, i), i, visitor);
    }
  }
}

}  // namespace zero::kernels::cuda
