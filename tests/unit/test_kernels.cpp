// The kernels against formulas of their own (in double or long double, written from torch::optim's documentation), and the same
// bits at every instruction set, thread count, size and offset. No LibTorch.
#include <algorithm>
#include <array>
#include <catch2/catch.hpp>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "kernels/kernels.h"
#include "kernels/table.h"

using namespace zero::kernels;

namespace {

const std::array<DType, 4> kTypes = {DType::f32, DType::f64, DType::f16, DType::bf16};
const double kInf = std::numeric_limits<double>::infinity();
const double kNan = std::numeric_limits<double>::quiet_NaN();

// ---- 16-bit floats by arithmetic, not by bits: an implementation that shares nothing with the kernels' ------------------------

struct Format {
  int mantissa, bias;
};
constexpr Format kHalf{10, 15};
constexpr Format kBFloat{7, 127};

double decode(std::uint16_t h, Format f) {
  const int exponent_bits = 15 - f.mantissa;
  const int e = (h >> f.mantissa) & ((1 << exponent_bits) - 1);
  const int m = h & ((1 << f.mantissa) - 1);
  const double sign = h & 0x8000 ? -1 : 1;
  if (e == (1 << exponent_bits) - 1) return m != 0 ? kNan : sign * kInf;
  if (e == 0) return sign * std::ldexp(m, 1 - f.bias - f.mantissa);
  return sign * std::ldexp(m + (1 << f.mantissa), e - f.bias - f.mantissa);
}

/// x rounded to nearest even in the format, as a double.
double round_to(double x, Format f) {
  if (x == 0 || !std::isfinite(x)) return x;
  const int e = std::max(std::ilogb(x), 1 - f.bias);
  const double r = std::ldexp(std::nearbyint(std::ldexp(x, f.mantissa - e)), e - f.mantissa);
  return std::fabs(r) >= std::ldexp(1, f.bias + 1) ? std::copysign(kInf, x) : r;
}

double round_to(double x, DType t) {
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
double spacing(double x, DType t) {
  const int mantissa = t == DType::f32 ? 23 : t == DType::f64 ? 52 : t == DType::f16 ? 10 : 7;
  const int lowest = t == DType::f64 ? -1022 : t == DType::f16 ? -14 : -126;
  return std::ldexp(1, std::max(x == 0 ? lowest : std::ilogb(x), lowest) - mantissa);
}

/// The pattern of a value that the format has exactly.
std::uint16_t encode(double x, Format f) {
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

std::vector<double> random_values(std::size_t n, unsigned seed, double low = -2, double high = 2) {
  std::mt19937 engine(seed);
  std::uniform_real_distribution<double> uniform(low, high);
  std::vector<double> v(n);
  for (double& x : v) x = uniform(engine);
  return v;
}

std::vector<std::string> available_sets() {
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
std::vector<std::size_t> edge_sizes() {
  std::vector<std::size_t> sizes;
  for (std::size_t n = 0; n <= 100; ++n) sizes.push_back(n);
  for (const std::size_t edge : {std::size_t{1024}, std::size_t{4096}, std::size_t{8192}, std::size_t{12288}}) {
    for (std::size_t d = 0; d < 5; ++d) sizes.push_back(edge - 2 + d);
  }
  return sizes;
}

// ---- the rules in long double, one element -------------------------------------------------------------------------------------

using Real = long double;

struct AdamState {
  Real p, m, v, max_v;
};

void reference_adam(AdamState& x, Real g, const AdamArgs& a, bool amsgrad) {
  g *= a.grad_scale;
  if (!a.decoupled) g += a.weight_decay * x.p;
  if (a.decoupled) x.p -= Real(a.lr) * a.weight_decay * x.p;
  x.m = a.beta1 * x.m + (1 - Real(a.beta1)) * g;
  x.v = a.beta2 * x.v + (1 - Real(a.beta2)) * g * g;
  x.max_v = std::max(x.max_v, x.v);
  const Real m_hat = x.m / (1 - std::pow(Real(a.beta1), Real(a.step)));
  const Real v_hat = (amsgrad ? x.max_v : x.v) / (1 - std::pow(Real(a.beta2), Real(a.step)));
  x.p -= a.lr * m_hat / (std::sqrt(v_hat) + a.eps);
}

void reference_sgd(Real& p, Real& buffer, Real g, const SgdArgs& a) {
  g *= a.grad_scale;
  g += a.weight_decay * p;
  if (a.momentum != 0) {
    buffer = a.first ? g : a.momentum * buffer + (1 - Real(a.dampening)) * g;
    g = a.nesterov ? g + a.momentum * buffer : buffer;
  }
  p -= a.lr * g;
}

/// |x - expected| in units of the type's spacing, so that 0.5 is a correctly rounded result.
double error_in_ulp(double x, Real expected, DType t) {
  return static_cast<double>(std::fabs(Real(x) - expected)) / spacing(static_cast<double>(expected), t);
}

}  // namespace

TEST_CASE("the processor's best instruction set is the default", "[kernels]") {
  if (std::getenv("ZERO_ISA") == nullptr) CHECK(available_sets().back() == instruction_set());
  CHECK_FALSE(select_instruction_set("sse9"));
}

TEST_CASE("the test's own 16-bit formats are right", "[kernels]") {
  CHECK(decode(0x3c00, kHalf) == 1.0);
  CHECK(decode(0x7bff, kHalf) == 65504.0);
  CHECK(decode(0x0001, kHalf) == std::ldexp(1, -24));
  CHECK(decode(0x3f80, kBFloat) == 1.0);
  CHECK(round_to(65520.0, kHalf) == kInf);
  CHECK(round_to(65519.0, kHalf) == 65504.0);
  for (int h = 0; h < 0x7c00; ++h) CHECK(encode(decode(static_cast<std::uint16_t>(h), kHalf), kHalf) == h);
}

TEST_CASE("every f16 and bf16 widens exactly, and narrows back to itself", "[kernels]") {
  for_each_set([] {
    for (const DType t : {DType::f16, DType::bf16}) {
      const Format f = t == DType::f16 ? kHalf : kBFloat;
      std::vector<std::uint16_t> in(65536), out(65536);
      std::vector<float> wide(65536);
      for (std::size_t i = 0; i < in.size(); ++i) in[i] = static_cast<std::uint16_t>(i);
      const void* inputs[] = {in.data()};
      sum_ranks_wide(wide.data(), inputs, 1, 65536, t);
      sum_ranks(out.data(), inputs, 1, 65536, t, 1);
      int wrong = 0;
      for (std::size_t i = 0; i < in.size(); ++i) {
        const double x = decode(in[i], f);
        const bool nan = std::isnan(x);
        const bool widened = nan ? std::isnan(wide[i]) : static_cast<double>(wide[i]) == x;
        const bool signs = std::signbit(wide[i]) == ((i & 0x8000) != 0);
        const auto quiet = static_cast<std::uint16_t>(nan ? in[i] | 1 << (f.mantissa - 1) : in[i]);
        wrong += !widened || !signs || out[i] != quiet;
      }
      CHECK(wrong == 0);
    }
  });
}

TEST_CASE("narrowing rounds to nearest even, to subnormals and to infinity", "[kernels]") {
  for_each_set([] {
    for (const DType t : {DType::f16, DType::bf16}) {
      const Format f = t == DType::f16 ? kHalf : kBFloat;
      // Halves make ties among subnormals, 1 + 2^-k ties among normals, the large factor overflows.
      for (const double factor : {0.5, 0.25, 1 + std::ldexp(1, -f.mantissa - 1), 1.5, 0.3, std::ldexp(1.25, -9), 3.7e4}) {
        std::vector<std::uint16_t> x(65536);
        for (std::size_t i = 0; i < x.size(); ++i) x[i] = static_cast<std::uint16_t>(i);
        scale({x.data(), t}, 65536, factor, 1);
        int wrong = 0;
        for (std::size_t i = 0; i < x.size(); ++i) {
          const double before = decode(static_cast<std::uint16_t>(i), f);
          const float product = static_cast<float>(before) * static_cast<float>(factor);
          const double after = decode(x[i], f);
          if (std::isnan(before)) {
            wrong += !std::isnan(after);
          } else {
            wrong += after != round_to(static_cast<double>(product), f) || std::signbit(after) != std::signbit(before);
          }
        }
        INFO("factor " << factor);
        CHECK(wrong == 0);
      }
    }
  });
}

TEST_CASE("a NaN stays a NaN when it is narrowed, whatever its payload", "[kernels]") {
  for_each_set([] {
    for (const DType t : {DType::f16, DType::bf16}) {
      // Payload in the low bits only, and all ones: truncation would make the first infinite, rounding the second zero.
      for (const std::uint32_t pattern : {0x7f800001u, 0x7fffffffu, 0xffffffffu}) {
        const std::size_t n = 11;  // a vector and a tail
        std::vector<std::uint32_t> grad(n, pattern);
        Buffer p(t, std::vector<double>(n, 1.0));
        SgdArgs a;
        a.lr = 1;
        sgd(p.span(), {grad.data(), DType::f32}, {}, static_cast<std::int64_t>(n), a, 1);
        for (std::size_t i = 0; i < n; ++i) CHECK(std::isnan(p.get(i)));
      }
    }
  });
}

TEST_CASE("adam in double follows the formulas to 1e-12 over many steps", "[kernels]") {
  const std::size_t n = 37;
  for_each_set([&] {
    for (const bool decoupled : {false, true}) {
      for (const bool amsgrad : {false, true}) {
        for (const double weight_decay : {0.0, 0.1}) {
          Buffer p(DType::f64, random_values(n, 1)), m(DType::f64, std::vector<double>(n)),
              v(DType::f64, std::vector<double>(n)), w(DType::f64, std::vector<double>(n));
          std::vector<AdamState> expected(n);
          for (std::size_t i = 0; i < n; ++i) expected[i] = {p.get(i), 0, 0, 0};
          AdamArgs a;
          a.lr = 0.01;
          a.weight_decay = weight_decay;
          a.decoupled = decoupled;
          a.grad_scale = 0.7;
          for (int step = 1; step <= 100; ++step) {
            a.step = step;
            // Gradients that shrink make amsgrad's maximum differ from v.
            Buffer g(DType::f64, random_values(n, 100 + static_cast<unsigned>(step), -2.0 / step, 2.0 / step));
            adam(p.span(), g.span(), m.span(), v.span(), amsgrad ? w.span() : Span{}, n, a, 1);
            for (std::size_t i = 0; i < n; ++i) reference_adam(expected[i], g.get(i), a, amsgrad);
          }
          for (std::size_t i = 0; i < n; ++i) {
            CHECK(p.get(i) == Approx(static_cast<double>(expected[i].p)).epsilon(1e-12).margin(1e-13));
            CHECK(v.get(i) == Approx(static_cast<double>(expected[i].v)).epsilon(1e-12));
            if (amsgrad) CHECK(w.get(i) == Approx(static_cast<double>(expected[i].max_v)).epsilon(1e-12));
          }
        }
      }
    }
  });
}

TEST_CASE("adam takes every combination of parameter and gradient type", "[kernels]") {
  const std::size_t n = 1500;  // more than a stage
  for_each_set([&] {
    for (const DType pt : kTypes) {
      for (const DType gt : kTypes) {
        const DType st = pt == DType::f64 ? DType::f64 : DType::f32;
        Buffer p(pt, random_values(n, 1)), g(gt, random_values(n, 2)), m(st, random_values(n, 3)),
            v(st, random_values(n, 4, 0.5, 2));
        AdamArgs a;
        a.lr = 0.1;
        a.decoupled = true;
        a.weight_decay = 0.01;
        a.step = 7;
        a.grad_scale = 0.5;
        std::vector<AdamState> expected(n);
        for (std::size_t i = 0; i < n; ++i) {
          expected[i] = {p.get(i), m.get(i), v.get(i), 0};
          reference_adam(expected[i], round_to(g.get(i), st), a, false);
        }
        const std::string g_before = g.bits();
        adam(p.span(), g.span(), m.span(), v.span(), {}, n, a, 2);
        CHECK(g.bits() == g_before);
        CHECK(p.surroundings_untouched());
        double worst_p = 0, worst_m = 0, worst_v = 0;
        for (std::size_t i = 0; i < n; ++i) {
          // Near zero the subtraction's error is that of its terms, hence the floor of 0.25.
          const auto relative = [](double x, Real r) {
            return static_cast<double>(std::fabs(Real(x) - r)) / std::max(0.25, std::fabs(double(r)));
          };
          worst_m = std::max(worst_m, relative(m.get(i), expected[i].m));
          worst_v = std::max(worst_v, relative(v.get(i), expected[i].v));
          if (pt == st) {
            worst_p = std::max(worst_p, relative(p.get(i), expected[i].p));
          } else {
            worst_p = std::max(worst_p, error_in_ulp(p.get(i), expected[i].p, pt) - 0.5);
          }
        }
        INFO("param type " << int(pt) << " grad type " << int(gt));
        const double tolerance = st == DType::f64 ? 1e-14 : 1e-6;
        CHECK(worst_m < tolerance);
        CHECK(worst_v < tolerance);
        // A narrow parameter is rounded once: half an ulp, plus what float arithmetic adds near a cancellation.
        CHECK(worst_p < (pt == st ? tolerance : 0.02));
      }
    }
  });
}

TEST_CASE("adam without weight decay leaves an infinite parameter alone; NaN gradients spread as in torch::optim",
          "[kernels]") {
  for_each_set([] {
    for (const bool decoupled : {false, true}) {
      Buffer p(DType::f32, {kInf, 1, 2}), g(DType::f32, {1, kNan, 1}), m(DType::f32, {0, 0, 0}), v(DType::f32, {0, 0, 0}),
          w(DType::f32, {0, 0, kNan});
      AdamArgs a;
      a.decoupled = decoupled;
      adam(p.span(), g.span(), m.span(), v.span(), w.span(), 3, a, 1);
      CHECK(p.get(0) == kInf);
      CHECK(std::isnan(p.get(1)));
      CHECK(std::isnan(w.get(1)));
      CHECK(std::isnan(w.get(2)));  // torch::max keeps a NaN maximum
      CHECK(std::isnan(p.get(2)));
    }
  });
}

TEST_CASE("sgd follows the formulas in every variant and type", "[kernels]") {
  const std::size_t n = 1100;
  for_each_set([&] {
    for (const DType pt : kTypes) {
      for (const DType gt : kTypes) {
        for (int variant = 0; variant < 8; ++variant) {
          SgdArgs a;
          a.lr = 0.05;
          a.grad_scale = 0.5;
          a.weight_decay = variant % 2 == 1 ? 0.01 : 0;
          a.momentum = variant >= 2 ? 0.9 : 0;
          a.nesterov = variant == 4 || variant == 5;
          a.dampening = variant >= 6 ? 0.3 : 0;
          const DType st = pt == DType::f64 ? DType::f64 : DType::f32;
          Buffer p(pt, random_values(n, 1)), buffer(st, std::vector<double>(n, kNan));  // NaN: a first step must not read it
          std::vector<Real> expected(n), expected_buffer(n);
          double worst = 0;
          for (int step = 0; step < 3; ++step) {
            a.first = step == 0;
            Buffer g(gt, random_values(n, 10 + static_cast<unsigned>(step)));
            // Each step starts from the rounded state, so that errors of rounding don't pile up.
            for (std::size_t i = 0; i < n; ++i) {
              expected[i] = p.get(i);
              expected_buffer[i] = a.first ? 0 : buffer.get(i);
              reference_sgd(expected[i], expected_buffer[i], round_to(g.get(i), st), a);
            }
            sgd(p.span(), g.span(), a.momentum != 0 ? buffer.span() : Span{}, n, a, 1 + step);
            for (std::size_t i = 0; i < n; ++i) {
              const double unit = std::max(spacing(static_cast<double>(expected[i]), pt), spacing(1.0, st));
              worst = std::max(worst, static_cast<double>(std::fabs(Real(p.get(i)) - expected[i])) / unit);
              if (a.momentum != 0) {
                worst = std::max(worst,
                                 static_cast<double>(std::fabs(Real(buffer.get(i)) - expected_buffer[i])) / spacing(4.0, st));
              }
            }
          }
          INFO("variant " << variant << " param type " << int(pt) << " grad type " << int(gt));
          CHECK(worst < (pt == st ? 2.0 : 0.52));
        }
      }
    }
  });
}

TEST_CASE("updates have the same bits at every set, thread count, size and offset", "[kernels]") {
  for (const DType pt : kTypes) {
    for (const DType gt : {pt, DType::f16}) {
      const DType st = pt == DType::f64 ? DType::f64 : DType::f32;
      const std::size_t most = 12288 + 8;
      const auto p0 = random_values(most, 1), g0 = random_values(most, 2), m0 = random_values(most, 3),
                 v0 = random_values(most, 4, 0, 2);
      AdamArgs a;
      a.decoupled = pt != DType::f64;
      a.weight_decay = 0.1;
      a.step = 3;
      a.grad_scale = 0.3;
      SgdArgs s;
      s.lr = 0.1;
      s.momentum = 0.9;
      s.nesterov = true;
      s.weight_decay = 0.01;
      // The whole range on one thread of the baseline is what every other way of doing it must repeat, element by element.
      std::vector<std::string> whole;
      const auto run = [&](std::size_t n, std::size_t offset, int threads, bool amsgrad) {
        const auto first = [n](const std::vector<double>& x) {
          return std::vector<double>(x.begin(), x.begin() + static_cast<std::ptrdiff_t>(n));
        };
        Buffer p(pt, first(p0), offset), g(gt, first(g0), (offset * 7) % 18), m(st, first(m0), (offset * 5) % 18),
            v(st, first(v0), (offset * 3) % 18), w(st, std::vector<double>(n, 0.7), offset);
        adam(p.span(), g.span(), m.span(), v.span(), amsgrad ? w.span() : Span{}, static_cast<std::int64_t>(n), a, threads);
        std::vector<std::string> bits = {p.bits(), m.bits(), v.bits()};
        bool untouched = p.surroundings_untouched() && g.surroundings_untouched() && m.surroundings_untouched() &&
                         v.surroundings_untouched();
        sgd(p.span(), g.span(), m.span(), static_cast<std::int64_t>(n), s, threads);
        bits.push_back(p.bits());
        bits.push_back(m.bits());
        CHECK((untouched && p.surroundings_untouched() && m.surroundings_untouched()));
        return bits;
      };
      for (const bool amsgrad : {false, true}) {
        const std::string before = instruction_set();
        REQUIRE(select_instruction_set("baseline"));
        whole = run(most, 0, 1, amsgrad);
        select_instruction_set(before.c_str());
        for_each_set([&] {
          int differing = 0;
          const auto compare = [&](std::size_t n, std::size_t offset, int threads) {
            const auto bits = run(n, offset, threads, amsgrad);
            for (std::size_t k = 0; k < bits.size(); ++k) differing += bits[k] != whole[k].substr(0, bits[k].size());
          };
          for (const std::size_t n : edge_sizes()) compare(n, n % 18, 1 + static_cast<int>(n % 3));
          for (std::size_t offset = 0; offset < 18; ++offset) {
            for (int threads = 1; threads <= 3; ++threads) compare(offset % 2 == 0 ? 8197 : 67, offset, threads);
          }
          CHECK(differing == 0);
        });
      }
    }
  }
}

TEST_CASE("squared_norm sums in double and names the first non-finite element", "[kernels]") {
  for_each_set([] {
    for (const DType t : kTypes) {
      for (const std::size_t n :
           {std::size_t{0}, std::size_t{1}, std::size_t{15}, std::size_t{100}, std::size_t{4097}, std::size_t{20000}}) {
        Buffer x(t, random_values(n, 5), 1);
        Real expected = 0;
        for (std::size_t i = 0; i < n; ++i) expected += Real(x.get(i)) * Real(x.get(i));
        const NormResult r = squared_norm(x.span(), static_cast<std::int64_t>(n), 2);
        CHECK(r.sum_of_squares == Approx(static_cast<double>(expected)).epsilon(1e-14));
        CHECK(r.first_nonfinite == -1);
        if (n < 3) continue;
        x.set(n - 1, kInf);
        CHECK(squared_norm(x.span(), static_cast<std::int64_t>(n), 1).first_nonfinite == static_cast<std::int64_t>(n) - 1);
        CHECK(squared_norm(x.span(), static_cast<std::int64_t>(n), 1).sum_of_squares == kInf);
        x.set(n / 2, kNan);
        CHECK(squared_norm(x.span(), static_cast<std::int64_t>(n), 3).first_nonfinite == static_cast<std::int64_t>(n / 2));
        CHECK(std::isnan(squared_norm(x.span(), static_cast<std::int64_t>(n), 3).sum_of_squares));
      }
    }
    // Largest and smallest values: float's squares overflow and underflow in float, not in double.
    Buffer large(DType::f32, std::vector<double>(10, 1e30));
    CHECK(squared_norm(large.span(), 10, 1).sum_of_squares == Approx(1e61).epsilon(1e-6));
    Buffer small(DType::f32, std::vector<double>(10, 1e-30));
    CHECK(squared_norm(small.span(), 10, 1).sum_of_squares == Approx(1e-59).epsilon(1e-6));
    // A double's square can overflow with every element finite.
    Buffer huge(DType::f64, std::vector<double>(10, 1e200));
    CHECK(squared_norm(huge.span(), 10, 1).sum_of_squares == kInf);
    CHECK(squared_norm(huge.span(), 10, 1).first_nonfinite == -1);
  });
}

TEST_CASE("squared_norm has the same bits at every set, thread count and offset", "[kernels]") {
  for (const DType t : kTypes) {
    for (const std::size_t n : {std::size_t{5}, std::size_t{95}, std::size_t{4095}, std::size_t{8193}, std::size_t{30001}}) {
      const auto values = random_values(n, 6);
      Buffer plain(t, values);
      REQUIRE(select_instruction_set("baseline"));
      const double expected = squared_norm(plain.span(), static_cast<std::int64_t>(n), 1).sum_of_squares;
      select_instruction_set(available_sets().back().c_str());
      for_each_set([&] {
        for (std::size_t offset = 0; offset < 18; ++offset) {
          Buffer x(t, values, offset);
          for (int threads = 1; threads <= 3; ++threads) {
            const double sum = squared_norm(x.span(), static_cast<std::int64_t>(n), threads).sum_of_squares;
            if (std::memcmp(&sum, &expected, sizeof sum) != 0) FAIL("offset " << offset << " threads " << threads);
          }
        }
      });
    }
  }
}

namespace {

/// sum_ranks by hand: the order, the arithmetic type and the one rounding that the interface promises.
double reference_sum(std::vector<Buffer>& in, std::size_t i, double divisor) {
  if (in[0].type == DType::f64) {
    double sum = in[0].get(i);
    for (std::size_t k = 1; k < in.size(); ++k) sum += in[k].get(i);
    return sum / divisor;
  }
  float sum = static_cast<float>(in[0].get(i));
  for (std::size_t k = 1; k < in.size(); ++k) sum += static_cast<float>(in[k].get(i));
  return static_cast<double>(sum / static_cast<float>(divisor));
}

}  // namespace

TEST_CASE("sum_ranks adds in rank order and rounds once", "[kernels]") {
  for_each_set([] {
    for (const DType t : kTypes) {
      for (int ranks = 1; ranks <= 9; ++ranks) {
        for (const std::size_t n : {std::size_t{0}, std::size_t{1}, std::size_t{33}, std::size_t{1027}, std::size_t{2500}}) {
          std::vector<Buffer> in;
          std::vector<const void*> pointers;
          for (int r = 0; r < ranks; ++r)
            in.emplace_back(t, random_values(n, static_cast<unsigned>(r) + 20), static_cast<std::size_t>(r) % 3);
          for (Buffer& b : in) pointers.push_back(b.data());
          const double divisor = ranks % 2 == 0 ? 1 : ranks;
          std::vector<double> narrow(n), wide(n);
          for (std::size_t i = 0; i < n; ++i)
            narrow[i] = round_to(reference_sum(in, i, divisor), t), wide[i] = reference_sum(in, i, 1);
          Buffer out(t, n, n % 5), out_wide(t == DType::f64 ? DType::f64 : DType::f32, n, n % 4);
          sum_ranks(out.data(), pointers.data(), ranks, static_cast<std::int64_t>(n), t, divisor);
          sum_ranks_wide(out_wide.data(), pointers.data(), ranks, static_cast<std::int64_t>(n), t);
          INFO("type " << int(t) << " ranks " << ranks << " n " << n);
          CHECK(out.values() == narrow);
          CHECK(out_wide.values() == wide);
          CHECK(out.surroundings_untouched());
          CHECK(out_wide.surroundings_untouched());
          // In place of any input.
          for (int r = 0; r < ranks; ++r) {
            std::vector<Buffer> copy = in;
            std::vector<const void*> p;
            for (Buffer& b : copy) p.push_back(b.data());
            sum_ranks(copy[static_cast<std::size_t>(r)].data(), p.data(), ranks, static_cast<std::int64_t>(n), t, divisor);
            CHECK(copy[static_cast<std::size_t>(r)].values() == narrow);
          }
        }
      }
    }
  });
}

TEST_CASE("sum_ranks has room for sums that the travelling type lacks", "[kernels]") {
  for_each_set([] {
    const auto sum_of = [](double x, int ranks, double divisor) {
      std::vector<Buffer> in(static_cast<std::size_t>(ranks), Buffer(DType::f16, std::vector<double>(40, x)));
      std::vector<const void*> p;
      for (Buffer& b : in) p.push_back(b.data());
      Buffer out(DType::f16, 40);
      sum_ranks(out.data(), p.data(), ranks, 40, DType::f16, divisor);
      for (std::size_t i = 1; i < 40; ++i) CHECK(std::memcmp(out.bits().data(), out.bits().data() + 2 * i, 2) == 0);
      return out.get(0);
    };
    CHECK(sum_of(40000, 4, 4) == 40000);
    CHECK(sum_of(40000, 4, 1) == kInf);
    CHECK(sum_of(std::ldexp(1, -24), 4, 4) == std::ldexp(1, -24));
    CHECK(sum_of(std::ldexp(1, -24), 3, 3) == std::ldexp(1, -24));
    CHECK(sum_of(std::ldexp(1, -24), 1, 2) == 0);  // a tie, to even
    CHECK(sum_of(3 * std::ldexp(1, -24), 1, 2) == std::ldexp(1, -23));
    CHECK(std::isnan(sum_of(kNan, 2, 2)));
    CHECK(sum_of(-kInf, 2, 2) == -kInf);
  });
}

TEST_CASE("large sums that are written past the caches equal small ones", "[kernels]") {
  const std::size_t n = (std::size_t{8} << 20) / 2 + 11;  // above the streaming size in every type
  for_each_set([&] {
    for (const DType t : {DType::f32, DType::bf16}) {
      for (const std::size_t offset : {std::size_t{0}, std::size_t{5}}) {
        Buffer a(t, random_values(n, 1)), b(t, random_values(n, 2), 3), out(t, n, offset), piecewise(t, n, 1);
        const void* in[] = {a.data(), b.data()};
        sum_ranks(out.data(), in, 2, static_cast<std::int64_t>(n), t, 3);
        const auto width = static_cast<std::size_t>(size_of(t));
        for (std::size_t i = 0; i < n; i += 100000) {
          const void* part[] = {static_cast<char*>(a.data()) + i * width, static_cast<char*>(b.data()) + i * width};
          sum_ranks(static_cast<char*>(piecewise.data()) + i * width, part, 2,
                    static_cast<std::int64_t>(std::min<std::size_t>(100000, n - i)), t, 3);
        }
        CHECK(out.bits() == piecewise.bits());
        CHECK(out.surroundings_untouched());
      }
    }
  });
}

TEST_CASE("sums have the same bits at every set and offset", "[kernels]") {
  for (const DType t : kTypes) {
    std::vector<std::vector<double>> values;
    for (unsigned r = 0; r < 5; ++r) values.push_back(random_values(4101, 40 + r));
    std::string expected;
    for_each_set([&] {
      int differing = 0;
      for (std::size_t n : edge_sizes()) {
        n = std::min<std::size_t>(n, 4101);
        const std::size_t offset = n % 18;
        std::vector<Buffer> in;
        std::vector<const void*> p;
        for (std::size_t r = 0; r < 5; ++r) in.emplace_back(t, values[r], (offset + r) % 18);
        for (Buffer& b : in) p.push_back(b.data());
        if (expected.empty()) {
          Buffer whole(t, std::size_t{4101});
          sum_ranks(whole.data(), p.data(), 5, 4101, t, 5);
          expected = whole.bits();
        }
        Buffer out(t, n, offset);
        sum_ranks(out.data(), p.data(), 5, static_cast<std::int64_t>(n), t, 5);
        differing += out.bits() != expected.substr(0, out.bits().size()) || !out.surroundings_untouched();
      }
      CHECK(differing == 0);
    });
  }
}

TEST_CASE("scale multiplies in the wide type, at every size and offset", "[kernels]") {
  for_each_set([] {
    for (const DType t : kTypes) {
      for (const std::size_t n : edge_sizes()) {
        const auto values = random_values(n, 8);
        Buffer x(t, values, n % 18), before(t, values);
        scale(x.span(), static_cast<std::int64_t>(n), 0.3, 1 + static_cast<int>(n % 3));
        std::vector<double> expected(n);
        for (std::size_t i = 0; i < n; ++i) {
          const double b = before.get(i);
          expected[i] = t == DType::f64 ? b * 0.3 : round_to(static_cast<double>(static_cast<float>(b) * 0.3f), t);
        }
        if (x.values() != expected || !x.surroundings_untouched()) FAIL("type " << int(t) << " n " << n);
      }
    }
  });
}

TEST_CASE("bulk_copy copies every byte and no other", "[kernels]") {
  std::mt19937 engine(3);
  const std::size_t large = (std::size_t{9} << 20) + 77;
  std::vector<unsigned char> from(large + 200);
  for (auto& b : from) b = static_cast<unsigned char>(engine());
  for_each_set([&] {
    for (const std::size_t n :
         {std::size_t{0}, std::size_t{1}, std::size_t{1000}, std::size_t{4} << 20, (std::size_t{4} << 20) + 1, large}) {
      for (const std::size_t shift : {std::size_t{0}, std::size_t{1}, std::size_t{37}, std::size_t{64}}) {
        std::vector<unsigned char> to(n + 200, 0x5A);
        bulk_copy(to.data() + shift, from.data() + 3 * shift % 101, static_cast<std::int64_t>(n));
        CHECK(std::memcmp(to.data() + shift, from.data() + 3 * shift % 101, n) == 0);
        bool around = true;
        for (std::size_t i = 0; i < to.size(); ++i) around = around && ((i >= shift && i < shift + n) || to[i] == 0x5A);
        CHECK(around);
      }
    }
    // The copy itself has no lower bound: a table's streaming loop must also be right when less than a line is left.
    for (std::size_t n = 0; n < 200; ++n) {
      std::vector<unsigned char> to(n + 64, 0x5A);
      table().stream_copy(to.data() + n % 17, from.data() + n, static_cast<std::int64_t>(n));
      REQUIRE(std::memcmp(to.data() + n % 17, from.data() + n, n) == 0);
      REQUIRE(to[n + n % 17] == 0x5A);
    }
  });
}

TEST_CASE("wrong types and missing buffers are refused", "[kernels]") {
  Buffer f(DType::f32, std::vector<double>(4)), d(DType::f64, std::vector<double>(4)), h(DType::f16, std::vector<double>(4));
  CHECK_THROWS_AS(adam(f.span(), f.span(), d.span(), d.span(), {}, 4, {}, 1), std::invalid_argument);
  CHECK_THROWS_AS(adam(d.span(), f.span(), f.span(), f.span(), {}, 4, {}, 1), std::invalid_argument);
  CHECK_THROWS_AS(adam(f.span(), f.span(), f.span(), d.span(), {}, 4, {}, 1), std::invalid_argument);
  CHECK_THROWS_AS(adam(f.span(), f.span(), h.span(), h.span(), {}, 4, {}, 1), std::invalid_argument);
  CHECK_THROWS_AS(adam(f.span(), f.span(), f.span(), f.span(), d.span(), 4, {}, 1), std::invalid_argument);
  SgdArgs a;
  a.momentum = 0.9;
  CHECK_THROWS_AS(sgd(f.span(), f.span(), {}, 4, a, 1), std::invalid_argument);
  CHECK_THROWS_AS(sgd(f.span(), f.span(), d.span(), 4, a, 1), std::invalid_argument);
  CHECK_THROWS_AS(sum_ranks(f.data(), nullptr, 0, 4, DType::f32, 1), std::invalid_argument);
}
