// A tensor's memory that comes and goes: storages are repointed, never exchanged, so that every view, alias and saved tensor follows.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/DispatchKey.h>
#include <c10/core/StorageImpl.h>

#include <memory>
#include <string>

namespace zero {

/// The dispatch key that paged tensors carry: operators on them reach our fallback first (src/paging/fault.h). It is one that
/// LibTorch keeps for tests; if a program needs it for itself, another one without a kernel of its own (DeferredInit) goes here.
inline constexpr c10::DispatchKey kPagedKey = c10::DispatchKey::TESTING_ONLY_GenericWrapper;

/// A tensor of its own (no autograd view, no memory yet) that carries the key: released, see below.
at::Tensor make_paged_tensor(at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType dtype, const std::string& message,
                             c10::Device device = c10::Device(c10::kCPU));

/// The tensor over the same storage, with or without the key: for set_data(), since a tensor's keys can't be changed. Views and
/// saved tensors that are made of a tensor with the key carry it.
at::Tensor with_key(const at::Tensor& tensor);
at::Tensor without_key(const at::Tensor& tensor);

/// From now on the storage has no memory, and whoever asks for its raw pointer gets a c10::Error with `message`.
void release_storage(c10::StorageImpl& storage, const std::string& message);

/// The storage's memory is here; `keep` holds it.
void place_storage(c10::StorageImpl& storage, void* memory, std::shared_ptr<void> keep);

/// Gives a placed storage memory of its own with the values it has.
void detach_storage(c10::StorageImpl& storage);

bool is_released(const c10::StorageImpl& storage);

}  // namespace zero
