// Bytes on whatever device the parameters are on. On a GPU everything happens in the current stream.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace zero {

/// Both blocks on the device; they don't overlap.
void copy_bytes(void* to, const void* from, std::int64_t bytes, c10::Device device);
void fill_bytes(void* memory, std::uint8_t value, std::int64_t bytes, c10::Device device);

/// Ordinary memory's bytes in a new tensor (kByte) on the device, or in the beginning of one that is there. The values may go when it
/// returns, and the host doesn't wait for the device.
at::Tensor to_device(const void* values, std::size_t bytes, c10::Device device);
void to_device(const at::Tensor& there, const void* values, std::size_t bytes);

}  // namespace zero
