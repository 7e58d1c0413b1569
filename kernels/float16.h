// The 16-bit float types, one element at a time, for CPU loops and CUDA kernels: nearest even, NaN kept (and made quiet, with the
// payload bits that fit), subnormals right even when the processor flushes them in arithmetic. The same bits everywhere.
#pragma once

#include <cstdint>
#include <cstring>

#include "host_device.h"

namespace zero::kernels {

/// Storage types with a type of their own, so that loops can be templates over them.
struct Half {
  std::uint16_t bits;
};
struct BFloat16 {
  std::uint16_t bits;
};

ZERO_HOST_DEVICE std::uint32_t bits_of(float x) {
#if defined(__CUDA_ARCH__)
  return __float_as_uint(x);
#else
  std::uint32_t u;
  __builtin_memcpy(&u, &x, sizeof u);
  return u;
#endif
}

ZERO_HOST_DEVICE float float_of(std::uint32_t u) {
#if defined(__CUDA_ARCH__)
  return __uint_as_float(u);
#else
  float x;
  __builtin_memcpy(&x, &u, sizeof x);
  return x;
#endif
}

// A device has an instruction for each conversion; but for the payload of a NaN they give the same bits.
ZERO_HOST_DEVICE float widen(Half h) {
#if defined(__CUDA_ARCH__)
  float x;
  asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(h.bits));
  return x;
#else
  const std::uint32_t sign = static_cast<std::uint32_t>(h.bits & 0x8000u) << 16;
  const std::uint32_t magnitude = static_cast<std::uint32_t>(h.bits & 0x7fffu) << 13;
  // A subnormal is mantissa * 2^-24, and one unit in the last place of 0.5f is 2^-24.
  const std::uint32_t subnormal = bits_of(float_of(0x3f000000u | (magnitude >> 13)) - 0.5f);
  const std::uint32_t normal = magnitude + (112u << 23);
  const std::uint32_t quiet = magnitude > 0x0f800000u ? 0x00400000u : 0u;
  const std::uint32_t special = (magnitude + (224u << 23)) | quiet;
  std::uint32_t u = magnitude < 0x00800000u ? subnormal : normal;
  u = magnitude >= 0x0f800000u ? special : u;
  return float_of(sign | u);
#endif
}

ZERO_HOST_DEVICE Half narrow_to_half(float x) {
#if defined(__CUDA_ARCH__)
  Half half;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(half.bits) : "f"(x));
  return half;
#else
  const std::uint32_t u = bits_of(x);
  const std::uint32_t magnitude = u & 0x7fffffffu;
  // Adding 0.5f rounds to a multiple of 2^-24, which is a half's subnormal spacing.
  const std::uint32_t subnormal = bits_of(float_of(magnitude) + 0.5f) - 0x3f000000u;
  // A carry out of the mantissa moves the exponent up, and 65520 and above to infinity, as it should.
  const std::uint32_t normal = (magnitude - (112u << 23) + 0x0fffu + ((magnitude >> 13) & 1u)) >> 13;
  const std::uint32_t special = magnitude > 0x7f800000u ? 0x7e00u | ((magnitude >> 13) & 0x03ffu) : 0x7c00u;
  std::uint32_t h = magnitude < 0x38800000u ? subnormal : normal;
  h = magnitude >= 0x47800000u ? special : h;
  return {static_cast<std::uint16_t>(h | ((u >> 16) & 0x8000u))};
#endif
}

ZERO_HOST_DEVICE float widen(BFloat16 b) { return float_of(static_cast<std::uint32_t>(b.bits) << 16); }

ZERO_HOST_DEVICE BFloat16 narrow_to_bfloat16(float x) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  BFloat16 narrow;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(narrow.bits) : "f"(x));
  return narrow;
#else
  const std::uint32_t u = bits_of(x);
  const std::uint32_t rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
  const std::uint32_t nan = (u >> 16) | 0x40u;
  return {static_cast<std::uint16_t>((u & 0x7fffffffu) > 0x7f800000u ? nan : rounded)};
#endif
}

ZERO_HOST_DEVICE float widen(float x) { return x; }
ZERO_HOST_DEVICE double widen(double x) { return x; }
ZERO_HOST_DEVICE void narrow(Half* to, float x) { *to = narrow_to_half(x); }
ZERO_HOST_DEVICE void narrow(BFloat16* to, float x) { *to = narrow_to_bfloat16(x); }
ZERO_HOST_DEVICE void narrow(float* to, float x) { *to = x; }
ZERO_HOST_DEVICE void narrow(double* to, double x) { *to = x; }

/// Which value a step starts from, where a 16-bit parameter has a master: the master, unless somebody has written another value into
/// the parameter (an edit through any alias, or the very first step, when masters are zero): then that.
template <class E>
ZERO_HOST_DEVICE float start_of(E parameter, float master) {
  E rounded;
  narrow(&rounded, master);
  return rounded.bits == parameter.bits ? master : widen(parameter);
}

}  // namespace zero::kernels
