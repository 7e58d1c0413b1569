// XXH3 with 64 bits: as fast as memory, and made to notice damage.
#pragma once

#include <cstdint>
#include <memory>

namespace zero::checkpoint {

class Checksum {
 public:
  Checksum();
  ~Checksum();
  Checksum(const Checksum&) = delete;
  Checksum& operator=(const Checksum&) = delete;
  void add(const void* data, std::int64_t bytes);
  std::uint64_t value() const;  ///< of all that was added, in order

 private:
  struct State;
  std::unique_ptr<State> state_;
};

std::uint64_t checksum_of(const void* data, std::int64_t bytes);

}  // namespace zero::checkpoint
