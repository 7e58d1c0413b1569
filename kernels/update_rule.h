// The update rules of Adam, AdamW and SGD for one element: the only place where their formulas are written. The CPU loops
// (update_loops.h) call them once per element of a vectorised loop, a CUDA kernel calls them once per thread.
//
// The order of operations is that of LibTorch's C++ optimizers (torch/csrc/api/src/optim/{adam,adamw,sgd}.cpp) as ATen's
// element-wise kernels evaluate it, so in double the two agree to rounding over any number of steps. Scalars that depend on the
// step are computed in double on the host and rounded once (make_adam_scalars, make_sgd_scalars).
//
// For the same bits everywhere the compiler must not fuse a*b+c: -ffp-contract=off here, --fmad=false --prec-sqrt=true
// --prec-div=true for nvcc.
#pragma once

#include <cmath>

#include "host_device.h"
#include "kernels.h"

namespace zero::kernels {

ZERO_HOST_DEVICE float square_root(float x) {
#if defined(__CUDA_ARCH__)
  return ::sqrtf(x);
#else
  return __builtin_sqrtf(x);
#endif
}

ZERO_HOST_DEVICE double square_root(double x) {
#if defined(__CUDA_ARCH__)
  return ::sqrt(x);
#else
  return __builtin_sqrt(x);
#endif
}

/// How weight decay enters Adam's step.
enum class Decay { none, l2, decoupled };

/// Adam's scalars in the accumulation type T.
template <class T>
struct AdamScalars {
  T grad_scale;
  T decay;  ///< l2: weight_decay; decoupled: 1 - lr * weight_decay
  T beta1, one_minus_beta1;
  T beta2, one_minus_beta2;
  T sqrt_bias_correction2;
  T eps;
  T minus_step_size;  ///< -lr / bias_correction1
};

template <class T>
ZERO_HOST_DEVICE AdamScalars<T> make_adam_scalars(const AdamArgs& a) {
  const double bias_correction1 = 1 - std::pow(a.beta1, static_cast<double>(a.step));
  const double bias_correction2 = 1 - std::pow(a.beta2, static_cast<double>(a.step));
  AdamScalars<T> s;
  s.grad_scale = static_cast<T>(a.grad_scale);
  s.decay = static_cast<T>(a.decoupled ? 1 - a.lr * a.weight_decay : a.weight_decay);
  s.beta1 = static_cast<T>(a.beta1);
  s.one_minus_beta1 = static_cast<T>(1 - a.beta1);
  s.beta2 = static_cast<T>(a.beta2);
  s.one_minus_beta2 = static_cast<T>(1 - a.beta2);
  s.sqrt_bias_correction2 = static_cast<T>(std::sqrt(bias_correction2));
  s.eps = static_cast<T>(a.eps);
  s.minus_step_size = static_cast<T>(-(a.lr / bias_correction1));
  return s;
}

/// The decay of a call. Zero weight decay is a kind of its own: g + 0 * p would turn an infinite p into NaN.
ZERO_HOST_DEVICE Decay decay_of(const AdamArgs& a) {
  return a.weight_decay == 0 ? Decay::none : a.decoupled ? Decay::decoupled : Decay::l2;
}

/// One element's step of Adam or AdamW. max_v is read and written with amsgrad only. Where decay and amsgrad are constants, the
/// compiler leaves nothing of the others; a CUDA kernel looks them up per parameter.
template <class T>
ZERO_HOST_DEVICE void adam_element(const AdamScalars<T>& s, Decay decay, bool amsgrad, T& p, T g, T& m, T& v, T& max_v) {
  g = g * s.grad_scale;
  if (decay == Decay::l2) g = g + s.decay * p;
  if (decay == Decay::decoupled) p = p * s.decay;
  m = m * s.beta1 + s.one_minus_beta1 * g;
  v = v * s.beta2 + s.one_minus_beta2 * g * g;
  T second = v;
  if (amsgrad) {
    // As torch::max: NaN on either side wins.
    second = max_v >= v || max_v != max_v ? max_v : v;
    max_v = second;
  }
  const T denominator = square_root(second) / s.sqrt_bias_correction2 + s.eps;
  p = p + s.minus_step_size * m / denominator;
}

template <class T, Decay kDecay, bool kAmsgrad>
struct AdamRule {
  AdamScalars<T> s;

  ZERO_HOST_DEVICE void operator()(T& p, T g, T& m, T& v, T& max_v) const {
    adam_element(s, kDecay, kAmsgrad, p, g, m, v, max_v);
  }
};

/// SGD's scalars in the accumulation type T.
template <class T>
struct SgdScalars {
  T grad_scale;
  T weight_decay;
  T momentum;
  T one_minus_dampening;
  T minus_lr;
};

template <class T>
ZERO_HOST_DEVICE SgdScalars<T> make_sgd_scalars(const SgdArgs& a) {
  SgdScalars<T> s;
  s.grad_scale = static_cast<T>(a.grad_scale);
  s.weight_decay = static_cast<T>(a.weight_decay);
  s.momentum = static_cast<T>(a.momentum);
  s.one_minus_dampening = static_cast<T>(1 - a.dampening);
  s.minus_lr = static_cast<T>(-a.lr);
  return s;
}

/// What SGD does with its momentum buffer in a call.
enum class Momentum { none, first, heavy_ball, first_nesterov, nesterov };

ZERO_HOST_DEVICE Momentum momentum_of(const SgdArgs& a) {
  if (a.momentum == 0) return Momentum::none;
  if (a.first) return a.nesterov ? Momentum::first_nesterov : Momentum::first;
  return a.nesterov ? Momentum::nesterov : Momentum::heavy_ball;
}

/// One element's step of SGD. buffer is read and written with momentum only; a first step doesn't read it.
template <class T>
ZERO_HOST_DEVICE void sgd_element(const SgdScalars<T>& s, Momentum momentum, bool decay, T& p, T g, T& buffer) {
  g = g * s.grad_scale;
  if (decay) g = g + s.weight_decay * p;
  if (momentum == Momentum::first || momentum == Momentum::first_nesterov) buffer = g;
  if (momentum == Momentum::heavy_ball || momentum == Momentum::nesterov) {
    buffer = buffer * s.momentum + s.one_minus_dampening * g;
  }
  if (momentum == Momentum::first || momentum == Momentum::heavy_ball) g = buffer;
  if (momentum == Momentum::first_nesterov || momentum == Momentum::nesterov) g = g + s.momentum * buffer;
  p = p + s.minus_lr * g;
}

template <class T, Momentum kMomentum, bool kDecay>
struct SgdRule {
  SgdScalars<T> s;

  ZERO_HOST_DEVICE void operator()(T& p, T g, T& buffer) const { sgd_element(s, kMomentum, kDecay, p, g, buffer); }
};

}  // namespace zero::kernels
