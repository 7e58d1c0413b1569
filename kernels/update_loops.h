// The loops of the optimizer update around update_rule.h, for one instruction set (isa_table.inc includes this). What is of another
// type than the arithmetic's is converted a small block at a time, which stays in the first-level cache, so there is one arithmetic
// loop per rule and accumulation type.
#pragma once

#include <type_traits>

#include "convert.h"
#include "table.h"
#include "update_rule.h"

namespace zero::kernels {
namespace {

/// Elements converted at a time. Measured: longer stages leave the state's streams idle for longer and cost bandwidth.
constexpr std::int64_t kStage = 256;

/// Element i of a span, as T; null of a span that has no memory.
template <class T>
inline T* at(Span s, std::int64_t i) {
  return s.data == nullptr ? nullptr : static_cast<T*>(s.data) + i;
}

template <class T>
constexpr DType kNative = std::is_same_v<T, float> ? DType::f32 : DType::f64;

/// A span, up to kStage elements at a time, as T: the memory itself, or a copy in `buffer` where it is of another type.
template <class T>
struct Staged {
  Span span;
  alignas(64) T buffer[kStage];

  explicit Staged(Span s) : span(s) {}

  /// Elements [begin, begin + n).
  T* open(std::int64_t begin, std::int64_t n) {
    T* result = buffer;
    if (span.data == nullptr) return result;
    with_type(span.dtype, [&](auto* type) {
      using E = std::remove_pointer_t<decltype(type)>;
      if constexpr (std::is_same_v<E, T>) {
        result = at<T>(span, begin);
      } else {
        load(buffer, at<const E>(span, begin), n);
      }
    });
    return result;
  }

  /// Writes a copy back, rounded.
  void close(std::int64_t begin, std::int64_t n) {
    if constexpr (std::is_same_v<T, float>) {
      if (span.data == nullptr) return;
      if (span.dtype == DType::f16) store(at<Half>(span, begin), buffer, n);
      if (span.dtype == DType::bf16) store(at<BFloat16>(span, begin), buffer, n);
    }
  }
};

/// The same for parameters that have masters: what is handed out is the master.
struct StagedMaster {
  Span param, master;

