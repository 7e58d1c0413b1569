// What the tests of the kernels work with: numbers of every type by arithmetic of their own, flat memory with guarded surroundings, the
// instruction sets of this processor, and sizes at which something begins or ends. No LibTorch.
#pragma once

#include <algorithm>
#include <array>
#include <catch2/catch.hpp>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "kernels/kernels.h"
#include "kernels/table.h"

namespace kernel_numbers {

using namespace zero::kernels;
using Real = long double;

inline const std::array<DType, 4> kTypes = {DType::f32, DType::f64, DType::f16, DType::bf16};
inline const double kInf = std::numeric_limits<double>::infinity();
inline const double kNan = std::numeric_limits<double>::quiet_NaN();

// ---- 16-bit floats by arithmetic, not by bits: an implementation that shares nothing with the kernels' ------------------------

struct Format {
  int mantissa, bias;
};
constexpr Format kHalf{10, 15};
constexpr Format kBFloat{7, 127};

inline double decode(std::uint16_t h, Format f) {
  const int exponent_bits = 15 - f.mantissa;
  const int e = (h >> f.mantissa) & ((1 << exponent_bits) - 1);
  const int m = h & ((1 << f.mantissa) - 1);
  const double sign = h & 0x8000 ? -1 : 1;
  if (e == (1 << exponent_bits) - 1) return m != 0 ? kNan : sign * kInf;
  if (e == 0) return sign * std::ldexp(m, 1 - f.bias - f.mantissa);
  return sign * std::ldexp(m + (1 << f.mantissa), e - f.bias - f.mantissa);
}

/// x rounded to nearest even in the format, as a double.
inline double round_to(double x, Format f) {
  if (x == 0 || !std::isfinite(x)) return x;
  const int e = std::max(std::ilogb(x), 1 - f.bias);
  const double r = std::ldexp(std::nearbyint(std::ldexp(x, f.mantissa - e)), e - f.mantissa);
  return std::fabs(r) >= std::ldexp(1, f.bias + 1) ? std::copysign(kInf, x) : r;
}

inline double round_to(double x, DType t) {
  switch (t) {
    case DType::f32:
      return static_cast<double>(static_cast<float>(x));
    case DType::f64:
      return x;
    case DType::f16:
      return round_to(x, kHalf);
    case DType::bf16:
      return round_to(x, kBFloat);
  }
  return kNan;
}

/// The distance between neighbours around x.
inline double spacing(double x, DType t) {
  const int mantissa = t == DType::f32 ? 23 : t == DType::f64 ? 52 : t == DType::f16 ? 10 : 7;
  const int lowest = t == DType::f64 ? -1022 : t == DType::f16 ? -14 : -126;
  return std::ldexp(1, std::max(x == 0 ? lowest : std::ilogb(x), lowest) - mantissa);
}

/// The pattern of a value that the format has exactly.
inline std::uint16_t encode(double x, Format f) {
  const std::uint16_t sign = std::signbit(x) ? 0x8000 : 0;
  const int all_ones = 0x7fff & ~((1 << f.mantissa) - 1);
  if (std::isnan(x)) return static_cast<std::uint16_t>(sign | all_ones | 1 << (f.mantissa - 1));
  const double a = std::fabs(round_to(x, f));
  if (std::isinf(a)) return static_cast<std::uint16_t>(sign | all_ones);
  if (a == 0) return sign;
  const int e = std::max(std::ilogb(a), 1 - f.bias);
  const int m = static_cast<int>(std::ldexp(a, f.mantissa - e));
  return static_cast<std::uint16_t>(sign | (m < (1 << f.mantissa) ? m : ((e + f.bias - 1) << f.mantissa) + m));
}

/// Flat memory of a type, with room to shift its first element by any number of elements.
class Buffer {
 public:
  Buffer(DType t, std::size_t count, std::size_t shift = 0) : type(t), n(count), offset(shift), lines((n + offset) / 8 + 2) {
    std::memset(lines.data(), 0xA5, lines.size() * sizeof(Line));
  }
  Buffer(DType t, const std::vector<double>& from, std::size_t shift = 0) : Buffer(t, from.size(), shift) {
    for (std::size_t i = 0; i < n; ++i) set(i, from[i]);
  }
  void* data() { return reinterpret_cast<char*>(lines.data()) + offset * static_cast<std::size_t>(size_of(type)); }
  Span span() { return {data(), type}; }
  void set(std::size_t i, double x) {
    switch (type) {
      case DType::f32:
        static_cast<float*>(data())[i] = static_cast<float>(x);
        break;
      case DType::f64:
        static_cast<double*>(data())[i] = x;
        break;
      case DType::f16:
        static_cast<std::uint16_t*>(data())[i] = encode(x, kHalf);
        break;
      case DType::bf16:
        static_cast<std::uint16_t*>(data())[i] = encode(x, kBFloat);
        break;
    }
  }
  double get(std::size_t i) {
    switch (type) {
      case DType::f32:
        return static_cast<double>(static_cast<float*>(data())[i]);
      case DType::f64:
        return static_cast<double*>(data())[i];
      case DType::f16:
        return decode(static_cast<std::uint16_t*>(data())[i], kHalf);
      case DType::bf16:
        return decode(static_cast<std::uint16_t*>(data())[i], kBFloat);
    }
    return kNan;
  }
  std::vector<double> values() {
    std::vector<double> v(n);
    for (std::size_t i = 0; i < n; ++i) v[i] = get(i);
    return v;
  }
  /// The elements' bytes; equal strings are equal bits.
  std::string bits() { return std::string(static_cast<char*>(data()), n * static_cast<std::size_t>(size_of(type))); }
  /// True while the bytes around the elements are as the constructor left them.
  bool surroundings_untouched() {
    const auto* first = static_cast<unsigned char*>(data());
    const auto* last = first + n * static_cast<std::size_t>(size_of(type));
    const auto* begin = reinterpret_cast<const unsigned char*>(lines.data());
    for (const unsigned char* p = begin; p < begin + lines.size() * sizeof(Line); ++p) {
      if ((p < first || p >= last) && *p != 0xA5) return false;
    }
    return true;
  }

