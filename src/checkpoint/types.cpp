#include "checkpoint/types.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>

#include <array>
#include <cstring>
#include <utility>

#include "core/check.h"
#include "core/parameter.h"

namespace zero::checkpoint {
namespace {

constexpr std::int64_t kSmall = 4096;  // bytes of a tensor that goes into the manifest

constexpr std::array<std::pair<at::ScalarType, const char*>, 13> kTypes{{{at::kBool, "BOOL"},
                                                                         {at::kByte, "U8"},
                                                                         {at::kChar, "I8"},
                                                                         {at::kFloat8_e5m2, "F8_E5M2"},
                                                                         {at::kFloat8_e4m3fn, "F8_E4M3"},
                                                                         {at::kShort, "I16"},
                                                                         {at::kHalf, "F16"},
                                                                         {at::kBFloat16, "BF16"},
                                                                         {at::kInt, "I32"},
                                                                         {at::kFloat, "F32"},
                                                                         {at::kLong, "I64"},
                                                                         {at::kDouble, "F64"},
                                                                         {at::kComplexFloat, "C64"}}};

}  // namespace

std::string dtype_name(at::ScalarType type) {
  if (type == at::kComplexDouble) return "C128";
  for (const auto& [known, name] : kTypes)
    if (known == type) return name;
  ZERO_FAIL("checkpoints have no type ", type);
}

at::ScalarType scalar_type(const std::string& dtype) {
  if (dtype == "C128") return at::kComplexDouble;
  for (const auto& [type, name] : kTypes)
    if (dtype == name) return type;
  ZERO_FAIL("LibTorch has no type ", dtype);
}

TensorEntry entry_of(const std::string& kind, const std::string& name, const std::string& field, at::ScalarType type,
                     at::IntArrayRef sizes, at::IntArrayRef strides) {
  return {kind, name, field, dtype_name(type), sizes.vec(), strides.vec(), {}};
}

TensorEntry entry_of(const std::string& kind, const std::string& name, const std::string& field, const at::Tensor& tensor) {
  return entry_of(kind, name, field, tensor.scalar_type(), tensor.sizes(), layout_strides(tensor));
}

Scalar to_scalar(const c10::IValue& value, const std::string& what) {
  if (value.isBool()) return value.toBool();
  if (value.isInt()) return value.toInt();
  if (value.isDouble()) return value.toDouble();
  if (value.isString()) return value.toStringRef();
  if (value.isTensor()) {
    const auto t = value.toTensor().detach().cpu().contiguous();
    ZERO_CHECK(static_cast<std::int64_t>(t.nbytes()) <= kSmall, what, " is a tensor of ", t.sizes(),
               ", neither a number per element of what this rank keeps nor small: it can't be cut for other numbers of ranks");
    return Blob{dtype_name(t.scalar_type()), t.sizes().vec(),
                std::string(static_cast<const char*>(t.const_data_ptr()), t.nbytes())};
  }
  ZERO_FAIL(what, " is of a kind (", value.tagKind(), ") that checkpoints don't have");
}

c10::IValue to_ivalue(const Scalar& scalar) {
  struct Visitor {
    c10::IValue operator()(bool x) const { return x; }
    c10::IValue operator()(std::int64_t x) const { return x; }
    c10::IValue operator()(double x) const { return x; }
    c10::IValue operator()(const std::string& x) const { return x; }
    c10::IValue operator()(const Blob& x) const {
      auto t = at::empty(x.shape, scalar_type(x.dtype));
      ZERO_CHECK(t.nbytes() == x.bytes.size(), "a small tensor of the manifest has ", x.bytes.size(), " bytes instead of ",
                 t.nbytes());
      if (t.nbytes() > 0) std::memcpy(t.mutable_data_ptr(), x.bytes.data(), x.bytes.size());
      return t;
    }
  };
  return std::visit(Visitor{}, scalar);
}

at::Tensor flat_in(const at::Tensor& tensor, at::IntArrayRef strides) {
  const auto t = tensor.detach();
  if (t.strides() == strides || (t.dim() <= 1 && t.is_contiguous())) return storage_order(t);
  auto ordered = at::empty_strided(t.sizes(), strides, t.options());
  ordered.copy_(t);
  return storage_order(ordered);
}

}  // namespace zero::checkpoint
