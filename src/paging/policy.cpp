#include "paging/policy.h"

#include <algorithm>

namespace zero {

void LeastRecentlyUsed::touched(int unit) {
  if (last_.size() <= static_cast<std::size_t>(unit)) last_.resize(static_cast<std::size_t>(unit) + 1);
  last_[unit] = ++clock_;
}

int LeastRecentlyUsed::victim(const std::vector<int>& candidates) {
  return *std::min_element(candidates.begin(), candidates.end(), [&](int a, int b) {
    const auto at = [&](int unit) { return static_cast<std::size_t>(unit) < last_.size() ? last_[unit] : 0; };
    return at(a) < at(b);
  });
}

}  // namespace zero
