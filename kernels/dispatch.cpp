// Chooses the instruction set once, from the processor and the environment variable ZERO_ISA.
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>

#include "table.h"

namespace zero::kernels {
namespace {

bool is(const char* a, const char* b) { return std::strcmp(a, b) == 0; }

/// The named table, or null where this build or processor lacks it.
const Table* find(const char* name) {
  if (is(name, "baseline")) return &baseline_table;
#if defined(ZERO_KERNELS_X86)
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c");
  if (is(name, "avx2") && avx2) return &avx2_table;
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (is(name, "avx512") && avx512) return &avx512_table;
#endif
  return nullptr;
}

/// The best set that is not above the one asked for.
const Table* choose() {
  const char* asked = std::getenv("ZERO_ISA");
  const bool any = asked == nullptr || *asked == '\0';
  if (!any && !is(asked, "avx512") && !is(asked, "avx2") && !is(asked, "baseline")) {
    throw std::invalid_argument("ZERO_ISA is '" + std::string(asked) + "'; expected avx512, avx2 or baseline");
  }
  bool reached = any;
  for (const char* name : {"avx512", "avx2", "baseline"}) {
    reached = reached || is(asked, name);
    if (!reached) continue;
    if (const Table* t = find(name)) return t;
  }
  return &baseline_table;
}

std::atomic<const Table*>& chosen() {
  static std::atomic<const Table*> value{choose()};
  return value;
}

}  // namespace

const Table& table() { return *chosen().load(std::memory_order_relaxed); }

bool select_instruction_set(const char* name) {
  const Table* t = find(name);
  if (t != nullptr) chosen().store(t, std::memory_order_relaxed);
  return t != nullptr;
}

const char* instruction_set() { return table().name; }

}  // namespace zero::kernels
