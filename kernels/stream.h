// Copies that write past the caches (non-temporal stores), for one instruction set (isa_table.inc includes this). A plain store
// first reads the line that it overwrites; for a large output that is a third of the traffic of a copy.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace zero::kernels {
namespace {

constexpr std::int64_t kLine = 64;

/// Bytes from `p` to the next cache line.
inline std::int64_t bytes_to_line(const void* p) {
  return static_cast<std::int64_t>(-reinterpret_cast<std::uintptr_t>(p) & (kLine - 1));
}

/// Writes whole lines to a line-aligned address. Followed by stream_fence() before anybody else may read them.
inline void stream_lines(void* to, const void* from, std::int64_t bytes) {
#if defined(__AVX__)
  for (std::int64_t i = 0; i < bytes; i += kLine) {
    const auto* s = reinterpret_cast<const __m256i*>(static_cast<const char*>(from) + i);
    auto* d = reinterpret_cast<__m256i*>(static_cast<char*>(to) + i);
    const __m256i a = _mm256_loadu_si256(s);
    const __m256i b = _mm256_loadu_si256(s + 1);
    _mm256_stream_si256(d, a);
    _mm256_stream_si256(d + 1, b);
  }
#elif defined(__SSE2__)
  for (std::int64_t i = 0; i < bytes; i += kLine) {
    const auto* s = reinterpret_cast<const __m128i*>(static_cast<const char*>(from) + i);
    auto* d = reinterpret_cast<__m128i*>(static_cast<char*>(to) + i);
    for (int k = 0; k < 4; ++k) _mm_stream_si128(d + k, _mm_loadu_si128(s + k));
  }
#else
  std::memcpy(to, from, static_cast<std::size_t>(bytes));
#endif
}

/// Writes one vector's worth of elements (16 bytes of a 16-bit type, otherwise 32) to an address that is a multiple of its size.
template <class E>
inline void stream_vector(E* to, const E* from) {
#if defined(__AVX__)
  if constexpr (sizeof(E) > 2) {
    _mm256_stream_si256(reinterpret_cast<__m256i*>(to), _mm256_load_si256(reinterpret_cast<const __m256i*>(from)));
    return;
  }
#endif
#if defined(__SSE2__)
  constexpr int count = sizeof(E) > 2 ? 2 : 1;
  for (int k = 0; k < count; ++k) {
    _mm_stream_si128(reinterpret_cast<__m128i*>(to) + k, _mm_load_si128(reinterpret_cast<const __m128i*>(from) + k));
  }
#else
  std::memcpy(to, from, sizeof(E) > 2 ? 32 : 16);
#endif
}

/// Orders the non-temporal stores before every later store: a flag set after it tells the truth.
inline void stream_fence() {
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

void stream_copy(void* to, const void* from, std::int64_t bytes) {
  const std::int64_t gap = bytes_to_line(to);
  const std::int64_t head = gap < bytes ? gap : bytes;
  const std::int64_t body = (bytes - head) & -kLine;
  char* d = static_cast<char*>(to);
  const char* s = static_cast<const char*>(from);
  std::memcpy(d, s, static_cast<std::size_t>(head));
  stream_lines(d + head, s + head, body);
  std::memcpy(d + head + body, s + head + body, static_cast<std::size_t>(bytes - head - body));
  stream_fence();
}

}  // namespace
}  // namespace zero::kernels
