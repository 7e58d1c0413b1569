#include "paging/storage.h"

#include <c10/core/Allocator.h>

#include <utility>

#include "core/check.h"
#include "core/memory.h"
#include "paging/fault.h"

namespace zero {
namespace {

// LibTorch lets anybody arm a storage's refusal of raw pointers, and nobody disarm it. Access checks don't apply to the arguments of an
// explicit instantiation, so this one hands out the private member without touching the class.
using Flag = bool c10::StorageImpl::*;
Flag refuses_pointers();
template <Flag member>
struct Reach {
  friend Flag refuses_pointers() { return member; }
};
template struct Reach<&c10::StorageImpl::throw_on_immutable_data_ptr_>;

}  // namespace

at::Tensor make_paged_tensor(at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType dtype, const std::string& message,
                             c10::Device device) {
  // Nothing else names the fallback: a program linked with the library's archive would have tensors with the key and without it.
  (void)faults_seen();
  std::int64_t last = 0;
  bool empty = false;
  for (std::size_t d = 0; d < sizes.size(); ++d) {
    empty = empty || sizes[d] == 0;
    last += (sizes[d] - 1) * strides[d];
  }
  const auto backend = device.is_cpu() ? c10::DispatchKey::CPU : c10::DispatchKey::CUDA;
  const auto meta = c10::scalarTypeToTypeMeta(dtype);
  const auto bytes = empty ? 0 : (last + 1) * static_cast<std::int64_t>(meta.itemsize());
  auto storage = c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), c10::SymInt(bytes),
                                                       c10::DataPtr(nullptr, device), c10::GetAllocator(device.type()),
                                                       /*resizable=*/false);
  release_storage(*storage, message);
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(std::move(storage)),
                                                         c10::DispatchKeySet(backend).add(kPagedKey), meta);
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides);
  return tensor;
}

namespace {

at::Tensor over_same_storage(const at::Tensor& tensor, c10::DispatchKeySet keys) {
  auto out = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(tensor.storage()), keys, tensor.dtype());
  out.unsafeGetTensorImpl()->set_storage_offset(tensor.storage_offset());
  out.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides());
  return out;
}

}  // namespace

at::Tensor with_key(const at::Tensor& tensor) {
  (void)faults_seen();  // see make_paged_tensor
  return over_same_storage(tensor, tensor.key_set().add(kPagedKey));
}

at::Tensor without_key(const at::Tensor& tensor) { return over_same_storage(tensor, tensor.key_set().remove(kPagedKey)); }

void release_storage(c10::StorageImpl& storage, const std::string& message) {
  storage.set_data_ptr_noswap(c10::DataPtr(nullptr, storage.device()));
  storage.release_data_and_set_meta_custom_data_ptr_error_msg_(message);
}

void place_storage(c10::StorageImpl& storage, void* memory, std::shared_ptr<void> keep) {
  storage.*refuses_pointers() = false;
  using Keep = std::shared_ptr<void>;
  storage.set_data_ptr_noswap(c10::DataPtr(
      memory, new Keep(std::move(keep)), [](void* context) { delete static_cast<Keep*>(context); }, storage.device()));
}

void detach_storage(c10::StorageImpl& storage) {
  ZERO_CHECK(!is_released(storage), "a released storage has no values to keep");
  auto own = c10::GetAllocator(storage.device_type())->allocate(storage.nbytes());
  copy_bytes(own.get(), storage.data(), static_cast<std::int64_t>(storage.nbytes()), storage.device());
  storage.set_data_ptr_noswap(std::move(own));
}

bool is_released(const c10::StorageImpl& storage) { return storage.*refuses_pointers(); }

}  // namespace zero
