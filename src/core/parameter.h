// The parameters that an optimizer manages, as the rest of the library sees them: one flat list over all groups.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "layout/layout.h"

namespace torch::optim {
class OptimizerParamGroup;
}

namespace zero {

struct Parameter {
  at::Tensor tensor;       ///< the user's own
  std::string name;        ///< "fc.weight (group 0, #2)", or without a name "parameter #2 of group 0"
  std::string plain_name;  ///< "fc.weight", or empty
  int group = 0;
  int index = 0;                    ///< within the group
  bool active = true;               ///< false: the user has taken it out of its group
  std::vector<std::int64_t> shape;  ///< when it was registered
  at::IntArrayRef sizes() const { return shape; }
  ParameterSpec spec() const;
};

/// The groups' parameters in order. @throws c10::Error naming the first that can't be optimized here: undefined, not a leaf, not a
/// float type, on another device than the first, sparse, or present twice.
/// @param name_of a user's name for the n-th parameter, or empty
std::vector<Parameter> list_parameters(const std::vector<torch::optim::OptimizerParamGroup>& groups,
                                       const std::function<std::string(const at::Tensor&, std::size_t)>& name_of);

/// Do the tensor's elements fill a block of memory without gaps or overlaps (in any order of dimensions)?
bool is_dense(const at::Tensor& t);

/// The strides in which the library counts a parameter's elements: its own if it is dense, row-major otherwise.
std::vector<std::int64_t> layout_strides(const at::Tensor& t);

/// The elements of a dense tensor in storage order, as a 1-D tensor over the same memory.
at::Tensor storage_order(const at::Tensor& t);

/// A tensor of its own (no autograd view: zero_grad() may detach_() it) over memory that `keep_alive` holds.
at::Tensor tensor_over(void* memory, std::shared_ptr<void> keep_alive, at::IntArrayRef sizes, at::IntArrayRef strides,
                       at::ScalarType dtype, c10::Device device = c10::Device(c10::kCPU));

/// "[3, 4]".
std::string to_string(at::IntArrayRef sizes);

}  // namespace zero
