// Between LibTorch's types and the format's.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <string>
#include <vector>

#include "checkpoint/manifest.h"

namespace zero::checkpoint {

/// "F32". @throws c10::Error for a type that the format doesn't have
std::string dtype_name(at::ScalarType type);
at::ScalarType scalar_type(const std::string& dtype);

/// An entry without fragments.
TensorEntry entry_of(const std::string& kind, const std::string& name, const std::string& field, at::ScalarType type,
                     at::IntArrayRef sizes, at::IntArrayRef strides);
/// Of a tensor, in the strides in which the library counts its elements.
TensorEntry entry_of(const std::string& kind, const std::string& name, const std::string& field, const at::Tensor& tensor);

/// What is there once per parameter. @throws c10::Error for anything but numbers, texts and small tensors
Scalar to_scalar(const c10::IValue& value, const std::string& what);
c10::IValue to_ivalue(const Scalar& scalar);

/// The elements of `tensor` as a 1-D tensor in the order of dense `strides`: over its own memory if it has them, else a copy.
at::Tensor flat_in(const at::Tensor& tensor, at::IntArrayRef strides);

}  // namespace zero::checkpoint
