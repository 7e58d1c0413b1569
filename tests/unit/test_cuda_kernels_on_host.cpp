// The CUDA kernels' bodies, run by loops on the CPU: every type, size, misalignment, cut into segments and number of blocks gives the
// bits of the CPU kernels, and nothing else is touched. No CUDA and no LibTorch.
#include "kernels/cuda/bind.h"
#include "kernels/cuda/decide_body.h"
#include "support/update_cases.h"

using namespace kernel_numbers;
using namespace zero::kernels::cuda;
using namespace update_cases;

namespace {

// The launches of cuda_kernels.h, by loops.
struct OnHost {
  int blocks;

  void adam(const AdamSpans& spans, const AdamTables& tables) const {
    with_any_type(spans.param.dtype,
                  [&](auto p) { bind_adam<decltype(p)>(spans, tables, [&](const auto& body) { run_on_host(body, blocks); }); });
  }
  void sgd(const SgdSpans& spans, const SgdTables& tables) const {
    with_any_type(spans.param.dtype,
                  [&](auto p) { bind_sgd<decltype(p)>(spans, tables, [&](const auto& body) { run_on_host(body, blocks); }); });
  }
};

Statistics statistics_on_host(Span grad, const SegmentTable& table, const std::vector<ParameterStep>& parameters) {
  Statistics all;
  const int blocks = statistics_blocks(table.elements);
  bind_statistics(grad, table, parameters.data(), [&](const auto& body) {
    for (int block = 0; block < blocks; ++block) {
      for (int thread = 0; thread < kThreads; ++thread) {
        const Statistics one = body(Place{block, blocks, thread});
        all.sum_of_squares += one.sum_of_squares;
        all.first_nonfinite = std::min(all.first_nonfinite, one.first_nonfinite);
      }
    }
  });
  return all;
}

// The decision on the host, all threads before the one that writes.
template <class Body>
StepRecord decide_on_host(const Body& body) {
  StepRecord record{};
  for (int thread = kThreads - 1; thread >= 0; --thread) record = body(Place{0, 1, thread});
  body.finish(record);
  return record;
}

}  // namespace

TEST_CASE("the tile map finds every element's segment", "[cuda]") {
  for (const std::int64_t n : {0, 1, 7, 8, 2047, 2048, 2049, 2055, 2056, 4096, 10000}) {
    for (const Cut& cut : cuts(n)) {
      const auto first = make_tile_map(cut.segments, n);
      const auto count = static_cast<std::int32_t>(cut.segments.size());
      int wrong = 0;
      for (int origin = 0; origin > -kMaxPack; --origin) {
        REQUIRE(tiles_of(n, origin) + 2 <= static_cast<std::int64_t>(first.size()));
        for (std::int64_t i = 0; i < n; ++i) {
          const auto t = static_cast<std::size_t>((i - origin) / kTile);
          const auto expected =
              std::find_if(cut.segments.begin(), cut.segments.end(), [&](const Segment& s) { return s.end > i; });
          const auto k = static_cast<std::int32_t>(expected - cut.segments.begin());
          wrong += k < first[t] || k > first[t + 2];
          wrong += find_segment(cut.segments.data(), first[t], first[t + 2], i) != k;
        }
      }
      INFO(n << " elements, cut " << cut.name);
      CHECK(wrong == 0);
      CHECK(first.back() <= count);
    }
  }
  CHECK_THROWS_AS(make_tile_map({{0, 5, 0, 0}, {4, 6, 1, 1}}, 10), std::invalid_argument);
  CHECK_THROWS_AS(make_tile_map({{0, 11, 0, 0}}, 10), std::invalid_argument);
}

TEST_CASE("packs are aligned for as many bytes as can be", "[cuda]") {
  alignas(64) static char memory[256];
  const auto at = [](DType t, int element) { return Span{memory + element * size_of(t), t}; };
  Alignment a = align_packs(4, {at(DType::f32, 0), at(DType::f16, 0), {}});
  CHECK(a.all);
  CHECK(a.origin == 0);
  a = align_packs(4, {at(DType::f32, 3), at(DType::f16, 3)});  // together: a head of one element
  CHECK(a.all);
  CHECK(a.origin == -3);
  a = align_packs(4, {at(DType::f32, 1), at(DType::f16, 2), at(DType::f32, 1)});
  CHECK_FALSE(a.all);
  CHECK(a.origin == -1);
  CHECK(a.aligned == 0b101u);
}

