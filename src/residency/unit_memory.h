// Memory of whole buckets, recycled: fresh pages are slow (64 MiB: 60 ms against 14 ms), and steps want the same sizes again.
#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <memory>

namespace zero {

class UnitMemory {
 public:
  using Block = std::shared_ptr<char>;  ///< comes back to the pool when its last holder lets go

  explicit UnitMemory(c10::Device device);
  ~UnitMemory();
  UnitMemory(const UnitMemory&) = delete;
  UnitMemory& operator=(const UnitMemory&) = delete;
  /// Memory of `bytes`, 64-byte aligned, uninitialised. Frees spare blocks where in use and spare would exceed `limit`.
  Block take(std::int64_t bytes, std::int64_t limit);
  /// Bytes that are in use or spare.
  std::int64_t bytes() const;
  /// Frees what is spare.
  void trim();

 private:
  struct Pool;
  c10::Device device_;
  std::shared_ptr<Pool> pool_;  ///< blocks may outlive this object
};

}  // namespace zero
