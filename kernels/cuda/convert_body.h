// Conversion, scaling and accumulation of flat memory: out = in × factor, or out += in × factor, for any two float types. In float, or
// in double where either type is; rounded to the output's type (a double that becomes 16 bits by way of float, as LibTorch's do).
#pragma once

#include <type_traits>

#include "alignment.h"
#include "pack.h"

namespace zero::kernels::cuda {

template <class To, class From>
struct ConvertBody {
  using T = std::conditional_t<(sizeof(To) == 8 || sizeof(From) == 8), double, float>;
  static constexpr int kPack = kPackOf<To, From>;
  static constexpr int kPacks = kPack == 8 ? 2 : 4;         ///< that a thread has in flight
  static constexpr int kRound = kThreads * kPack * kPacks;  ///< elements of a block at a time
  static constexpr int kBlocksPerMultiprocessor = 4;

  To* out;  ///< may be `in` where the types are the same
  const From* in;
  std::int64_t n;
  double factor;
  const double* device_factor;  ///< multiplies too, where it isn't null
  bool add;
  Alignment alignment;

  /// Blocks that have something to do.
  std::int64_t work() const { return n <= 0 ? 0 : (n - alignment.origin + kRound - 1) / kRound; }

  template <int V, int U>
  ZERO_HOST_DEVICE void convert(std::int64_t first, std::int64_t stride, T by, bool out_aligned, bool in_aligned) const {
    Pack<From, V> x[U];
    Pack<To, V> y[U];
    ZERO_UNROLL
    for (int u = 0; u < U; ++u) {
      x[u] = load_pack<V>(in + first + u * stride, in_aligned);
      if (add) y[u] = load_pack<V>(out + first + u * stride, out_aligned);
    }
    ZERO_UNROLL
    for (int u = 0; u < U; ++u) {
      ZERO_UNROLL
      for (int k = 0; k < V; ++k) {
        T value = static_cast<T>(widen(x[u].e[k])) * by;
        if (add) value = static_cast<T>(widen(y[u].e[k])) + value;
        narrow_to(&y[u].e[k], value);
      }
      store_pack(out + first + u * stride, y[u], out_aligned);
    }
  }

  /// Packs of an origin before 0 and behind n are cut; all others go kPacks at a time where both streams are aligned.
  ZERO_HOST_DEVICE void operator()(Place at) const {
    const T by = static_cast<T>(device_factor == nullptr ? factor : factor * *device_factor);
    const bool out_aligned = (alignment.aligned & 1u) != 0, in_aligned = (alignment.aligned & 2u) != 0;
    ZERO_NO_UNROLL
    for (std::int64_t begin = alignment.origin + std::int64_t{kRound} * at.block; begin < n;
         begin += std::int64_t{kRound} * at.blocks) {
      const std::int64_t first = begin + at.thread * kPack;
      const std::int64_t stride = std::int64_t{kThreads} * kPack;
      if (alignment.all && begin >= 0 && begin + kRound <= n) {
        convert<kPack, kPacks>(first, stride, by, true, true);
        continue;
      }
      ZERO_NO_UNROLL
      for (int u = 0; u < kPacks; ++u) {
        const std::int64_t i = first + u * stride;
        if (i >= 0 && i + kPack <= n) {
          convert<kPack, 1>(i, 0, by, out_aligned, in_aligned);
          continue;
        }
        ZERO_NO_UNROLL
        for (std::int64_t k = i < 0 ? 0 : i; k < i + kPack && k < n; ++k) convert<1, 1>(k, 0, by, false, false);
      }
    }
  }

 private:
  static ZERO_HOST_DEVICE void narrow_to(double* to, double x) { *to = x; }
  static ZERO_HOST_DEVICE void narrow_to(float* to, double x) { *to = static_cast<float>(x); }
  template <class E, class X>
  static ZERO_HOST_DEVICE void narrow_to(E* to, X x) {
    narrow(to, static_cast<float>(x));
  }
};

}  // namespace zero::kernels::cuda