TEMPLATE_TEST_CASE_SIG("updates have the CPU's bits in every type, cut, place and launch", "[cuda]", ((bool kAdam), kAdam),
                       true, false) {
  int number = 0;
  for_each_mix<kAdam>([&](const Mix& mix) {
    INFO(mix.name());
    for (const std::int64_t n : {std::int64_t{1}, std::int64_t{9}, kTile - 1, kTile + 5, 4 * kTile + 3}) {
      for (const Cut& cut : cuts(n)) {
        // Places and launches go round: each mix meets all of them with some cut.
        ++number;
        const Places places = kPlaces[static_cast<std::size_t>(number) % kPlaces.size()];
        const int blocks = std::array<int, 4>{1, 2, 3, 64}[static_cast<std::size_t>(number / 3) % 4];
        INFO(n << " elements, cut " << cut.name << ", places " << places[0] << places[1] << places[2] << ", " << blocks
               << " blocks");
        Problem<kAdam> ours(mix, cut, n, places), theirs(mix, cut, n, places);
        for (int step = 0; step < 2; ++step) {
          ours.new_gradients(step);
          theirs.new_gradients(step);
          ours.update(OnHost{blocks});
          theirs.update_on_cpu();
        }
        REQUIRE(ours.differences(theirs) == "");
      }
    }
  });
}

TEMPLATE_TEST_CASE_SIG("a skipped step writes nothing", "[cuda]", ((bool kAdam), kAdam), true, false) {
  for_each_mix<kAdam>([&](const Mix& mix) {
    const std::int64_t n = kTile + 5;
    Problem<kAdam> ours(mix, cuts(n)[2], n, kPlaces[0]), before(mix, cuts(n)[2], n, kPlaces[0]);
    ours.new_gradients(1);
    before.new_gradients(1);
    ours.skip = 1;
    ours.update(OnHost{3});
    INFO(mix.name());
    CHECK(ours.differences(before) == "");
  });
}

TEST_CASE("an update with the wrong types or tables says so", "[cuda]") {
  float x[8] = {};
  std::uint16_t h[8] = {};
  const AdamPlan<float> plan{};
  const Segment segment{0, 8, 0, 0};
  const auto first = make_tile_map({segment}, 8);
  AdamTables tables{{&segment, first.data(), 1, 8}, &plan, nullptr, nullptr};
  const Span f32{x, DType::f32}, f16{h, DType::f16}, f64{x, DType::f64};
  CHECK_NOTHROW(OnHost{1}.adam({f16, f16, f32, f32, {}, f32}, tables));
  CHECK_THROWS_AS(OnHost{1}.adam({f32, f32, f32, f32, {}, f32}, tables), std::invalid_argument);  // a master of f32
  CHECK_THROWS_AS(OnHost{1}.adam({f32, f64, f32, f32}, tables), std::invalid_argument);
  CHECK_THROWS_AS(OnHost{1}.adam({f64, f32, f64, f64}, tables), std::invalid_argument);
  CHECK_THROWS_AS(OnHost{1}.adam({f32, f32, f16, f16}, tables), std::invalid_argument);
  CHECK_THROWS_AS(OnHost{1}.adam({f32, f32, f32, f16}, tables), std::invalid_argument);
  CHECK_THROWS_AS(OnHost{1}.adam({f64, f64, f64, f64}, tables), std::invalid_argument);  // no plans in double
}

TEST_CASE("statistics sum every gradient of every present parameter, and name the first that isn't finite", "[cuda]") {
  for (const DType type : kTypes) {
    for (const std::int64_t n : {std::int64_t{0}, std::int64_t{1}, std::int64_t{17}, kTile + 3, 3 * kTile}) {
      for (const Cut& cut : cuts(n)) {
        for (const std::size_t shift : {0, 1, 3}) {
          INFO("type " << static_cast<int>(type) << ", " << n << " elements, cut " << cut.name << ", shift " << shift);
          Buffer grad(type, random_values(static_cast<std::size_t>(n), 3), shift);
          std::vector<ParameterStep> parameters(cut.segments.size());
          for (std::size_t k = 0; k < parameters.size(); ++k) parameters[k].absent = k % 4 == 3;
          const auto first = make_tile_map(cut.segments, n);
          const SegmentTable table{cut.segments.data(), first.data(), static_cast<std::int32_t>(cut.segments.size()), n};
          Real sum = 0;
          for (const Segment& s : cut.segments) {
            for (std::int64_t i = s.begin; i < s.end && parameters[static_cast<std::size_t>(s.entry)].absent == 0; ++i)
              sum += Real(grad.get(static_cast<std::size_t>(i))) * grad.get(static_cast<std::size_t>(i));
          }
          const Statistics found = statistics_on_host(grad.span(), table, parameters);
          CHECK(std::fabs(Real(found.sum_of_squares) - sum) <= 1e-13L * sum);
          CHECK(found.first_nonfinite == kAllFinite);
          for (const double bad : {kInf, -kInf, kNan}) {
            std::int64_t expected = kAllFinite;
            for (std::size_t k = cut.segments.size(); k-- > 0;) {
              const Segment& s = cut.segments[k];
              if (s.begin == s.end) continue;
              Buffer with(type, grad.values(), shift);
              with.set(static_cast<std::size_t>(s.end - 1), bad);
              const bool counts = parameters[static_cast<std::size_t>(s.entry)].absent == 0;
              expected = counts ? s.parameter : kAllFinite;
              if (statistics_on_host(with.span(), table, parameters).first_nonfinite != expected) FAIL("segment " << k);
              if (k + 5 < cut.segments.size()) break;  // the last few are enough
            }
          }
        }
      }
    }
  }
}

