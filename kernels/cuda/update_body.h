// The fused update of Adam, AdamW and SGD on a shard: one thread's work. One launch does a whole shard, whatever parameters, groups
// and step counts are in it; learning rates, factors, step numbers and the decision to skip come from device memory (step.h), so
// the host waits for nothing and a CUDA graph can hold the launch.
//
// Types are the template's; what differs between parameters (decay, amsgrad, momentum) is a branch that all threads of a tile take
// alike, which costs a memory-bound kernel nothing.
#pragma once

#include <type_traits>

#include "pack.h"
#include "step.h"
#include "walk.h"

namespace zero::kernels::cuda {

/// T: the arithmetic; P, G, S: parameter, gradient, moments.
template <class T_, class P_, class G_, class S_, bool kMaster_>
struct UpdateTypes {
  using T = T_;
  using P = P_;
  using G = G_;
  using S = S_;
  static constexpr bool kMaster = kMaster_;
};

/// What both updates have.
template <class Types, class Plan>
struct UpdateStreams {
  using T = typename Types::T;
  using P = typename Types::P;

  P* param;
  const typename Types::G* grad;
  float* master;
  const Plan* plans;
  const std::int32_t* skip;  ///< StepRecord::skip, or null
  SegmentTable table;
  Alignment alignment;

  /// A stream is number k of align_packs()'s list; constants, where all are aligned.
  template <bool kAligned>
  ZERO_HOST_DEVICE bool aligned(int stream) const {
    return kAligned || (alignment.aligned >> stream & 1u) != 0;
  }
};

/// The value that an element's step starts from, in the type of the arithmetic.
template <class Types, int V>
ZERO_HOST_DEVICE typename Types::T start_from(const Pack<typename Types::P, V>& p, const Pack<float, V>& master, int k) {
  if constexpr (Types::kMaster) {
    return start_of(p.e[k], master.e[k]);
  } else {
    return static_cast<typename Types::T>(widen(p.e[k]));
  }
}

/// Blocks that a multiprocessor is to hold, for kernels that read so many bytes per element. A thread holds eight elements of each
/// stream, so bytes are registers: 64, 80, 128 and 255 per thread are allowed, which is where nothing spills. (Adam with a fifth
/// stream needs 80 even where its elements are small: unpacked, each takes a register.) Either way 60 KB and more are asked for at
/// a time on each multiprocessor, which is more than it takes to hide the memory's latency.
constexpr int blocks_for(std::size_t bytes, bool five_streams) {
  return bytes <= 16 && !five_streams ? 4 : bytes <= 18 ? 3 : bytes <= 32 ? 2 : 1;
}

template <class Types, bool kAmsgrad>
struct AdamBody : UpdateStreams<Types, AdamPlan<typename Types::T>> {
  using T = typename Types::T;
  using P = typename Types::P;
  using G = typename Types::G;
  using S = typename Types::S;
  static constexpr bool kMaster = Types::kMaster;
  static constexpr int kPack = kPackOf<P, G, S, std::conditional_t<kMaster, float, P>>;
  static constexpr int kBlocksPerMultiprocessor =
      blocks_for(sizeof(P) + sizeof(G) + (2 + kAmsgrad) * sizeof(S) + (kMaster ? sizeof(float) : 0), kMaster || kAmsgrad);

  S *exp_avg, *exp_avg_sq, *max_exp_avg_sq;

  ZERO_HOST_DEVICE void operator()(Place at) const {
    if (this->skip != nullptr && *this->skip != 0) return;
    walk<kPack>(this->table, this->alignment, at, *this);
  }

