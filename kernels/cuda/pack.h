// Packs: V elements that a thread loads and stores at once, 16 bytes of the widest type of its kernel.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>

#include "../float16.h"
#include "place.h"

namespace zero::kernels::cuda {

template <class E, int V>
struct alignas(sizeof(E) * V) Pack {
  E e[V];
};

/// Elements of a pack for which the widest of the types fills 16 bytes.
template <class... E>
constexpr int kPackOf = [] {
  std::size_t widest = 1;
  ((widest = sizeof(E) > widest ? sizeof(E) : widest), ...);
  return static_cast<int>(16 / widest);
}();

/// A device faults on a pack that isn't where it can be loaded at once; a host, which is a test, is told.
ZERO_HOST_DEVICE void require_aligned(const void* at, std::size_t bytes) {
#if defined(__CUDA_ARCH__)
  static_cast<void>(at), static_cast<void>(bytes);
#else
  if (reinterpret_cast<std::uintptr_t>(at) % bytes != 0) throw std::logic_error("a pack isn't aligned");
#endif
}

/// V elements from `from`: one load where it is aligned to all of them.
template <int V, class E>
ZERO_HOST_DEVICE Pack<E, V> load_pack(const E* from, bool aligned) {
  if (aligned) {
    require_aligned(from, sizeof(Pack<E, V>));
    return *reinterpret_cast<const Pack<E, V>*>(from);
  }
  Pack<E, V> pack;
  ZERO_UNROLL
  for (int k = 0; k < V; ++k) pack.e[k] = from[k];
  return pack;
}

#if defined(__CUDA_ARCH__)
/// One store of a pack of 4, 8 or 16 bytes. Left to nvcc, the aligned and the element-wise way of storing become one: the latter.
template <class P>
__device__ __forceinline__ void store_words(void* to, const P& pack) {
  std::uint32_t w[sizeof(P) / 4];
  memcpy(w, &pack, sizeof w);
  const std::size_t global = __cvta_generic_to_global(to);
  if constexpr (sizeof(P) == 16) {
    asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(global), "r"(w[0]), "r"(w[1]), "r"(w[2]), "r"(w[3])
                 : "memory");
  } else if constexpr (sizeof(P) == 8) {
    asm volatile("st.global.v2.b32 [%0], {%1, %2};" ::"l"(global), "r"(w[0]), "r"(w[1]) : "memory");
  } else {
    static_assert(sizeof(P) == 4, "a pack has up to 16 bytes");
    asm volatile("st.global.b32 [%0], %1;" ::"l"(global), "r"(w[0]) : "memory");
  }
}
#endif

template <int V, class E>
ZERO_HOST_DEVICE void store_pack(E* to, const Pack<E, V>& pack, bool aligned) {
  if (aligned) {
    require_aligned(to, sizeof pack);
#if defined(__CUDA_ARCH__)
    if constexpr (sizeof pack % 4 == 0) return store_words(to, pack);
#endif
    *reinterpret_cast<Pack<E, V>*>(to) = pack;
    return;
  }
  ZERO_UNROLL
  for (int k = 0; k < V; ++k) to[k] = pack.e[k];
}

}  // namespace zero::kernels::cuda
