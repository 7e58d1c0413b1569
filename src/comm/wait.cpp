// Spinning, yielding and futexes, see wait.h; and the defaults of WaitPolicy.
#include "comm/wait.h"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>
#include <cmath>
#include <cstdlib>

#include "core/check.h"
#include "zero/communicator.h"

namespace zero {
namespace {

inline void cpu_relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

std::chrono::milliseconds seconds_from(const char* variable, double otherwise) {
  const char* value = std::getenv(variable);
  if (value == nullptr || *value == '\0') value = nullptr;
  double seconds = otherwise;
  if (value != nullptr) {
    char* end = nullptr;
    seconds = std::strtod(value, &end);
    ZERO_CHECK(*end == '\0' && std::isfinite(seconds) && seconds > 0 && seconds < 1e9, variable, "=", value,
               ": must be a positive number of seconds");
  }
  return std::chrono::milliseconds(static_cast<std::int64_t>(std::ceil(seconds * 1000)));
}

}  // namespace

WaitPolicy::WaitPolicy()
    : timeout(seconds_from("ZERO_TIMEOUT_SECONDS", 600)), warn_after(seconds_from("ZERO_WARN_SECONDS", 30)) {}

void futex_wait(std::atomic<std::uint32_t>& word, std::uint32_t seen, std::chrono::microseconds limit) {
  timespec time{};
  time.tv_sec = static_cast<time_t>(limit.count() / 1000000);
  time.tv_nsec = static_cast<long>(limit.count() % 1000000 * 1000);
  // Not FUTEX_PRIVATE_FLAG: the word may be shared between processes. Any result is fine, the caller looks again.
  syscall(SYS_futex, &word, FUTEX_WAIT, seen, &time, nullptr, 0);
}

void futex_wake_all(std::atomic<std::uint32_t>& word) { syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0); }

Backoff::Backoff(int ranks) {
  static const long cores = sysconf(_SC_NPROCESSORS_ONLN);  // reads a file
  spins_ = ranks <= cores ? 40 : 0;
}

bool Backoff::pause() {
  if (spins_ > 0) {
    --spins_;
    for (int i = 0; i < 50; ++i) cpu_relax();  // about a microsecond
    return true;
  }
  if (yields_ > 0) {
    --yields_;
    sched_yield();
    return true;
  }
  return false;
}

std::string readable(std::chrono::milliseconds time) {
  if (time.count() < 1000) return detail::text(time.count(), " ms");
  return detail::text(static_cast<double>(time.count()) / 1000, " s");
}

}  // namespace zero
