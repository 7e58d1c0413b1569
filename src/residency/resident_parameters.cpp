#include "residency/resident_parameters.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_strided.h>

#include <memory>

#include "core/check.h"
#include "core/memory.h"
#include "paging/storage.h"

namespace zero {

bool owns_storage(const at::Tensor& t) {
  const auto& storage = t.storage();
  return is_dense(t) && t.storage_offset() == 0 && storage.nbytes() == t.nbytes() && t.numel() > 0 &&
         storage.unsafeGetStorageImpl()->resizable();
}

ResidentParameters::ResidentParameters(Communicator comm, const std::vector<Parameter>& parameters, const Layout& layout,
                                       bool flat)
    : comm_(std::move(comm)), parameters_(parameters), layout_(layout), flat_(flat) {}

void ResidentParameters::allocate() {
  if (!flat_) return;
  for (std::size_t s = arenas_.size(); s < layout_.spaces().size(); ++s) {
    const auto& space = layout_.spaces()[s];
    arenas_.push_back(comm_.allocate(space.size * space.itemsize, "parameters of group " + std::to_string(space.group)));
  }
}

bool ResidentParameters::moved(int parameter) const {
  if (parameter >= static_cast<int>(entries_.size()) || !entries_[parameter].storage) return false;
  const auto& tensor = parameters_[parameter].tensor;
  return entries_[parameter].storage.unsafeGetStorageImpl() != tensor.storage().unsafeGetStorageImpl() ||
         entries_[parameter].address != tensor.const_data_ptr();
}

void ResidentParameters::begin_update(const std::string&) {
  for (std::size_t i = 0; i < parameters_.size(); ++i)
    if (parameters_[i].active) adopt(static_cast<int>(i));
}

void ResidentParameters::adopt(int parameter) {
  const auto& slot = layout_.slot(parameter);
  if (slot.space < 0) return;
  if (entries_.size() < parameters_.size()) entries_.resize(parameters_.size());
  auto& entry = entries_[parameter];
  const auto& tensor = parameters_[parameter].tensor;
  if (entry.storage && !moved(parameter)) return;
  leave(parameter);  // aliases of the storage that the tensor has left

  if (flat_) {
    const auto& space = layout_.spaces()[slot.space];
    entry.memory = static_cast<char*>(arenas_[slot.space].data()) + slot.offset * space.itemsize;
    entry.mirrored = !owns_storage(tensor);
    if (!entry.mirrored) repoint(parameter, entry.memory);
  } else {
    entry.mirrored = !is_dense(tensor);
    if (!entry.mirrored) entry.memory = tensor.data_ptr();
  }
  if (entry.mirrored) {
    const auto strides = layout_strides(tensor);
    if (flat_) {
      entry.mirror =
          tensor_over(entry.memory, arenas_[slot.space].impl(), tensor.sizes(), strides, tensor.scalar_type(), tensor.device());
    } else {
      entry.mirror = at::empty_strided(tensor.sizes(), strides, tensor.options().requires_grad(false));
      entry.memory = entry.mirror.data_ptr();
    }
  }
  entry.storage = tensor.storage();
  entry.address = tensor.const_data_ptr();
}

void ResidentParameters::leave(int parameter) {
  if (parameter >= static_cast<int>(entries_.size())) return;
  auto& entry = entries_[parameter];
  if (flat_ && entry.storage && !entry.mirrored && entry.storage.use_count() > 1) {
    auto* storage = entry.storage.unsafeGetStorageImpl();
    if (storage->data() == entry.memory) detach_storage(*storage);
  }
  entry = Entry{};
}

void ResidentParameters::repoint(int parameter, void* memory) {
  auto* storage = parameters_[parameter].tensor.storage().unsafeGetStorageImpl();
  copy_bytes(memory, storage->data(), static_cast<std::int64_t>(storage->nbytes()), storage->device());
  place_storage(*storage, memory, arenas_[layout_.slot(parameter).space].impl());
}

void ResidentParameters::leave_all() {
  for (std::size_t i = 0; i < entries_.size(); ++i) leave(static_cast<int>(i));
}

void* ResidentParameters::memory(int space, int, const Segment& segment) {
  return static_cast<char*>(entries_[segment.parameter].memory) + segment.in_parameter * layout_.spaces()[space].itemsize;
}

void ResidentParameters::before_update(int space, int bucket) {
  const at::NoGradGuard no_grad;
  for (const int i : layout_.spaces()[space].buckets[bucket].parameters)
    if (entries_[i].mirrored) entries_[i].mirror.copy_(parameters_[i].tensor.detach());
}

void ResidentParameters::after_update(int space, int bucket, const std::string& label) {
  const at::NoGradGuard no_grad;
  if (flat_) gather(space, bucket, label);
  for (const int i : layout_.spaces()[space].buckets[bucket].parameters)
    if (entries_[i].mirrored) parameters_[i].tensor.detach().copy_(entries_[i].mirror);
}

void ResidentParameters::gather(int space, int bucket, const std::string& label) {
  if (comm_.size() == 1) return;
  const auto& s = layout_.spaces()[space];
  const auto& b = s.buckets[bucket];
  const auto full = tensor_over(static_cast<char*>(arenas_[space].data()) + b.begin * s.itemsize, arenas_[space].impl(),
                                {b.shard * layout_.ranks()}, {1}, static_cast<at::ScalarType>(s.dtype), comm_.device());
  comm_.all_gather(full.narrow(0, b.shard * comm_.rank(), b.shard), full, label);
}

std::int64_t ResidentParameters::parameter_bytes() const {
  std::int64_t sum = 0;
  for (const auto& arena : arenas_) sum += arena.bytes();
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    const bool in_arena = flat_ && i < entries_.size() && entries_[i].memory != nullptr && !entries_[i].mirrored;
    if (!in_arena) sum += static_cast<std::int64_t>(parameters_[i].tensor.nbytes());
  }
  return sum;
}

std::int64_t ResidentParameters::buffer_bytes() const {
  std::int64_t sum = 0;
  for (const auto& entry : entries_)
    if (entry.mirrored && !flat_) sum += static_cast<std::int64_t>(entry.mirror.nbytes());
  return sum;
}

}  // namespace zero
