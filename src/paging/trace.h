// The order in which a step touches units, and what follows from it: which unit to fetch when, and which to release for it. With the
// future known the one whose next use is farthest goes (Belady 1966). Pure arithmetic: no memory, no threads.
#pragma once

#include <cstdint>
#include <vector>

namespace zero {

/// One touch that isn't of the unit touched just before.
struct TraceEntry {
  int unit = 0;
  std::vector<int> held;  ///< units in use at that moment, which can't be released for this one
  bool operator==(const TraceEntry& other) const { return unit == other.unit && held == other.held; }
};

/// Fetch `unit` for the touch at `position`, in the place of `victims`; not before the touch `after` is over.
struct Fetch {
  int position = 0;
  int unit = 0;
  std::vector<int> victims;
  int after = -1;  ///< position of the victims' last use before; -1: any time
};

struct Plan {
  std::vector<TraceEntry> trace;
  std::vector<Fetch> fetches;   ///< in order
  std::int64_t bytes = 0;       ///< of all fetches
  std::int64_t peak_bytes = 0;  ///< most that is resident at a time
  bool fits = true;             ///< false: some touch needs more than the budget
};

/// @param unit_bytes by unit
/// @param budget bytes that may be resident at a time; at the start nothing is
Plan make_plan(std::vector<TraceEntry> trace, const std::vector<std::int64_t>& unit_bytes, std::int64_t budget);

}  // namespace zero
