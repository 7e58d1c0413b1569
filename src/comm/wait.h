// How one rank waits for another: spin briefly, yield, then sleep in the kernel, so that more ranks than cores don't burn them.
// Used by Team (shared memory) and by Wire (MPI).
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <string>

namespace zero {

using Clock = std::chrono::steady_clock;

/// Sleeps while `word` has the value `seen`, for at most `limit`. Works across processes.
void futex_wait(std::atomic<std::uint32_t>& word, std::uint32_t seen, std::chrono::microseconds limit);
void futex_wake_all(std::atomic<std::uint32_t>& word);

/// The stages before sleeping. One object per wait.
class Backoff {
 public:
  /// @param ranks how many of them share the cores of this machine: with more ranks than cores spinning only delays the others
  explicit Backoff(int ranks);
  /// Spends a moment and returns true; false: it is time to sleep.
  bool pause();

 private:
  int spins_ = 0;
  int yields_ = 16;
};

/// "1.5 s", "250 ms"
std::string readable(std::chrono::milliseconds time);

}  // namespace zero
