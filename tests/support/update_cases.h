// Shards to update, for the tests of the CUDA kernels on the host and on a GPU: every mix of types, cut into segments in every way that
// the kernels tell apart, at aligned and misaligned places; and the same update by the CPU kernels, segment by segment.
#pragma once

#include <array>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "kernel_numbers.h"
#include "kernels/cuda/bind.h"
#include "kernels/cuda/decide_body.h"

namespace update_cases {

using namespace kernel_numbers;
using namespace zero::kernels::cuda;

inline const char* name_of(DType t) {
  return t == DType::f32 ? "f32" : t == DType::f64 ? "f64" : t == DType::f16 ? "f16" : "bf16";
}

struct Mix {
  DType param, grad, state;
  bool master, extra;  ///< extra: amsgrad, or a momentum buffer
  std::string name() const {
    return std::string("parameter ") + name_of(param) + ", gradient " + name_of(grad) + ", state " + name_of(state) +
           (master ? ", master" : "") + (extra ? ", amsgrad or momentum" : "");
  }
};

template <bool kAdam, class F>
void for_each_mix(F&& f) {
  for (const bool extra : {false, true}) {
    f(Mix{DType::f64, DType::f64, DType::f64, false, extra});
    for (const DType param : {DType::f32, DType::f16, DType::bf16}) {
      for (const DType grad : {DType::f32, DType::f16, DType::bf16}) {
        for (const DType state : {DType::f32, DType::bf16}) {
          if (!kAdam && !extra && state == DType::bf16) continue;  // there is no state
          for (const bool master : {false, true}) {
            if (!master || param != DType::f32) f(Mix{param, grad, state, master, extra});
          }
        }
      }
    }
  }
}

/// A way to cut a shard. Entries are dealt out backwards, so that nobody takes a segment's number for its entry.
struct Cut {
  std::string name;
  std::vector<Segment> segments;
};

inline std::vector<Cut> cuts(std::int64_t n) {
  const auto cut = [n](const char* name, std::int64_t begin, const std::function<std::int64_t(int)>& length, std::int64_t gap) {
    Cut c{name, {}};
    for (int k = 0; begin < n; ++k) {
      const std::int64_t end = std::min(n, begin + length(k));
      c.segments.push_back({begin, end, 100 + k, 0});
      begin = end + gap;
    }
    for (std::size_t k = 0; k < c.segments.size(); ++k)
      c.segments[k].entry = static_cast<std::int32_t>(c.segments.size() - 1 - k);
    return c;
  };
  return {cut(
              "whole", 0, [n](int) { return n; }, 0),
          cut(
              "odd, with gaps", 3, [](int k) { return 700 + 333 * k; }, 5),
          cut(
              "tiny", 0, [](int k) { return k % 11; }, 0),
          cut(
              "tiny, with gaps", 1, [](int k) { return 1 + k % 9; }, 3),
          cut(
              "large and small in turn", 0, [](int k) { return k % 2 == 0 ? 2048 + 8 : 3; }, 0),
          cut(
              "tiles", 0, [](int) { return kTile; }, 0)};
}

/// Elements by which parameter, gradient and state are off the beginning of a line.
using Places = std::array<int, 3>;
constexpr std::array<Places, 6> kPlaces = {{{0, 0, 0}, {1, 1, 1}, {5, 5, 5}, {3, 2, 1}, {0, 1, 0}, {0, 0, 7}}};

/// A shard and its tables. Two of the same arguments are alike to the bit.
template <bool kAdam>
class Problem {
 public:
  template <class T>
  using Plan = std::conditional_t<kAdam, AdamPlan<T>, SgdPlan<T>>;
  using Group = std::conditional_t<kAdam, AdamGroup, SgdGroup>;

  Problem(const Mix& m, const Cut& c, std::int64_t count, Places places)
      : mix(m),
        cut(c),
        n(count),
        map(make_tile_map(c.segments, count)),
        param(m.param, numbers(1), shift(places[0])),
        grad(m.grad, static_cast<std::size_t>(count), shift(places[1])),
        first(m.state, numbers(2), shift(places[2])),
        second(m.state, positive(3), shift(places[2])),
        third(m.state, positive(4), shift(places[2])),
        master(DType::f32, std::vector<double>(static_cast<std::size_t>(count)), shift(places[2])),
        groups(make_groups()) {
    for (std::size_t k = 0; k < cut.segments.size(); ++k) {
      const auto number = static_cast<std::int32_t>(k);
      parameters.push_back({number % 7, number % 3, number % 5 == 3, number % 2});
    }
  }

  /// Gradients of a step, with zeros, subnormals, infinities and NaN among them; and an edit of some parameters.
  void new_gradients(int step) {
    const auto values = random_values(static_cast<std::size_t>(n), 17 + static_cast<unsigned>(step));
    for (std::size_t i = 0; i < values.size(); ++i) grad.set(i, values[i]);
    const std::vector<double> special = {0, -0.0, 1e-7, 1e-40, kInf, kNan};
    for (std::size_t k = 0; k < special.size() && 13 * k < values.size(); ++k) grad.set(13 * k, special[k]);
    for (std::size_t i = 5; step > 0 && i < values.size(); i += 97) param.set(i, 0.75);
  }