TEST_CASE("conversion, accumulation and scaling round as the CPU does, between all types", "[cuda]") {
  const double factor = 0.3;
  int number = 0;
  for (const DType to : kTypes) {
    for (const DType from : kTypes) {
      const bool wide = to == DType::f64 || from == DType::f64;
      for (const std::size_t n : {0, 1, 7, 100, 4096, 9001}) {
        for (const bool add : {false, true}) {
          for (const auto& [out_shift, in_shift] : {std::pair{0, 0}, {1, 1}, {2, 3}, {5, 0}}) {
            Buffer out(to, random_values(n, 1), static_cast<std::size_t>(out_shift));
            Buffer in(from, random_values(n, 2), static_cast<std::size_t>(in_shift));
            Buffer expected(to, out.values(), static_cast<std::size_t>(out_shift));
            for (std::size_t i = 0; i < n; ++i) {
              const auto f = [](double x) { return static_cast<double>(static_cast<float>(x)); };
              double x = wide ? in.get(i) * factor : f(in.get(i) * f(factor));
              if (add) x = wide ? out.get(i) + x : f(out.get(i) + x);
              expected.set(i, to == DType::f64 ? x : round_to(f(x), to));
            }
            ConvertArgs args;
            args.add = add;
            const double half = factor / 2, two = 2;
            args.factor = ++number % 2 == 0 ? factor : half;
            args.device_factor = number % 2 == 0 ? nullptr : &two;
            bind_convert(out.span(), in.span(), static_cast<std::int64_t>(n), args,
                         [&](const auto& body) { run_on_host(body, 1 + number % 3); });
            INFO(static_cast<int>(to) << " from " << static_cast<int>(from) << ", " << n << " elements, shifts " << out_shift
                                      << ' ' << in_shift << (add ? ", added" : ""));
            CHECK(out.bits() == expected.bits());
            CHECK(out.surroundings_untouched());
          }
        }
      }
    }
  }
}

