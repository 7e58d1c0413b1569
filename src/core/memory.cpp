#include "core/memory.h"

#include <ATen/ops/empty.h>

#include <cstring>

#include "core/parameter.h"

namespace zero {
namespace {

at::Tensor bytes_at(void* memory, std::int64_t bytes, c10::Device device) {
  return tensor_over(memory, nullptr, {bytes}, {1}, at::kByte, device);
}

}  // namespace

void copy_bytes(void* to, const void* from, std::int64_t bytes, c10::Device device) {
  if (bytes == 0) return;  // memcpy may not be given null pointers, not even for no bytes
  if (device.is_cpu()) {
    std::memcpy(to, from, static_cast<std::size_t>(bytes));
  } else {
    bytes_at(to, bytes, device).copy_(bytes_at(const_cast<void*>(from), bytes, device), /*non_blocking=*/true);
  }
}

void fill_bytes(void* memory, std::uint8_t value, std::int64_t bytes, c10::Device device) {
  if (bytes == 0) return;
  if (device.is_cpu()) {
    std::memset(memory, value, static_cast<std::size_t>(bytes));
  } else {
    bytes_at(memory, bytes, device).fill_(value);
  }
}

// Through pinned memory: from any other the driver may wait for the stream first. LibTorch's allocator hands pinned memory out again
// when the copy has been made.
void to_device(const at::Tensor& there, const void* values, std::size_t bytes) {
  if (bytes == 0) return;
  const auto count = static_cast<std::int64_t>(bytes);
  if (there.device().is_cpu()) {
    std::memcpy(there.data_ptr(), values, bytes);
    return;
  }
  const auto pinned = at::empty({count}, at::TensorOptions(at::kByte).pinned_memory(true));
  std::memcpy(pinned.data_ptr(), values, bytes);
  there.narrow(0, 0, count).copy_(pinned, /*non_blocking=*/true);
}

at::Tensor to_device(const void* values, std::size_t bytes, c10::Device device) {
  auto there = at::empty({static_cast<std::int64_t>(bytes)}, at::TensorOptions(at::kByte).device(device));
  to_device(there, values, bytes);
  return there;
}

}  // namespace zero
