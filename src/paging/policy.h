// Which resident unit goes when the budget is used up.
#pragma once

#include <cstdint>
#include <vector>

namespace zero {

class Policy {
 public:
  virtual ~Policy() = default;
  /// The unit was used (called in the order of use).
  virtual void touched(int unit) = 0;
  /// One of `candidates` (resident, nobody uses them; never empty).
  virtual int victim(const std::vector<int>& candidates) = 0;
};

/// The least recently used goes first: right for loops over all gradients.
class LeastRecentlyUsed final : public Policy {
 public:
  void touched(int unit) override;
  int victim(const std::vector<int>& candidates) override;

 private:
  std::vector<std::uint64_t> last_;  ///< by unit
  std::uint64_t clock_ = 0;
};

}  // namespace zero