TEST_CASE("the decision: norm, clips, skip and the parameters' scalars are the CPU step's", "[cuda]") {
  const AdamGroup groups[] = {{1e-3, 0.9, 0.999, 1e-8, 0.1, 1, 0}, {2e-3, 0.8, 0.99, 1e-6, 0, 0, 1}};
  for (const double sum : {0.0, 4.0, 1e10, kInf, kNan}) {
    for (const double scale : {0.0, 1024.0}) {
      for (const bool skip_nonfinite : {false, true}) {
        for (const bool overflow : {false, true}) {
          for (const int clips : {0, 1, 2}) {  // before the step, in it
            INFO("sum " << sum << ", scale " << scale << ", clips " << clips << (overflow ? ", overflow" : ""));
            StepRecord record{};
            record.sum_of_squares = sum;
            record.first_nonfinite = overflow ? 5 : kAllFinite;
            StepSettings settings{};
            settings.clip_factor = clips > 1 ? 0.25 : 1;
            settings.max_norm = clips > 0 ? 5e-4 : 0;
            settings.skip_nonfinite = skip_nonfinite;
            LossScaleRule rule;
            LossScaleState state{scale, 7, 1, 0}, expected_state = state;
            std::vector<ParameterStep> parameters = {{0, 0, 0, 0}, {41, 1, 0, 0}, {7, 0, 1, 0}};
            std::vector<AdamPlan<float>> plans(3);
            std::vector<AdamPlan<double>> wide(3);
            std::memset(static_cast<void*>(plans.data()), 0x5a, 3 * sizeof plans[0]);
            const auto untouched = plans[0].scalars.eps;
            const DecideTables<AdamGroup> tables{&record, &settings,         &rule, scale > 0 ? &state : nullptr,
                                                 groups,  parameters.data(), 3};
            decide_on_host(DecideBody<AdamPlan, AdamGroup>{tables, plans.data(), wide.data()});

            const double unscale = scale > 0 ? 1 / scale : 1;
            double clip = clips > 1 ? 0.25 : 1;
            const double norm = std::sqrt(sum) * clip * unscale;
            if (clips > 0) {
              double factor = 5e-4 / (norm + 1e-6);
              if (factor > 1) factor = 1;
              clip *= factor;
            }
            const auto same = [](double a, double b) { return a == b || (a != a && b != b); };
            const bool skipped = overflow && skip_nonfinite;
            CHECK(same(record.grad_norm, norm));
            CHECK(record.loss_scale == (scale > 0 ? scale : 1));
            CHECK(same(record.clip_factor, clip));
            CHECK(same(record.grad_factor, clip * unscale));
            CHECK(record.overflow == overflow);
            CHECK(record.skip == skipped);
            if (scale > 0) follow_step(rule, expected_state, overflow);
            CHECK(state.scale == expected_state.scale);
            CHECK(state.clean == expected_state.clean);
            CHECK(parameters[0].steps == (skipped ? 0 : 1));
            CHECK(parameters[1].steps == (skipped ? 41 : 42));
            CHECK(parameters[2].steps == 7);
            if (skipped) {
              CHECK(plans[0].scalars.eps == untouched);
              continue;
            }
            AdamArgs args;
            args.lr = 2e-3, args.beta1 = 0.8, args.beta2 = 0.99, args.eps = 1e-6, args.step = 42,
            args.grad_scale = clip * unscale;
            const auto expected = make_adam_scalars<double>(args);
            CHECK(std::memcmp(&wide[1].scalars, &expected, sizeof expected) == 0);
            CHECK(plans[1].decay == Decay::none);
            CHECK(plans[1].amsgrad == 1);
            CHECK(plans[0].decay == Decay::decoupled);
            CHECK(plans[0].active == 1);
            CHECK(plans[2].active == 0);
          }
        }
      }
    }
  }
}

TEST_CASE("the decision lets the loss scale follow, and gradients that were unscaled by hand alone", "[cuda]") {
  const SgdGroup group{0.1, 0.9, 0, 0, 1};
  StepRecord record{};
  StepSettings settings{};
  settings.clip_factor = 1;
  settings.skip_nonfinite = 1;
  LossScaleRule rule;
  rule.growth_interval = 2;
  LossScaleState state{8, 0, 1, 0};
  ParameterStep parameter{};
  SgdPlan<float> plan{};
  const DecideBody<SgdPlan, SgdGroup> body{{&record, &settings, &rule, &state, &group, &parameter, 1}, &plan, nullptr};
  const auto step = [&](bool overflow) {
    record.sum_of_squares = 64;
    record.first_nonfinite = overflow ? 0 : kAllFinite;
    decide_on_host(body);
  };
  step(true);
  CHECK(state.scale == 4);
  CHECK(parameter.started == 0);
  step(false);
  CHECK(record.grad_norm == 2);  // by the scale in force
  CHECK(plan.momentum == Momentum::first_nesterov);
  CHECK(parameter.started == 1);
  step(false);
  CHECK(plan.momentum == Momentum::nesterov);
  CHECK(state.scale == 8);
  settings.unscaled = 1;
  step(false);
  CHECK(record.grad_norm == 8);
  CHECK(plan.scalars.grad_scale == 1);
}

TEST_CASE("the statistics of several ranks are added in their order, and the lowest parameter counts", "[cuda]") {
  const Statistics of_ranks[] = {{1e16, kAllFinite, kAllFinite}, {1, 7, 9}, {1, 3, 8}};
  StepRecord record{};
  record.sum_of_squares = 5;
  record.first_nonfinite = 1;  // of this rank, which is among them
  combine(of_ranks, 3, record);
  CHECK(record.sum_of_squares == (1e16 + 1) + 1);
  CHECK(record.first_nonfinite == 3);
  CHECK(record.rank_of_own == 1);  // the lowest rank that has looked and found
  CHECK(record.first_own == 9);
  decide(StepSettings{1, 0, 1, 1}, nullptr, record);
  CHECK(record.nonfinite_rank == 1);
  CHECK(record.nonfinite_parameter == 9);
  combine(of_ranks, 1, record);
  CHECK(record.first_nonfinite == kAllFinite);
  CHECK(record.rank_of_own == -1);
}