  DType type;
  std::size_t n, offset;

 private:
  struct alignas(64) Line {
    unsigned char bytes[64];
  };
  std::vector<Line> lines;
};

inline std::vector<double> random_values(std::size_t n, unsigned seed, double low = -2, double high = 2) {
  std::mt19937 engine(seed);
  std::uniform_real_distribution<double> uniform(low, high);
  std::vector<double> v(n);
  for (double& x : v) x = uniform(engine);
  return v;
}

inline std::vector<std::string> available_sets() {
  const std::string before = instruction_set();
  std::vector<std::string> sets;
  for (const char* name : {"baseline", "avx2", "avx512"}) {
    if (select_instruction_set(name)) sets.push_back(name);
  }
  select_instruction_set(before.c_str());
  return sets;
}

/// Runs f once per instruction set, with that set selected.
template <class F>
void for_each_set(F&& f) {
  const std::string before = instruction_set();
  for (const std::string& name : available_sets()) {
    REQUIRE(select_instruction_set(name.c_str()));
    REQUIRE(instruction_set() == name);
    INFO("instruction set " << name);
    f();
  }
  select_instruction_set(before.c_str());
}

/// Sizes at which blocks, stages, vectors and lines begin and end.
inline std::vector<std::size_t> edge_sizes() {
  std::vector<std::size_t> sizes;
  for (std::size_t n = 0; n <= 100; ++n) sizes.push_back(n);
  for (const std::size_t edge : {std::size_t{1024}, std::size_t{4096}, std::size_t{8192}, std::size_t{12288}}) {
    for (std::size_t d = 0; d < 5; ++d) sizes.push_back(edge - 2 + d);
  }
  return sizes;
}

/// |x - expected| in units of the type's spacing, so that 0.5 is a correctly rounded result.
inline double error_in_ulp(double x, Real expected, DType t) {
  return static_cast<double>(std::fabs(Real(x) - expected)) / spacing(static_cast<double>(expected), t);
}

}  // namespace kernel_numbers
