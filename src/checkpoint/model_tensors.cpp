// The one file of checkpoints that needs torch/nn/module.h.
#include <torch/nn/module.h>

#include "core/check.h"
#include "zero/checkpoint.h"

namespace zero {

ModelTensors::ModelTensors(const torch::nn::Module& module) {
  for (const auto& item : module.named_parameters()) entries_.push_back({item.key(), item.value(), false});
  for (const auto& item : module.named_buffers())
    if (item.value().defined()) entries_.push_back({item.key(), item.value(), true});
}

ModelTensors::ModelTensors(const std::vector<std::pair<std::string, at::Tensor>>& parameters) {
  for (const auto& [name, tensor] : parameters) {
    ZERO_CHECK(tensor.defined(), "the tensor called '", name, "' is undefined");
    entries_.push_back({name, tensor, false});
  }
}

}  // namespace zero