  template <class E>
  float* start(std::int64_t begin, std::int64_t n) {
    const E* p = at<const E>(param, begin);
    float* m = at<float>(master, begin);
    // Whole stages are compared: edits are rare.
    E rounded[kStage];
    store(rounded, m, n);
    if (__builtin_memcmp(rounded, p, static_cast<std::size_t>(n) * sizeof(E)) != 0)
      for (std::int64_t i = 0; i < n; ++i) m[i] = start_of(p[i], m[i]);
    return m;
  }
  float* open(std::int64_t begin, std::int64_t n) {
    return param.dtype == DType::f16 ? start<Half>(begin, n) : start<BFloat16>(begin, n);
  }
  void close(std::int64_t begin, std::int64_t n) {
    const float* m = at<const float>(master, begin);
    param.dtype == DType::f16 ? store(at<Half>(param, begin), m, n) : store(at<BFloat16>(param, begin), m, n);
  }
};

/// Calls loop(param, grad, state…, n) over [begin, end), all as T. A state that is there in no memory is a buffer of its own.
template <class T, class Param, class Loop, class... State>
inline void in_stages(Param param, Span grad, std::int64_t begin, std::int64_t end, const Loop& loop, State... states) {
  Staged<T> g(grad);
  const auto run = [&](auto&... state) {
    for (std::int64_t i = begin; i < end; i += kStage) {
      const std::int64_t n = end - i < kStage ? end - i : kStage;
      loop(param.open(i, n), g.open(i, n), state.open(i, n)..., n);
      param.close(i, n);
      (state.close(i, n), ...);
    }
  };
  run(states...);
}

/// The same; without stages where all memory is of type T already.
template <class T, class Loop, class... Spans>
inline void over(Span param, Span master, Span grad, std::int64_t begin, std::int64_t end, const Loop& loop, Spans... states) {
  const auto native = [](Span s) { return s.data == nullptr || s.dtype == kNative<T>; };
  if (master.data == nullptr && native(param) && native(grad) && (native(states) && ...)) {
    loop(at<T>(param, begin), at<const T>(grad, begin), at<T>(states, begin)..., end - begin);
  } else if (std::is_same_v<T, float> && master.data != nullptr) {
    if constexpr (std::is_same_v<T, float>)
      in_stages<T>(StagedMaster{param, master}, grad, begin, end, loop, Staged<T>(states)...);
  } else {
    in_stages<T>(Staged<T>(param), grad, begin, end, loop, Staged<T>(states)...);
  }
}

template <class T, Decay kDecay, bool kAmsgrad>
void adam_loop(const AdamRange& r, const AdamRule<T, kDecay, kAmsgrad>& shared_rule) {
  const AdamRule<T, kDecay, kAmsgrad> rule = shared_rule;
  const auto loop = [&](T* pp, const T* gp, T* mp, T* vp, T* wp, std::int64_t n) {
    T* __restrict p = pp;
    const T* __restrict g = gp;
    T* __restrict m = mp;
    T* __restrict v = vp;
    if constexpr (kAmsgrad) {
      T* __restrict max_v = wp;
      for (std::int64_t i = 0; i < n; ++i) rule(p[i], g[i], m[i], v[i], max_v[i]);
    } else {
      T unused{};
      for (std::int64_t i = 0; i < n; ++i) rule(p[i], g[i], m[i], v[i], unused);
    }
  };
  const auto& s = r.spans;
  over<T>(s.param, s.master, s.grad, r.begin, r.end, loop, s.exp_avg, s.exp_avg_sq, s.max_exp_avg_sq);
}

template <class T, Decay kDecay>
void adam_of_decay(const AdamRange& r, const AdamScalars<T>& s) {
  if (r.spans.max_exp_avg_sq.data != nullptr) {
    adam_loop<T, kDecay, true>(r, {s});
  } else {
    adam_loop<T, kDecay, false>(r, {s});
  }
}

template <class T>
void adam_of_type(const AdamRange& r, const AdamArgs& args) {
  const AdamScalars<T> s = make_adam_scalars<T>(args);
  switch (decay_of(args)) {
    case Decay::none:
      return adam_of_decay<T, Decay::none>(r, s);
    case Decay::l2:
      return adam_of_decay<T, Decay::l2>(r, s);
    case Decay::decoupled:
      return adam_of_decay<T, Decay::decoupled>(r, s);
  }
}

void adam_range(const AdamRange& r, const AdamArgs& args) {
  if (r.spans.exp_avg.dtype == DType::f64) {
    adam_of_type<double>(r, args);
  } else {
    adam_of_type<float>(r, args);
  }
}

template <class T, Momentum kMomentum, bool kDecay>
void sgd_loop(const SgdRange& r, const SgdScalars<T>& s) {
  const SgdRule<T, kMomentum, kDecay> rule{s};
  const auto loop = [&](T* pp, const T* gp, T* bp, std::int64_t n) {
    T* __restrict p = pp;
    const T* __restrict g = gp;
    if constexpr (kMomentum == Momentum::none) {
      T unused{};
      for (std::int64_t i = 0; i < n; ++i) rule(p[i], g[i], unused);
    } else {
      T* __restrict buffer = bp;
      for (std::int64_t i = 0; i < n; ++i) rule(p[i], g[i], buffer[i]);
    }
  };
  const Span buffer = kMomentum == Momentum::none ? Span{} : r.spans.momentum_buffer;
  over<T>(r.spans.param, r.spans.master, r.spans.grad, r.begin, r.end, loop, buffer);
}

template <class T, Momentum kMomentum>
void sgd_of_momentum(const SgdRange& r, const SgdArgs& args) {
  const SgdScalars<T> s = make_sgd_scalars<T>(args);
  if (args.weight_decay != 0) {
    sgd_loop<T, kMomentum, true>(r, s);
  } else {
    sgd_loop<T, kMomentum, false>(r, s);
  }
}

template <class T>
void sgd_of_type(const SgdRange& r, const SgdArgs& args) {
  switch (momentum_of(args)) {
    case Momentum::none:
      return sgd_of_momentum<T, Momentum::none>(r, args);
    case Momentum::first:
      return sgd_of_momentum<T, Momentum::first>(r, args);
    case Momentum::heavy_ball:
      return sgd_of_momentum<T, Momentum::heavy_ball>(r, args);
    case Momentum::first_nesterov:
      return sgd_of_momentum<T, Momentum::first_nesterov>(r, args);
    case Momentum::nesterov:
      return sgd_of_momentum<T, Momentum::nesterov>(r, args);
  }
}

void sgd_range(const SgdRange& r, const SgdArgs& args) {
  if (r.spans.param.dtype == DType::f64) {
    sgd_of_type<double>(r, args);
  } else {
    sgd_of_type<float>(r, args);
  }
}

}  // namespace
}  // namespace zero::kernels
