// The fused updates of 16-bit parameters with float32 masters, and of bfloat16 moments, against those in float32.
#include <cmath>
#include <utility>

#include "kernels/kernels.h"
#include "kernels/table.h"
#include "support/kernel_numbers.h"

using namespace kernel_numbers;

namespace {

/// A 16-bit parameter and its master in float32.
struct Mastered {
  Buffer param, master;
  Mastered(DType type, const std::vector<double>& from, std::size_t shift = 0)
      : param(type, from, shift), master(DType::f32, std::vector<double>(from.size()), shift + 1) {}
  bool rounded() {
    for (std::size_t i = 0; i < param.n; ++i)
      if (param.get(i) != round_to(master.get(i), param.type)) return false;
    return true;
  }
};

}  // namespace

TEST_CASE("masters: the step is that of float32 parameters, and the 16-bit one is its rounding", "[kernels]") {
  const std::size_t n = 1500;
  for_each_set([&] {
    for (const DType pt : {DType::f16, DType::bf16}) {
      for (const DType gt : {DType::f32, DType::f16, DType::bf16}) {
        for (const std::size_t shift : {std::size_t{0}, std::size_t{3}}) {
          Mastered x(pt, random_values(n, 1), shift);
          Buffer alone(DType::f32, x.param.values(), shift), m(DType::f32, std::vector<double>(n)), v = m, m2 = m, v2 = m;
          Buffer momentum(DType::f32, std::vector<double>(n)), momentum2 = momentum;
          AdamArgs a;
          a.lr = 1e-3, a.weight_decay = 0.1, a.decoupled = true;
          SgdArgs s;
          s.lr = 1e-4, s.momentum = 0.9;
          for (int step = 1; step <= 4; ++step) {
            Buffer g(gt, random_values(n, 10 + static_cast<unsigned>(step)), 1);
            a.step = step, s.first = step == 1;
            adam({x.param.span(), g.span(), m.span(), v.span(), {}, x.master.span()}, n, a, 2);
            adam({alone.span(), g.span(), m2.span(), v2.span()}, n, a, 1);
            sgd({x.param.span(), g.span(), momentum.span(), x.master.span()}, n, s, 1);
            sgd({alone.span(), g.span(), momentum2.span()}, n, s, 2);
          }
          CHECK(x.master.bits() == alone.bits());
          CHECK(x.rounded());
          CHECK((x.param.surroundings_untouched() && x.master.surroundings_untouched()));
        }
      }
    }
  });
}

TEST_CASE("masters: an edited parameter counts, element by element", "[kernels]") {
  const std::size_t n = 700;
  for_each_set([&] {
    for (const DType pt : {DType::f16, DType::bf16}) {
      Mastered x(pt, random_values(n, 1));
      const Buffer g(pt, std::vector<double>(n, 0x1p-9));
      SgdArgs s;
      s.lr = 0x1p-3;
      const auto step = [&] { sgd({x.param.span(), Buffer(g).span(), {}, x.master.span()}, n, s, 1); };
      step();
      auto expected = x.master.values();
      for (const std::size_t i : {std::size_t{0}, std::size_t{255}, std::size_t{256}, std::size_t{699}}) {
        x.param.set(i, 3.0 + static_cast<double>(i));
        expected[i] = x.param.get(i);
      }
      x.param.set(300, -0.0), expected[300] = 0;
      x.param.set(301, kInf), expected[301] = kInf;
      step();
      for (std::size_t i = 0; i < n; ++i) {
        INFO(i);
        REQUIRE(x.master.get(i) == static_cast<double>(static_cast<float>(expected[i]) - 0x1p-12F));
      }
      CHECK(x.rounded());
      x.param.set(7, kNan);
      step();
      CHECK(std::isnan(x.master.get(7)));
    }
  });
}

TEST_CASE("moments in bfloat16 are those of float32, rounded once per step", "[kernels]") {
  const std::size_t n = 900;
  for_each_set([&] {
    for (const DType pt : {DType::f32, DType::f16, DType::bf16}) {
      Buffer p(pt, random_values(n, 1)),
          p2 = p, m(DType::bf16, random_values(n, 2)), v(DType::bf16, random_values(n, 3, 0.1, 2)),
          w(DType::bf16, random_values(n, 4, 0.1, 2)), g(DType::f32, random_values(n, 5)), m2(DType::f32, m.values()),
          v2(DType::f32, v.values()), w2(DType::f32, w.values()), b(DType::bf16, random_values(n, 6)),
          b2(DType::f32, b.values());
      AdamArgs a;
      a.step = 3;
      adam({p.span(), g.span(), m.span(), v.span(), w.span()}, n, a, 2);
      adam({p2.span(), g.span(), m2.span(), v2.span(), w2.span()}, n, a, 1);
      SgdArgs s;
      s.lr = 0.1, s.momentum = 0.9;
      sgd({p.span(), g.span(), b.span()}, n, s, 1);
      sgd({p2.span(), g.span(), b2.span()}, n, s, 1);
      CHECK(p.bits() == p2.bits());
      for (auto [narrow, wide] : {std::pair<Buffer&, Buffer&>{m, m2}, {v, v2}, {w, w2}, {b, b2}})
        for (std::size_t i = 0; i < n; ++i) REQUIRE(narrow.get(i) == round_to(wide.get(i), DType::bf16));
    }
  });
}
