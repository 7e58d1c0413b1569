// Where the packs of a launch begin. Streams of a shard may begin anywhere (a parameter inside a bucket, a view); packs are aligned
// for as many bytes per element as possible, and streams that are left over are read and written element by element.
#pragma once

#include <cstdint>
#include <initializer_list>

#include "../kernels.h"

namespace zero::kernels::cuda {

struct Alignment {
  int origin = 0;             ///< the first pack begins at this element, -7 to 0
  std::uint32_t aligned = 0;  ///< bit k: stream k can be accessed a pack at a time
  bool all = false;           ///< every stream can
};

/// The best alignment of packs of `pack` elements. A stream without memory counts as aligned.
inline Alignment align_packs(int pack, std::initializer_list<Span> streams) {
  Alignment best;
  std::int64_t best_bytes = -1;
  for (int origin = 0; origin > -pack; --origin) {
    Alignment a;
    a.origin = origin;
    a.all = true;
    std::int64_t bytes = 0;
    std::uint32_t bit = 1;
    for (const Span& s : streams) {
      const std::int64_t size = size_of(s.dtype);
      const auto start = static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(s.data)) + origin * size;
      if (s.data == nullptr || start % (pack * size) == 0) {
        a.aligned |= bit;
        bytes += s.data == nullptr ? 0 : size;
      } else {
        a.all = false;
      }
      bit <<= 1;
    }
    if (bytes > best_bytes) {
      best = a;
      best_bytes = bytes;
    }
  }
  return best;
}

}  // namespace zero::kernels::cuda
