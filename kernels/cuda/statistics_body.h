// One thread's part of a shard's gradient statistics: the sum of squares in double and the first parameter that isn't finite.
//
// The same geometry gives the same bits: which thread adds which elements depends on the shard's size, type and segments only. So
// packs aren't moved to where the memory is aligned (a walk from element 0 on), and the number of blocks isn't the GPU's.
#pragma once

#include "pack.h"
#include "step.h"
#include "tables.h"
#include "walk.h"

namespace zero::kernels::cuda {

/// Of two parts of the gradients together; what a rank's own were is left out.
ZERO_HOST_DEVICE Statistics both(const Statistics& a, const Statistics& b) {
  return {a.sum_of_squares + b.sum_of_squares, a.first_nonfinite < b.first_nonfinite ? a.first_nonfinite : b.first_nonfinite,
          kAllFinite};
}

ZERO_HOST_DEVICE void begin(StepRecord& record) {
  record.sum_of_squares = 0;
  record.first_nonfinite = record.first_own = kAllFinite;
  record.rank_of_own = -1;
}
ZERO_HOST_DEVICE void add(const Statistics& found, StepRecord& record) {
  const Statistics sum = both({record.sum_of_squares, record.first_nonfinite, kAllFinite}, found);
  record.sum_of_squares = sum.sum_of_squares;
  record.first_nonfinite = sum.first_nonfinite;
}

ZERO_HOST_DEVICE bool is_finite(float x) { return (bits_of(x) & 0x7f800000u) != 0x7f800000u; }
ZERO_HOST_DEVICE bool is_finite(double x) { return x - x == 0; }

template <class E>
struct StatisticsBody {
  static constexpr int kPack = kPackOf<E>;

  const E* grad;
  const ParameterStep* parameters;
  SegmentTable table;
  Alignment alignment;

  struct Visitor {
    const StatisticsBody& body;
    Statistics found;

    template <int V, int U, bool kAligned>
    ZERO_HOST_DEVICE void visit(std::int64_t first, int stride, const Segment& segment) {
      if (body.parameters[segment.entry].absent != 0) return;
      Pack<E, V> pack[U];
      ZERO_UNROLL
      for (int u = 0; u < U; ++u) pack[u] = load_pack<V>(body.grad + first + u * stride, kAligned || body.alignment.all);
      bool finite = true;
      ZERO_UNROLL
      for (int u = 0; u < U; ++u) {
        ZERO_UNROLL
        for (int k = 0; k < V; ++k) {
          const auto x = widen(pack[u].e[k]);
          finite = finite && is_finite(x);
          found.sum_of_squares += static_cast<double>(x) * static_cast<double>(x);
        }
      }
      if (!finite && segment.parameter < found.first_nonfinite) found.first_nonfinite = segment.parameter;
    }
  };

  ZERO_HOST_DEVICE Statistics operator()(Place at) const {
    Visitor visitor{*this, {}};
    walk<kPack>(table, alignment, at, visitor);
    return visitor.found;
  }
};

/// How many blocks a shard's statistics take, for the same sum on every GPU.
inline int statistics_blocks(std::int64_t elements) {
  const std::int64_t tiles = tiles_of(elements, 0);
  return static_cast<int>(tiles < kStatisticsBlocks ? tiles : kStatisticsBlocks);
}

/// Packs begin at element 0 whatever the address.
inline Alignment align_statistics(Span grad) {
  Alignment a;
  a.all = reinterpret_cast<std::uintptr_t>(grad.data) % 16 == 0;
  a.aligned = a.all ? 1 : 0;
  return a;
}

}  // namespace zero::kernels::cuda
