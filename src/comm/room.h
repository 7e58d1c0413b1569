// How much memory is there to be had, asked before shared memory is used: running out of it later would be a SIGBUS or a visit of
// the kernel's OOM killer instead of an error message.
#pragma once

#include <cstdint>
#include <string>

namespace zero {

struct Room {
  std::int64_t bytes = 0;
  std::string limited_by;  ///< "memory of this machine", …
};

/// The smallest of: MemAvailable, what the memory cgroups of this process leave, and ZERO_SHM_LIMIT_BYTES (a limit for all
/// communicator memory of a node; `held` of it is in use).
Room available_room(std::int64_t held);

/// "12.5 MiB"
std::string readable_bytes(std::int64_t bytes);

}  // namespace zero
