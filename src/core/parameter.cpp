#include "core/parameter.h"

#include <ATen/ops/from_blob.h>
#include <torch/optim/optimizer.h>

#include <sstream>
#include <unordered_map>

#include "core/check.h"

namespace zero {

std::string to_string(at::IntArrayRef sizes) {
  std::ostringstream out;
  out << sizes;
  return out.str();
}

ParameterSpec Parameter::spec() const {
  ParameterSpec s;
  s.numel = tensor.numel();
  s.itemsize = static_cast<int>(tensor.element_size());
  s.group = group;
  s.dtype = static_cast<int>(tensor.scalar_type());
  s.device = static_cast<int>(tensor.device().type());
  return s;
}

bool is_dense(const at::Tensor& t) { return t.is_non_overlapping_and_dense(); }

std::vector<std::int64_t> layout_strides(const at::Tensor& t) {
  if (is_dense(t)) return t.strides().vec();
  std::vector<std::int64_t> strides(t.dim());
  std::int64_t next = 1;
  for (auto d = t.dim(); d-- > 0; next *= t.size(d)) strides[d] = next;
  return strides;
}

at::Tensor storage_order(const at::Tensor& t) {
  return tensor_over(t.data_ptr(), std::make_shared<at::Tensor>(t), {t.numel()}, {1}, t.scalar_type(), t.device());
}

at::Tensor tensor_over(void* memory, std::shared_ptr<void> keep_alive, at::IntArrayRef sizes, at::IntArrayRef strides,
                       at::ScalarType dtype, c10::Device device) {
  return at::from_blob(
      memory, sizes, strides, [keep = std::move(keep_alive)](void*) mutable { keep.reset(); },
      at::TensorOptions().dtype(dtype).device(device), device);
}

std::vector<Parameter> list_parameters(const std::vector<torch::optim::OptimizerParamGroup>& groups,
                                       const std::function<std::string(const at::Tensor&, std::size_t)>& name_of) {
  std::vector<Parameter> out;
  std::unordered_map<const void*, std::size_t> seen;
  for (std::size_t g = 0; g < groups.size(); ++g) {
    for (std::size_t i = 0; i < groups[g].params().size(); ++i) {
      Parameter p;
      p.tensor = groups[g].params()[i];
      p.group = static_cast<int>(g);
      p.index = static_cast<int>(i);
      std::ostringstream name;
      p.plain_name = name_of(p.tensor, out.size());
      if (!p.plain_name.empty()) {
        name << '\'' << p.plain_name << "' (group " << g << ", #" << i << ')';
      } else {
        name << "parameter #" << i << " of group " << g;
      }
      p.name = name.str();
      const auto& t = p.tensor;
      ZERO_CHECK(t.defined(), p.name, " is an undefined tensor");
      ZERO_CHECK(t.layout() == at::kStrided, p.name, " is not a dense (strided) tensor; sparse parameters are not supported");
      ZERO_CHECK(t.is_floating_point() || t.is_complex(), p.name, " has type ", t.scalar_type(),
                 "; only floating point and complex parameters can be optimized");
      ZERO_CHECK(t.is_leaf(), p.name,
                 " is not a leaf tensor: it is the result of an operation, so optimizing it would change nothing");
      const auto& first_device = out.empty() ? t.device() : out.front().tensor.device();
      ZERO_CHECK(
          t.device() == first_device, p.name, " is on ", t.device(), ", but ", out.front().name, " is on ", first_device,
          "; an optimizer works on one device: move the model there before it is made, or make an optimizer for each device");
      p.shape = t.sizes().vec();
      const auto [it, is_new] = seen.emplace(t.unsafeGetTensorImpl(), out.size());
      if (!is_new) {
        const auto& first = out[it->second];
        // LibTorch itself lets a tensor stand twice in one group and updates it twice; across groups it has two sets of options.
        ZERO_CHECK(false, p.name, " is the same tensor as ", first.name, "; give each tensor to the optimizer once");
      }
      out.push_back(std::move(p));
    }
  }
  ZERO_CHECK(!out.empty(), "no parameters to optimize: the groups are empty");
  return out;
}

}  // namespace zero
