// Buckets on their way from this rank's gradients to the shards, during backward. A bucket is filled in one of two buffers that
// peers can read; when its last expected gradient has arrived it is handed to the ReduceQueue, in the order that all ranks have
// agreed on, and backward goes on. Each later arrival also sums what all ranks have handed over meanwhile.
//
// Order. The queue takes the same operations in the same order on every rank, so buckets go in the order of a *plan*: the parameters
// that are expected to arrive, and the order in which rank 0 had their buckets complete in the last backward that followed two
// like the last two (alternating losses have alternating plans, and a backward that brings nothing here is a plan as well). A bucket
// that is complete before its turn waits. At the end of its backward a rank hands over what is left of the plan, complete or not, and
// only then agrees with the others; what the plan doesn't have follows, in the order of units. So a wrong plan costs memory, overlap
// and zeros that are sent in vain, never correctness.
//
// Memory. Waiting for a buffer is waiting for peers to read a bucket that is under way. Those are a prefix of the plan; the first of
// them is read when every rank has handed it over, which each does at the latest when its backward ends, without waiting for anything
// but buckets before it: no circle. Where both buffers hold buckets that are not under way (gradients in an unexpected order), more
// memory is used instead.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <utility>
#include <vector>

#include "reduce/gradient_store.h"

namespace zero {

class BucketStream {
 public:
  explicit BucketStream(const GradientContext& context) : context_(context) {}

  /// The averaged shard of a bucket: where it goes and what follows. Set by the owner.
  struct Sink {
    std::function<void(int unit)> before;  ///< it is about to change
    std::function<at::Tensor(int unit)> shard;
    std::function<bool(int parameter)> has_gradient;
    /// `sum` holds the new averages: on top of the shard where `onto` (by position in the bucket), instead of it elsewhere.
    std::function<void(int unit, const at::Tensor& sum, const std::vector<char>& onto)> merge;
  } sink;

  /// Collective. Makes or enlarges the buffers.
  void allocate();
  void add(int parameter, const at::Tensor& gradient, bool onto);
  void drop(int parameter);
  void hold_back(bool on) { held_back_ = on; }
  /// This rank's backward has ended: the rest of the plan.
  void complete_plan();

  std::uint8_t flags(int parameter) const;
  std::int64_t under_way() const { return static_cast<std::int64_t>(next_); }
  std::vector<int> completion_order() const;
  /// Collective: all that waits on any rank, to the end; and the plan for the next backward.
  void finish(const GradientAgreement& agreed);

  at::Tensor scratch() const;
  std::int64_t buffer_bytes() const;

 private:
  struct Plan {
    std::vector<int> order;
    std::vector<char> expected;  ///< per parameter
    std::vector<int> count;      ///< per unit: how many are expected
    bool operator==(const Plan& other) const { return order == other.order && expected == other.expected; }
  };
  struct Buffer2 {
    at::Tensor memory;         ///< in peers' reach
    int unit = -1;             ///< whose bucket it holds
    std::int64_t ticket = -1;  ///< ≥ 0: under way
  };
  struct Filling {
    int buffer = -1;                  ///< or
    at::Tensor own;                   ///< memory that peers can't reach
    std::vector<char> arrived, onto;  ///< by position in the bucket
    int expected = 0;                 ///< how many of the expected ones have arrived
    bool open = false;
  };
  struct UnderWay {
    int unit;
    std::int64_t ticket;
    at::Tensor sum;  ///< undefined: went straight to the shard
    std::vector<char> onto;
  };

  const Bucket& bucket(int unit) const;
  int position(int parameter) const;
  void* memory(const Filling& filling) const;
  void open(int unit);
  int find_buffer(std::int64_t bytes);
  void evict(int buffer);
  bool complete(int unit) const;
  void advance();
  void start(int unit);
  void fill_gaps(int unit, const Filling& filling);
  void collect_finished(bool wait);
  void learn(const GradientAgreement& agreed);
  void use(int plan);

  const GradientContext& context_;
  ReduceQueue queue_;
  ::zero::Buffer window_;
  Buffer2 buffers_[2];
  std::vector<Filling> filling_;     ///< per unit
  std::vector<std::uint64_t> last_;  ///< per unit: when something last arrived in this backward; 0: nothing
  std::vector<char> started_;        ///< per unit: was under way in this backward
  std::deque<UnderWay> under_way_;
  std::uint64_t clock_ = 0;
  bool held_back_ = false;

  Plan plan_;
  std::size_t next_ = 0;                         ///< in plan_.order
  std::vector<Plan> plans_;                      ///< that have been seen
  std::map<std::pair<int, int>, int> followed_;  ///< by the last two plans: the one that came next
  std::pair<int, int> last_plans_{-1, -1};
};

}  // namespace zero
