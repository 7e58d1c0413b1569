// How a unit's memory comes and goes: gathered from the ranks' shards today, from host memory or a file later.
#pragma once

#include <cstdint>

namespace zero {

class Transport {
 public:
  virtual ~Transport() = default;
  /// Makes the unit resident; blocks. May throw: the unit then counts as released.
  virtual void fetch(int unit) = 0;
  /// Writes what this rank keeps of a resident unit back to where it is kept.
  virtual void store(int unit) = 0;
  /// Takes the memory away.
  virtual void release(int unit) = 0;
  /// What being resident costs.
  virtual std::int64_t bytes(int unit) const = 0;
};

}  // namespace zero
