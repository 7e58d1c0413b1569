// What is wrong with the tensors of a call? Used by the Communicator and ReduceQueue handles, before the backend sees them.
#pragma once

#include <ATen/core/Tensor.h>

#include <cmath>
#include <cstddef>
#include <string>

#include "comm/communicator_impl.h"
#include "core/check.h"

namespace zero {

/// @param device where the communicator works
inline std::string wrong_tensor(const at::Tensor& tensor, const char* name, c10::Device device) {
  if (!tensor.defined()) return detail::text(name, " is not defined");
  if (tensor.device() != device) {
    const auto where = detail::text(name, " is on ", tensor.device().str(), "; this communicator works on ");
    if (!device.is_cpu()) return detail::text(where, device.str());
    return detail::text(where, "the CPU: use zero::make_nccl_communicator() or zero::make_staged_communicator()");
  }
  if (tensor.layout() != at::kStrided) return detail::text(name, " is not a dense tensor");
  if (!tensor.is_contiguous()) return detail::text(name, " is not contiguous");
  return {};
}

// Describes tensors to the backend, or says what is wrong with them.
class Arguments {
 public:
  Arguments(const CommunicatorImpl& impl, Call& call) : impl_(impl), call_(call) {}

  void tensor(const at::Tensor& tensor, const char* name) {
    if (ok()) wrong_ = wrong_tensor(tensor, name, impl_.device());
  }

  // small × N elements, as large; they are apart, or small is this rank's slice of large.
  void slices(const at::Tensor& small, const char* small_name, const at::Tensor& large, const char* large_name) {
    tensor(small, small_name);
    tensor(large, large_name);
    if (!ok()) return;
    if (small.scalar_type() != large.scalar_type()) {
      wrong_ = detail::text(small_name, " is ", c10::toString(small.scalar_type()), " but ", large_name, " is ",
                            c10::toString(large.scalar_type()));
    } else if (small.numel() * impl_.size() != large.numel()) {
      wrong_ = detail::text(large_name, " must have ", impl_.size(), " (ranks) times the elements of ", small_name, ": has ",
                            large.numel(), ", not ", impl_.size(), " × ", small.numel());
    } else if (small.numel() > 0) {
      const auto* begin = static_cast<const char*>(large.const_data_ptr());
      const auto* part = static_cast<const char*>(small.const_data_ptr());
      const auto bytes = static_cast<std::ptrdiff_t>(small.nbytes());
      const bool apart = part + bytes <= begin || begin + bytes * impl_.size() <= part;
      if (!apart && part != begin + impl_.rank() * bytes) {
        wrong_ = detail::text(small_name, " overlaps ", large_name, " but is not this rank's slice of it");
      }
    }
  }

  // After slices(): not that slice either.
  void apart(const at::Tensor& small, const char* small_name, const at::Tensor& large, const char* large_name) {
    if (!ok() || small.numel() == 0) return;
    const auto offset = static_cast<const char*>(small.const_data_ptr()) - static_cast<const char*>(large.const_data_ptr());
    if (offset >= 0 && offset < static_cast<std::ptrdiff_t>(large.nbytes())) {
      wrong_ = detail::text(small_name, " lies inside ", large_name);
    }
  }

  // Numbers that are added.
  void sums(const at::Tensor& tensor, double divisor) {
    if (!ok()) return;
    using c10::ScalarType;
    call_.dtype = tensor.scalar_type();
    call_.count = tensor.numel() * (tensor.is_complex() ? 2 : 1);
    call_.divisor = divisor;
    switch (call_.dtype) {
      case ScalarType::Float:
      case ScalarType::ComplexFloat:
        call_.real = kernels::DType::f32;
        break;
      case ScalarType::Double:
      case ScalarType::ComplexDouble:
        call_.real = kernels::DType::f64;
        break;
      case ScalarType::Half:
      case ScalarType::ComplexHalf:
        call_.real = kernels::DType::f16;
        break;
      case ScalarType::BFloat16:
        call_.real = kernels::DType::bf16;
        break;
      default:
        wrong_ = detail::text("cannot add tensors of type ", c10::toString(call_.dtype));
        return;
    }
    call_.item_bytes = kernels::size_of(call_.real);
    if (divisor == 0 || std::isnan(divisor)) wrong_ = detail::text("divisor is ", divisor);
  }

  // Bytes that are moved.
  void moves(const at::Tensor& tensor) {
    if (!ok()) return;
    call_.dtype = tensor.scalar_type();
    call_.count = static_cast<std::int64_t>(tensor.nbytes());
  }

  bool ok() const { return wrong_.empty(); }
  void require(bool condition, const std::string& message) {
    if (ok() && !condition) wrong_ = message;
  }

  void check(CommunicatorImpl& impl) const {
    if (!ok()) impl.refuse(message());
  }
  std::string message() const {
    return detail::text(name_of(call_.op), call_.what[0] != '\0' ? detail::text(" '", call_.what, '\'') : std::string(), ": ",
                        wrong_);
  }

 private:
  const CommunicatorImpl& impl_;
  Call& call_;
  std::string wrong_;
};

}  // namespace zero
