// Sums over ranks, sums of squares and scaling, for one instruction set (isa_table.inc includes this).
#pragma once

#include <type_traits>

#include "convert.h"
#include "stream.h"
#include "table.h"

namespace zero::kernels {
namespace {

/// float for everything but double.
template <class E>
using Wide = std::conditional_t<std::is_same_v<E, double>, double, float>;

/// Bytes ahead of the loads at which inputs are asked for. The hardware's prefetchers stop at every 4 KiB page; with several
/// inputs the loop would wait at each.
constexpr std::int64_t kPrefetch = 1024;

/// x / divisor, by a multiplication where that is the same (powers of two).
template <class T, bool kDivide>
struct Divisor {
  T value;
  template <class V>
  V operator()(V x) const {
    return kDivide ? x / value : x * value;
  }
};

/// The sum over ranks of elements [i, i + kWidth). kRanks == 0: a.ranks.
template <class E, int kRanks>
inline Vector<Wide<E>> sum_of_vector(const SumArgs& a, const E* const* in, std::int64_t i) {
  const int ranks = kRanks != 0 ? kRanks : a.ranks;
  Vector<Wide<E>> sum{};
  for (int r = 0; r < ranks; ++r) {
    const E* x = (kRanks != 0 ? in[r] : static_cast<const E*>(a.in[r])) + i;
    __builtin_prefetch(reinterpret_cast<const char*>(x) + kPrefetch);
    if (r == 0) {
      sum = load_vector(x);
    } else {
      sum += load_vector(x);
    }
  }
  return sum;
}

/// The same for one element.
template <class E>
inline Wide<E> sum_of_element(const SumArgs& a, std::int64_t i) {
  Wide<E> sum = widen(static_cast<const E*>(a.in[0])[i]);
  for (int r = 1; r < a.ranks; ++r) sum += widen(static_cast<const E*>(a.in[r])[i]);
  return sum;
}

/// The sum of inputs of type E, written as Out (E itself or its wide type).
template <class E, class Out, int kRanks, bool kDivide>
void sum_loop(const SumArgs& a, Divisor<Wide<E>, kDivide> over) {
  constexpr std::int64_t width = kWidth<Wide<E>>;
  Out* out = static_cast<Out*>(a.out);
  const E* in[kRanks != 0 ? kRanks : 1] = {};
  for (int r = 0; r < kRanks; ++r) in[r] = static_cast<const E*>(a.in[r]);
  const auto one = [&](std::int64_t i) { narrow(out + i, over(sum_of_element<E>(a, i))); };
  std::int64_t i = 0;
  if (a.stream) {
    const std::int64_t head = bytes_to_line(out) / static_cast<std::int64_t>(sizeof(Out));
    for (; i < a.n && i < head; ++i) one(i);
    for (; i + width <= a.n; i += width) {
      alignas(32) Out result[width];
      store_vector(result, over(sum_of_vector<E, kRanks>(a, in, i)));
      stream_vector(out + i, result);
    }
    stream_fence();
  }
  for (; i + width <= a.n; i += width) store_vector(out + i, over(sum_of_vector<E, kRanks>(a, in, i)));
  for (; i < a.n; ++i) one(i);
}

template <class E, class Out, bool kDivide>
void sum_of_ranks(const SumArgs& a, Divisor<Wide<E>, kDivide> over) {
  switch (a.ranks) {
    case 2:
      return sum_loop<E, Out, 2>(a, over);
    case 3:
      return sum_loop<E, Out, 3>(a, over);
    case 4:
      return sum_loop<E, Out, 4>(a, over);
    default:
      return sum_loop<E, Out, 0>(a, over);
  }
}

/// True where x / d and x * (1 / d) are the same for every x.
inline bool is_power_of_two(double d) {
  int exponent = 0;
  const double mantissa = __builtin_frexp(d, &exponent);
  return mantissa == 0.5 && exponent > -100 && exponent < 100;
}

template <class E, class Out>
void sum_as(const SumArgs& a) {
  using T = Wide<E>;
  if (is_power_of_two(a.divisor)) {
    sum_of_ranks<E, Out>(a, Divisor<T, false>{static_cast<T>(1 / a.divisor)});
  } else {
    sum_of_ranks<E, Out>(a, Divisor<T, true>{static_cast<T>(a.divisor)});
  }
}

void sum(const SumArgs& a) {
  with_type(a.dtype, [&](auto* type) {
    using E = std::remove_pointer_t<decltype(type)>;
    if (a.wide) {
      sum_as<E, Wide<E>>(a);
    } else {
      sum_as<E, E>(a);
    }
  });
}

/// Elements 0..3 and 4..7 of eight floats, in double.
#if defined(__AVX2__)
inline Doubles low_half(Floats x) { return _mm256_cvtps_pd(_mm256_castps256_ps128(x)); }
inline Doubles high_half(Floats x) { return _mm256_cvtps_pd(_mm256_extractf128_ps(x, 1)); }
#else
inline Doubles low_half(Floats x) { return Doubles{x[0], x[1], x[2], x[3]}; }
inline Doubles high_half(Floats x) { return Doubles{x[4], x[5], x[6], x[7]}; }
#endif

/// Sixteen elements in double. Written out, not as a loop: the sums below must stay in registers.
struct Sixteen {
  Doubles a, b, c, d;
};
template <class E>
inline Sixteen load_sixteen(const E* x) {
  if constexpr (std::is_same_v<E, double>) {
    return {load_vector(x), load_vector(x + 4), load_vector(x + 8), load_vector(x + 12)};
  } else {
    const Floats first = load_vector(x);
    const Floats second = load_vector(x + 8);
    return {low_half(first), high_half(first), low_half(second), high_half(second)};
  }
}

/// The leaf of the summation tree: element i goes to lane i mod 16, lanes are folded in halves. The order depends on nothing but
/// the element's place in the block.
template <class E>
inline double squares(const E* x, std::int64_t n) {
  constexpr std::int64_t lanes = 16;
  Sixteen sum = {};
  std::int64_t i = 0;
  for (; i + lanes <= n; i += lanes) {
    __builtin_prefetch(reinterpret_cast<const char*>(x + i) + kPrefetch);
    const Sixteen v = load_sixteen(x + i);
    sum.a += v.a * v.a;
    sum.b += v.b * v.b;
    sum.c += v.c * v.c;
    sum.d += v.d * v.d;
  }
  double lane[lanes];
  __builtin_memcpy(lane, &sum, sizeof lane);
  for (; i < n; ++i) {
    const double value = static_cast<double>(widen(x[i]));
    lane[i % lanes] += value * value;
  }
  for (std::int64_t half = lanes / 2; half > 0; half /= 2) {
    for (std::int64_t k = 0; k < half; ++k) lane[k] += lane[k + half];
  }
  return lane[0];
}

double squares_of_block(Span values, std::int64_t begin, std::int64_t count) {
  double result = 0;
  with_type(values.dtype, [&](auto* type) {
    using E = std::remove_pointer_t<decltype(type)>;
    result = squares(static_cast<const E*>(values.data) + begin, count);
  });
  return result;
}

/// Elements converted at a time.
constexpr std::int64_t kScaleStage = 1024;

void scale_range(Span x, std::int64_t begin, std::int64_t end, double factor) {
  with_type(x.dtype, [&](auto* type) {
    using E = std::remove_pointer_t<decltype(type)>;
    using T = Wide<E>;
    const T f = static_cast<T>(factor);
    E* p = static_cast<E*>(x.data);
    if constexpr (std::is_same_v<E, T>) {
      for (std::int64_t i = begin; i < end; ++i) p[i] *= f;
    } else {
      alignas(64) T wide[kScaleStage];
      for (std::int64_t i = begin; i < end; i += kScaleStage) {
        const std::int64_t n = end - i < kScaleStage ? end - i : kScaleStage;
        load(wide, p + i, n);
        for (std::int64_t k = 0; k < n; ++k) wide[k] *= f;
        store(p + i, wide, n);
      }
    }
  });
}

}  // namespace
}  // namespace zero::kernels