  /// By a runner's adam(spans, tables) or sgd(spans, tables).
  template <class Runner>
  void update(const Runner& runner) {
    std::vector<Plan<float>> plans;
    std::vector<Plan<double>> wide;
    for (const ParameterStep& p : parameters) {
      plans.push_back(plan_of(groups[static_cast<std::size_t>(p.group)], p, kFactor, 0.0f));
      wide.push_back(plan_of(groups[static_cast<std::size_t>(p.group)], p, kFactor, 0.0));
    }
    const SegmentTable table{cut.segments.data(), map.data(), static_cast<std::int32_t>(cut.segments.size()), n};
    if constexpr (kAdam) {
      runner.adam(adam_spans(), AdamTables{table, plans.data(), wide.data(), &skip});
    } else {
      runner.sgd(sgd_spans(), SgdTables{table, plans.data(), wide.data(), &skip});
    }
    end_step();
  }

  void update_on_cpu() {
    for (const Segment& s : cut.segments) {
      const ParameterStep& p = parameters[static_cast<std::size_t>(s.entry)];
      const Group& o = groups[static_cast<std::size_t>(p.group)];
      if (p.absent != 0) continue;
      const auto from = [&s](Span span) {
        return Span{span.data == nullptr ? nullptr : static_cast<char*>(span.data) + s.begin * size_of(span.dtype), span.dtype};
      };
      if constexpr (kAdam) {
        AdamSpans spans = adam_spans();
        for (Span* span : {&spans.param, &spans.grad, &spans.exp_avg, &spans.exp_avg_sq, &spans.max_exp_avg_sq, &spans.master})
          *span = from(*span);
        if (o.amsgrad == 0) spans.max_exp_avg_sq = {};
        AdamArgs a;
        a.lr = o.lr, a.beta1 = o.beta1, a.beta2 = o.beta2, a.eps = o.eps, a.weight_decay = o.weight_decay;
        a.decoupled = o.decoupled != 0, a.step = p.steps + 1, a.grad_scale = kFactor;
        zero::kernels::adam(spans, s.end - s.begin, a, 1);
      } else {
        SgdSpans spans = sgd_spans();
        for (Span* span : {&spans.param, &spans.grad, &spans.momentum_buffer, &spans.master}) *span = from(*span);
        SgdArgs a;
        a.lr = o.lr, a.momentum = o.momentum, a.dampening = o.dampening, a.weight_decay = o.weight_decay;
        a.nesterov = o.nesterov != 0, a.first = p.started == 0, a.grad_scale = kFactor;
        zero::kernels::sgd(spans, s.end - s.begin, a, 1);
      }
    }
    end_step();
  }

  /// The first difference from another, or from what may be written at all; empty if there is none. NaN is NaN.
  std::string differences(Problem& other) {
    const std::array<std::pair<const char*, std::pair<Buffer*, Buffer*>>, 6> all = {{{"parameter", {&param, &other.param}},
                                                                                     {"gradient", {&grad, &other.grad}},
                                                                                     {"first state", {&first, &other.first}},
                                                                                     {"second state", {&second, &other.second}},
                                                                                     {"third state", {&third, &other.third}},
                                                                                     {"master", {&master, &other.master}}}};
    for (const auto& [name, pair] : all) {
      if (!pair.first->surroundings_untouched()) return std::string("memory around the ") + name;
      if (pair.first->bits() == pair.second->bits()) continue;
      for (std::size_t i = 0; i < pair.first->n; ++i) {
        const double a = pair.first->get(i), b = pair.second->get(i);
        if ((a != b || std::signbit(a) != std::signbit(b)) && !(std::isnan(a) && std::isnan(b)))
          return std::string(name) + " at " + std::to_string(i) + ": " + std::to_string(a) + " and " + std::to_string(b);
      }
    }
    return "";
  }

  AdamSpans adam_spans() {
    AdamSpans s{param.span(), grad.span(), first.span(), second.span()};
    if (mix.extra) s.max_exp_avg_sq = third.span();
    if (mix.master) s.master = master.span();
    return s;
  }
  SgdSpans sgd_spans() {
    SgdSpans s{param.span(), grad.span()};
    if (mix.extra) s.momentum_buffer = first.span();
    if (mix.master) s.master = master.span();
    return s;
  }

  Mix mix;
  Cut cut;
  std::int64_t n;
  std::vector<std::int32_t> map;
  Buffer param, grad, first, second, third, master;
  std::vector<Group> groups;
  std::vector<ParameterStep> parameters;
  std::int32_t skip = 0;

 private:
  static constexpr double kFactor = 0.37;

  static std::size_t shift(int elements) { return static_cast<std::size_t>(elements); }
  std::vector<double> numbers(unsigned seed) const { return random_values(static_cast<std::size_t>(n), seed); }
  std::vector<double> positive(unsigned seed) const { return random_values(static_cast<std::size_t>(n), seed, 0, 1); }
  std::vector<Group> make_groups() const {
    if constexpr (kAdam) {
      return {{1e-2, 0.9, 0.999, 1e-8, 0.1, 1, 1}, {3e-2, 0.8, 0.95, 1e-5, 0.2, 0, 0}, {1e-3, 0.9, 0.99, 1e-6, 0, 1, 1}};
    } else {
      const double on = mix.extra ? 1 : 0;
      return {{0.1, 0.9 * on, 0, 0.1, mix.extra}, {0.2, 0, 0, 0, 0}, {0.05, 0.5 * on, 0.1, 0, 0}};
    }
  }
  void end_step() {
    for (ParameterStep& p : parameters) {
      if (p.absent == 0) advance(groups[static_cast<std::size_t>(p.group)], p);
    }
  }
};

}  // namespace update_cases
