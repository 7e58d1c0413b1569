// Conversions between the 16-bit float types and float, for blocks of elements: the loops of one instruction set include this
// (isa_table.inc). The software path (float16.h) and F16C give the same bits.
//
// Everything is static or in an anonymous namespace: each instruction set has its own copy.
#pragma once

#include <cstdint>
#include <type_traits>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include "float16.h"
#include "kernels.h"

namespace zero::kernels {
namespace {

/// 32 bytes of T: the unit of the loops that need conversions. (GCC's and Clang's vector types: every target has them.)
using Floats = float __attribute__((vector_size(32)));
using Doubles = double __attribute__((vector_size(32)));
template <class T>
using Vector = std::conditional_t<std::is_same_v<T, double>, Doubles, Floats>;

/// Elements of a Vector<T>.
template <class T>
constexpr std::int64_t kWidth = 32 / static_cast<std::int64_t>(sizeof(T));

inline Floats load_vector(const float* from) {
  Floats v;
  __builtin_memcpy(&v, from, sizeof v);
  return v;
}
inline Doubles load_vector(const double* from) {
  Doubles v;
  __builtin_memcpy(&v, from, sizeof v);
  return v;
}
inline void store_vector(float* to, Floats v) { __builtin_memcpy(to, &v, sizeof v); }
inline void store_vector(double* to, Doubles v) { __builtin_memcpy(to, &v, sizeof v); }

#if defined(__AVX2__) && defined(__F16C__)
inline Floats load_vector(const Half* from) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))); }
inline void store_vector(Half* to, Floats v) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
inline Floats load_vector(const BFloat16* from) {
  const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
  return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}
inline void store_vector(BFloat16* to, Floats v) {
  const __m256i u = _mm256_castps_si256(v);
  const __m256i high = _mm256_srli_epi32(u, 16);
  const __m256i odd = _mm256_and_si256(high, _mm256_set1_epi32(1));
  const __m256i up = _mm256_add_epi32(u, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  const __m256i rounded = _mm256_srli_epi32(up, 16);
  const __m256i nan = _mm256_or_si256(high, _mm256_set1_epi32(0x40));
  const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
  const __m256i words = _mm256_blendv_epi8(rounded, nan, is_nan);
  // The pack works within 128-bit halves.
  const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(words, words), 0xd8);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_castsi256_si128(packed));
}
#else
template <class E>
inline Floats load_vector_by_element(const E* from) {
  float wide[8];
  for (int k = 0; k < 8; ++k) wide[k] = widen(from[k]);
  return load_vector(wide);
}
inline Floats load_vector(const Half* from) { return load_vector_by_element(from); }
inline Floats load_vector(const BFloat16* from) { return load_vector_by_element(from); }
inline void store_vector(Half* to, Floats v) {
  for (int k = 0; k < 8; ++k) to[k] = narrow_to_half(v[k]);
}
inline void store_vector(BFloat16* to, Floats v) {
  for (int k = 0; k < 8; ++k) to[k] = narrow_to_bfloat16(v[k]);
}
#endif

/// to[i] = from[i], rounded to nearest where it has to be. The blocks don't overlap.
template <class E>
inline void load(float* __restrict to, const E* __restrict from, std::int64_t n) {
  std::int64_t i = 0;
  for (; i + 8 <= n; i += 8) store_vector(to + i, load_vector(from + i));
  for (; i < n; ++i) to[i] = widen(from[i]);
}
inline void load(float* __restrict to, const double* __restrict from, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) to[i] = static_cast<float>(from[i]);
}
template <class E>
inline void load(double* __restrict to, const E* __restrict from, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) to[i] = static_cast<double>(widen(from[i]));
}
template <class E>
inline void store(E* __restrict to, const float* __restrict from, std::int64_t n) {
  std::int64_t i = 0;
  for (; i + 8 <= n; i += 8) store_vector(to + i, load_vector(from + i));
  for (; i < n; ++i) narrow(to + i, from[i]);
}

/// Calls f with a null pointer of the element type that `dtype` names.
template <class F>
inline void with_type(DType dtype, F&& f) {
  switch (dtype) {
    case DType::f32:
      f(static_cast<float*>(nullptr));
      break;
    case DType::f64:
      f(static_cast<double*>(nullptr));
      break;
    case DType::f16:
      f(static_cast<Half*>(nullptr));
      break;
    case DType::bf16:
      f(static_cast<BFloat16*>(nullptr));
      break;
  }
}

}  // namespace
}  // namespace zero::kernels