  template <int V, int U, bool kAligned>
  ZERO_HOST_DEVICE void visit(std::int64_t first, int stride, const Segment& segment) const {
    const AdamPlan<T> plan = this->plans[segment.entry];
    if (plan.active == 0) return;
    const bool amsgrad = kAmsgrad && plan.amsgrad != 0;
    Pack<P, V> p[U];
    Pack<G, V> g[U];
    Pack<S, V> m[U], v[U], w[U];
    Pack<float, V> full[U];
    // All loads come first: the first use waits for the first one only. Unconditional: under a condition the compiler gives up wide
    // accesses, and what isn't used here is used in almost no shard.
    ZERO_UNROLL
    for (int u = 0; u < U; ++u) {
      const std::int64_t i = first + u * stride;
      p[u] = load_pack<V>(this->param + i, this->template aligned<kAligned>(0));
      g[u] = load_pack<V>(this->grad + i, this->template aligned<kAligned>(1));
      m[u] = load_pack<V>(exp_avg + i, this->template aligned<kAligned>(2));
      v[u] = load_pack<V>(exp_avg_sq + i, this->template aligned<kAligned>(3));
      if constexpr (kAmsgrad) w[u] = load_pack<V>(max_exp_avg_sq + i, this->template aligned<kAligned>(4));
      if constexpr (kMaster) full[u] = load_pack<V>(this->master + i, this->template aligned<kAligned>(5));
    }
    ZERO_UNROLL
    for (int u = 0; u < U; ++u) {
      ZERO_UNROLL
      for (int k = 0; k < V; ++k) {
        T value = start_from<Types>(p[u], full[u], k);
        T mean = widen(m[u].e[k]), square = widen(v[u].e[k]), most = 0;
        if constexpr (kAmsgrad) most = widen(w[u].e[k]);
        adam_element<T>(plan.scalars, plan.decay, amsgrad, value, widen(g[u].e[k]), mean, square, most);
        if constexpr (kMaster) full[u].e[k] = value;
        narrow(&p[u].e[k], value);
        narrow(&m[u].e[k], mean);
        narrow(&v[u].e[k], square);
        if constexpr (kAmsgrad) narrow(&w[u].e[k], most);
      }
      const std::int64_t i = first + u * stride;
      store_pack(this->param + i, p[u], this->template aligned<kAligned>(0));
      store_pack(exp_avg + i, m[u], this->template aligned<kAligned>(2));
      store_pack(exp_avg_sq + i, v[u], this->template aligned<kAligned>(3));
      if (amsgrad) store_pack(max_exp_avg_sq + i, w[u], this->template aligned<kAligned>(4));
      if constexpr (kMaster) store_pack(this->master + i, full[u], this->template aligned<kAligned>(5));
    }
  }
};

/// kBuffer: there is a momentum buffer, for some parameter of the shard.
template <class Types, bool kBuffer>
struct SgdBody : UpdateStreams<Types, SgdPlan<typename Types::T>> {
  using T = typename Types::T;
  using P = typename Types::P;
  using G = typename Types::G;
  using S = typename Types::S;
  static constexpr bool kMaster = Types::kMaster;
  static constexpr int kPack = kPackOf<P, G, std::conditional_t<kBuffer, S, P>, std::conditional_t<kMaster, float, P>>;
  static constexpr int kBlocksPerMultiprocessor =
      blocks_for(sizeof(P) + sizeof(G) + (kBuffer ? sizeof(S) : 0) + (kMaster ? sizeof(float) : 0), false);

  S* momentum_buffer;

  ZERO_HOST_DEVICE void operator()(Place at) const {
    if (this->skip != nullptr && *this->skip != 0) return;
    walk<kPack>(this->table, this->alignment, at, *this);
  }

  template <int V, int U, bool kAligned>
  ZERO_HOST_DEVICE void visit(std::int64_t first, int stride, const Segment& segment) const {
    const SgdPlan<T> plan = this->plans[segment.entry];
    if (plan.active == 0) return;
    Pack<P, V> p[U];
    Pack<G, V> g[U];
    Pack<S, V> b[U];
    Pack<float, V> full[U];
    ZERO_UNROLL
    for (int u = 0; u < U; ++u) {
      const std::int64_t i = first + u * stride;
      p[u] = load_pack<V>(this->param + i, this->template aligned<kAligned>(0));
      g[u] = load_pack<V>(this->grad + i, this->template aligned<kAligned>(1));
      if constexpr (kBuffer) b[u] = load_pack<V>(momentum_buffer + i, this->template aligned<kAligned>(2));
      if constexpr (kMaster) full[u] = load_pack<V>(this->master + i, this->template aligned<kAligned>(3));
    }
    ZERO_UNROLL
    for (int u = 0; u < U; ++u) {
      ZERO_UNROLL
      for (int k = 0; k < V; ++k) {
        T value = start_from<Types>(p[u], full[u], k), buffer = 0;
        if constexpr (kBuffer) buffer = widen(b[u].e[k]);
        sgd_element<T>(plan.scalars, kBuffer ? plan.momentum : Momentum::none, plan.decay != 0, value, widen(g[u].e[k]),
                       buffer);
        if constexpr (kMaster) full[u].e[k] = value;
        narrow(&p[u].e[k], value);
        if constexpr (kBuffer) narrow(&b[u].e[k], buffer);
      }
      const std::int64_t i = first + u * stride;
      store_pack(this->param + i, p[u], this->template aligned<kAligned>(0));
      if constexpr (kBuffer) {
        if (plan.momentum != Momentum::none) store_pack(momentum_buffer + i, b[u], this->template aligned<kAligned>(2));
      }
      if constexpr (kMaster) store_pack(this->master + i, full[u], this->template aligned<kAligned>(3));
    }
  }
};

}  // namespace zero::kernels::cuda
