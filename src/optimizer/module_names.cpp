#include <torch/nn/module.h>

#include "optimizer/impl.h"

namespace zero {

void read_module(const torch::nn::Module& module, std::unordered_map<const void*, std::string>& names,
                 std::vector<at::Tensor>& buffers) {
  for (const auto& item : module.named_parameters()) names.emplace(item.value().unsafeGetTensorImpl(), item.key());
  for (const auto& buffer : module.buffers()) buffers.push_back(buffer);
}

}  // namespace zero
