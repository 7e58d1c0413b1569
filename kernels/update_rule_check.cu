// Compiles the update rule for CUDA devices: each rule as the one-thread-per-element kernel that will call it. Nothing links
// these; what they prove is that update_rule.h is device code.
#include "kernels/update_rule.h"

namespace zero::kernels {
namespace {

template <class T, class Rule>
__global__ void adam_check(T* p, const T* g, T* m, T* v, T* max_v, std::int64_t n, Rule rule) {
  const std::int64_t i = blockIdx.x * static_cast<std::int64_t>(blockDim.x) + threadIdx.x;
  if (i < n) rule(p[i], g[i], m[i], v[i], max_v[i]);
}

template <class T, class Rule>
__global__ void sgd_check(T* p, const T* g, T* buffer, std::int64_t n, Rule rule) {
  const std::int64_t i = blockIdx.x * static_cast<std::int64_t>(blockDim.x) + threadIdx.x;
  if (i < n) rule(p[i], g[i], buffer[i]);
}

}  // namespace

template <class T>
void instantiate_update_rules() {
  adam_check<<<1, 1>>>((T*)nullptr, (const T*)nullptr, (T*)nullptr, (T*)nullptr, (T*)nullptr, 0,
                       AdamRule<T, Decay::decoupled, true>{make_adam_scalars<T>({})});
  adam_check<<<1, 1>>>((T*)nullptr, (const T*)nullptr, (T*)nullptr, (T*)nullptr, (T*)nullptr, 0,
                       AdamRule<T, Decay::l2, false>{make_adam_scalars<T>({})});
  sgd_check<<<1, 1>>>((T*)nullptr, (const T*)nullptr, (T*)nullptr, 0,
                      SgdRule<T, Momentum::nesterov, true>{make_sgd_scalars<T>({})});
}

template void instantiate_update_rules<float>();
template void instantiate_update_rules<double>();

}  // namespace zero::kernels
