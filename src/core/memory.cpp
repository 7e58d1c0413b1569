#include "core/memory.h"

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

}  // namespace zero
