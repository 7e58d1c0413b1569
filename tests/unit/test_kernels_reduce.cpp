// Norms, sums over ranks, scaling and copies: against arithmetic of their own, and the same bits at every instruction set, thread count,
// size and offset. No LibTorch.
#include "kernels/kernels.h"
#include "kernels/table.h"
#include "support/kernel_numbers.h"

using namespace kernel_numbers;

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

TEST_CASE("sums of no ranks are refused", "[kernels]") {
  Buffer f(DType::f32, std::vector<double>(4));
  CHECK_THROWS_AS(sum_ranks(f.data(), nullptr, 0, 4, DType::f32, 1), std::invalid_argument);
}
