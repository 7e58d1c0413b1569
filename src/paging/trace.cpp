#include "paging/trace.h"

#include <algorithm>
#include <limits>
#include <utility>

namespace zero {
namespace {

constexpr int kNever = std::numeric_limits<int>::max();

}  // namespace

Plan make_plan(std::vector<TraceEntry> trace, const std::vector<std::int64_t>& unit_bytes, std::int64_t budget) {
  Plan plan;
  const auto units = unit_bytes.size();
  // Next use of each resident unit after the present position, including as a held one.
  std::vector<std::vector<int>> positions(units);
  for (std::size_t i = 0; i < trace.size(); ++i) {
    positions[trace[i].unit].push_back(static_cast<int>(i));
    for (const int unit : trace[i].held)
      if (positions[unit].empty() || positions[unit].back() != static_cast<int>(i))
        positions[unit].push_back(static_cast<int>(i));
  }
  std::vector<std::size_t> passed(units, 0);
  std::vector<int> last(units, -1);
  const auto next = [&](int unit, int position) {
    auto& at = passed[unit];
    while (at < positions[unit].size() && positions[unit][at] <= position) ++at;
    return at < positions[unit].size() ? positions[unit][at] : kNever;
  };

  std::vector<char> resident(units, 0);
  std::int64_t used = 0;
  for (std::size_t i = 0; i < trace.size(); ++i) {
    const auto& entry = trace[i];
    const int position = static_cast<int>(i);
    if (!resident[entry.unit]) {
      Fetch fetch;
      fetch.position = position;
      fetch.unit = entry.unit;
      while (used + unit_bytes[entry.unit] > budget) {
        int victim = -1, farthest = -1;
        for (std::size_t unit = 0; unit < units; ++unit) {
          const int u = static_cast<int>(unit);
          if (!resident[unit] || std::find(entry.held.begin(), entry.held.end(), u) != entry.held.end()) continue;
          if (const int n = next(u, position); n > farthest) farthest = n, victim = u;
        }
        if (victim < 0) {
          plan.fits = false;
          break;
        }
        resident[victim] = 0;
        used -= unit_bytes[victim];
        fetch.victims.push_back(victim);
        fetch.after = std::max(fetch.after, last[victim]);
      }
      resident[entry.unit] = 1;
      used += unit_bytes[entry.unit];
      plan.bytes += unit_bytes[entry.unit];
      plan.peak_bytes = std::max(plan.peak_bytes, used);
      plan.fetches.push_back(std::move(fetch));
    }
    last[entry.unit] = position;
    for (const int unit : entry.held) last[unit] = position;
  }
  plan.trace = std::move(trace);
  return plan;
}

}  // namespace zero
