// The table of loops that is built once per instruction set (isa_*.cpp) and chosen from at run time (dispatch.cpp). Called by
// kernels.cpp, which adds argument checks and threads; the tests use select_instruction_set to compare the sets' bits.
#pragma once

#include <cstdint>

#include "kernels.h"

namespace zero::kernels {

/// Elements per block: where threads are cut, and the leaves of squared_norm's summation tree.
constexpr std::int64_t kBlock = 4096;

/// What adam() is called with, cut to one thread's range.
struct AdamRange {
  AdamSpans spans;
  std::int64_t begin = 0, end = 0;
};

/// The same for sgd().
struct SgdRange {
  SgdSpans spans;
  std::int64_t begin = 0, end = 0;
};

/// What sum_ranks() and sum_ranks_wide() are called with.
struct SumArgs {
  void* out = nullptr;
  const void* const* in = nullptr;
  int ranks = 0;
  std::int64_t n = 0;
  DType dtype = DType::f32;
  bool wide = false;  ///< out is float (f64: double) instead of dtype
  double divisor = 1;
  bool stream = false;  ///< write past the caches; out is none of the inputs
};

/// One instruction set's loops. Each works on the calling thread.
struct Table {
  const char* name;
  void (*adam)(const AdamRange&, const AdamArgs&);
  void (*sgd)(const SgdRange&, const SgdArgs&);
  /// Sum of squares of `count` <= kBlock elements that start at element `begin`.
  double (*squares_of_block)(Span values, std::int64_t begin, std::int64_t count);
  void (*sum)(const SumArgs&);
  void (*scale)(Span x, std::int64_t begin, std::int64_t end, double factor);
  /// Copies past the caches.
  void (*stream_copy)(void* to, const void* from, std::int64_t bytes);
};

extern const Table baseline_table;
#if defined(ZERO_KERNELS_X86)
extern const Table avx2_table;
extern const Table avx512_table;
#endif

/// The table in use.
const Table& table();

/// Makes every later call use the named set. For tests and benchmarks.
/// @return false, and nothing changes, where this processor or this build lacks it
bool select_instruction_set(const char* name);

}  // namespace zero::kernels
