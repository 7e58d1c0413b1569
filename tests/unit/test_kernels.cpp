// Conversions and updates against formulas of their own (in double or long double, written from torch::optim's documentation), and the
// same bits at every instruction set, thread count, size and offset. No LibTorch.
#include "kernels/kernels.h"
#include "kernels/table.h"
#include "support/kernel_numbers.h"

using namespace kernel_numbers;

namespace {

// ---- the rules in long double, one element -------------------------------------------------------------------------------------

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
        sgd({p.span(), {grad.data(), DType::f32}}, static_cast<std::int64_t>(n), a, 1);
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
            adam({p.span(), g.span(), m.span(), v.span(), amsgrad ? w.span() : Span{}}, n, a, 1);
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
        adam({p.span(), g.span(), m.span(), v.span(), {}}, n, a, 2);
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
      adam({p.span(), g.span(), m.span(), v.span(), w.span()}, 3, a, 1);
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
            sgd({p.span(), g.span(), a.momentum != 0 ? buffer.span() : Span{}}, n, a, 1 + step);
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
        adam({p.span(), g.span(), m.span(), v.span(), amsgrad ? w.span() : Span{}}, static_cast<std::int64_t>(n), a, threads);
        std::vector<std::string> bits = {p.bits(), m.bits(), v.bits()};
        bool untouched = p.surroundings_untouched() && g.surroundings_untouched() && m.surroundings_untouched() &&
                         v.surroundings_untouched();
        sgd({p.span(), g.span(), m.span()}, static_cast<std::int64_t>(n), s, threads);
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

TEST_CASE("an update of wrong types or without a buffer is refused", "[kernels]") {
  Buffer f(DType::f32, std::vector<double>(4)), d(DType::f64, std::vector<double>(4)), h(DType::f16, std::vector<double>(4)),
      b(DType::bf16, std::vector<double>(4));
  const auto s = [](Buffer& x) { return x.span(); };
  CHECK_THROWS_AS(adam({s(f), s(f), s(d), s(d)}, 4, {}, 1), std::invalid_argument);
  CHECK_THROWS_AS(adam({s(d), s(f), s(f), s(f)}, 4, {}, 1), std::invalid_argument);
  CHECK_THROWS_AS(adam({s(f), s(f), s(f), s(d)}, 4, {}, 1), std::invalid_argument);
  CHECK_THROWS_AS(adam({s(f), s(f), s(f), s(b)}, 4, {}, 1), std::invalid_argument);
  CHECK_THROWS_AS(adam({s(f), s(f), s(h), s(h)}, 4, {}, 1), std::invalid_argument);
  CHECK_THROWS_AS(adam({s(f), s(f), s(f), s(f), s(d)}, 4, {}, 1), std::invalid_argument);
  CHECK_THROWS_AS(adam({s(f), s(f), s(f), s(f), {}, s(f)}, 4, {}, 1), std::invalid_argument);  // no master of float32
  CHECK_THROWS_AS(adam({s(h), s(f), s(f), s(f), {}, s(h)}, 4, {}, 1), std::invalid_argument);
  SgdArgs a;
  a.momentum = 0.9;
  CHECK_THROWS_AS(sgd({s(f), s(f)}, 4, a, 1), std::invalid_argument);
  CHECK_THROWS_AS(sgd({s(f), s(f), s(d)}, 4, a, 1), std::invalid_argument);
  CHECK_THROWS_AS(sgd({s(d), s(f), s(d), s(f)}, 4, a, 1), std::invalid_argument);
}
