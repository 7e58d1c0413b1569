// Bytes on whatever device the parameters are on. On a GPU everything happens in the current stream.
#pragma once

#include <c10/core/Device.h>

#include <cstdint>

namespace zero {

/// Both blocks on the device; they don't overlap.
void copy_bytes(void* to, const void* from, std::int64_t bytes, c10::Device device);
void fill_bytes(void* memory, std::uint8_t value, std::int64_t bytes, c10::Device device);

}  // namespace zero
