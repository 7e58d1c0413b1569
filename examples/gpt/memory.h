// What a training run keeps in memory, seen from outside the library: allocations counted at LibTorch's allocator, memory shared
// with other ranks found among the process's mappings, and the kernel's own figures.
#pragma once

#include <cstdint>

namespace gpt {

/// Puts a counter in front of LibTorch's CPU allocator, for good. Call it before the first tensor is made.
void count_allocations();
/// Bytes that tensors hold now, as they asked for them. Tensors over memory that a communicator gave are not among them.
std::int64_t live_tensor_bytes();
/// The most that live_tensor_bytes() has been since reset_peaks().
std::int64_t peak_tensor_bytes();

/// Bytes of memory shared between processes (memfd) that this process has mapped; `ranks` processes that map each other's
/// equally large parts make for one part of it each. A communicator of one rank has private memory instead: not seen here.
std::int64_t shared_bytes_per_rank(int ranks);

/// The kernel's figures for this process, in bytes. A page that N processes map counts 1/N in the proportional set.
std::int64_t resident_set();
std::int64_t peak_resident_set();  ///< since reset_peaks(), or since the start where the kernel doesn't let us reset it
std::int64_t proportional_set();
void reset_peaks();

}  // namespace gpt
