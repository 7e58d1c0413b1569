// Who answers when an operator touches a paged tensor: gradients (src/reduce/) or parameters
// (src/residency/).
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "paging/access.h"

namespace zero {

struct Touch {
  int page = 0;
  Access access = Access::reads;  ///< the strongest, if an operator has the page several times
};

class PageOwner {
 public:
  virtual ~PageOwner() = default;

  /// Before an operator runs: makes the pages that are read or written resident until end(). Touches that only look don't come here.
  /// Throws what prevents it; then end() is not called.
  /// @param op the operator's name, for messages
  virtual void begin(const std::vector<Touch>& touches, const std::string& op) = 0;
  /// After it has run, or thrown.
  virtual void end(const std::vector<Touch>& touches) noexcept = 0;

  /// An in-place operator that may run in parts, on one page: calls `run` on the parts that this rank keeps if that spares making
  /// the page resident, and returns true; false: the ordinary way is as good.
  virtual bool edit_in_parts(const Touch& touch, const std::function<void(const at::Tensor&)>& run) = 0;
};

/// What pages are moved in, once each, in the order of the touches: `group_of` says which it is.
/// @param written_only leave out those that are only read
template <typename GroupOf>
std::vector<int> groups_of(const std::vector<Touch>& touches, bool written_only, const GroupOf& group_of) {
  std::vector<int> groups;
  for (const auto& touch : touches) {
    if (written_only && touch.access == Access::reads) continue;
    const int group = group_of(touch.page);
    if (std::find(groups.begin(), groups.end(), group) == groups.end()) groups.push_back(group);
  }
  return groups;
}

}  // namespace zero
