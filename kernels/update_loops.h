// The loops of the optimizer update around update_rule.h, for one instruction set (isa_table.inc includes this). 16-bit
// parameters and gradients of another type than the state's are converted a small block at a time, which stays in the first-level
// cache, so there is one arithmetic loop per rule and accumulation type.
#pragma once

#include <type_traits>

#include "convert.h"
#include "table.h"
#include "update_rule.h"

namespace zero::kernels {
namespace {

/// Elements converted at a time. Measured: longer stages leave the state's streams idle for longer and cost bandwidth.
constexpr std::int64_t kStage = 256;

/// Element i of a span, as T.
template <class T>
inline T* at(Span s, std::int64_t i) {
  return static_cast<T*>(s.data) + i;
}

/// Elements [begin, begin + n) of a span as T, through `buffer` where they are of another type.
template <class T>
inline T* staged(Span s, std::int64_t begin, std::int64_t n, T* buffer) {
  T* result = buffer;
  with_type(s.dtype, [&](auto* type) {
    using E = std::remove_pointer_t<decltype(type)>;
    if constexpr (std::is_same_v<E, T>) {
      result = at<T>(s, begin);
    } else {
      load(buffer, at<const E>(s, begin), n);
    }
  });
  return result;
}

/// Writes what staged() put into `buffer` back; nothing to do where it handed out the memory itself.
template <class T>
inline void put_back(Span s, std::int64_t begin, std::int64_t n, const T* buffer) {
  if constexpr (std::is_same_v<T, float>) {
    if (s.dtype == DType::f16) store(at<Half>(s, begin), buffer, n);
    if (s.dtype == DType::bf16) store(at<BFloat16>(s, begin), buffer, n);
  }
}

/// Calls loop(param, grad, begin, n) over [begin, end) with both as T.
template <class T, class Loop>
inline void for_stages(Span param, Span grad, std::int64_t begin, std::int64_t end, Loop&& loop) {
  constexpr DType kType = std::is_same_v<T, float> ? DType::f32 : DType::f64;
  if (param.dtype == kType && grad.dtype == kType) {
    loop(at<T>(param, begin), at<const T>(grad, begin), begin, end - begin);
    return;
  }
  alignas(64) T param_buffer[kStage];
  alignas(64) T grad_buffer[kStage];
  for (std::int64_t i = begin; i < end; i += kStage) {
    const std::int64_t n = end - i < kStage ? end - i : kStage;
    T* p = staged(param, i, n, param_buffer);
    const T* g = staged(grad, i, n, grad_buffer);
    loop(p, g, i, n);
    put_back(param, i, n, param_buffer);
  }
}

template <class T, Decay kDecay, bool kAmsgrad>
void adam_loop(const AdamRange& r, const AdamRule<T, kDecay, kAmsgrad>& shared_rule) {
  const AdamRule<T, kDecay, kAmsgrad> rule = shared_rule;
  for_stages<T>(r.param, r.grad, r.begin, r.end, [&](T* pp, const T* gp, std::int64_t begin, std::int64_t n) {
    T* __restrict p = pp;
    const T* __restrict g = gp;
    T* __restrict m = at<T>(r.exp_avg, begin);
    T* __restrict v = at<T>(r.exp_avg_sq, begin);
    if constexpr (kAmsgrad) {
      T* __restrict max_v = at<T>(r.max_exp_avg_sq, begin);
      for (std::int64_t i = 0; i < n; ++i) rule(p[i], g[i], m[i], v[i], max_v[i]);
    } else {
      T unused{};
      for (std::int64_t i = 0; i < n; ++i) rule(p[i], g[i], m[i], v[i], unused);
    }
  });
}

template <class T, Decay kDecay>
void adam_of_decay(const AdamRange& r, const AdamScalars<T>& s) {
  if (r.max_exp_avg_sq.data != nullptr) {
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
  if (r.exp_avg.dtype == DType::f64) {
    adam_of_type<double>(r, args);
  } else {
    adam_of_type<float>(r, args);
  }
}

template <class T, Momentum kMomentum, bool kDecay>
void sgd_loop(const SgdRange& r, const SgdScalars<T>& s) {
  const SgdRule<T, kMomentum, kDecay> rule{s};
  for_stages<T>(r.param, r.grad, r.begin, r.end, [&](T* pp, const T* gp, std::int64_t begin, std::int64_t n) {
    T* __restrict p = pp;
    const T* __restrict g = gp;
    if constexpr (kMomentum == Momentum::none) {
      T unused{};
      for (std::int64_t i = 0; i < n; ++i) rule(p[i], g[i], unused);
    } else {
      T* __restrict buffer = at<T>(r.momentum_buffer, begin);
      for (std::int64_t i = 0; i < n; ++i) rule(p[i], g[i], buffer[i]);
    }
  });
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
  if (r.param.dtype == DType::f64) {
    sgd_of_type<double>(r, args);
  } else {
    sgd_of_type<float>(r, args);
  }
}

}  // namespace
}  // namespace zero::kernels
