// Reduce-scatters over shared memory that don't wait: each rank shows in its lane of the control block what it has begun, and sums
// its slice straight out of its peers' Buffers once all have begun. Made by NodeImpl::form_queue().
//
// Why this can't deadlock: all ranks begin the same operations in the same order, and every wait on the communicator serves its
// queues (Team::serve). So the earliest operation that isn't released waits for nobody but ranks that have still to begin it, and
// these wait, if at all, for the release of earlier ones.
#pragma once

#include <memory>
#include <string>

#include "comm/node_impl.h"

namespace zero {

class NodeQueue final : public QueueImpl {
 public:
  /// @param place its lane, which this rank has reset and all have seen reset
  NodeQueue(NodeImpl& impl, int place, std::string what);
  ~NodeQueue() override;

  std::int64_t begin(Call call, const at::Tensor& input, const at::Tensor& output) override;
  [[noreturn]] void refuse(const std::string& message) override;
  void poll() override;
  void wait(std::int64_t ticket) override;
  void wait_released(std::int64_t ticket) override;
  std::int64_t begun() const override { return own().posted.load(std::memory_order_relaxed); }
  std::int64_t finished() const override { return own().taken.load(std::memory_order_relaxed); }
  std::int64_t released() const override;

  int place() const { return place_; }
  /// Sums what all ranks have begun. True: this rank has begun more than that.
  bool serve();

 private:
  struct Operation {
    std::shared_ptr<Buffer::Impl> window;  ///< keeps the peers' memory mapped
    at::Tensor output;
  };
  Lane& lane(int member) const { return team_.lane(member, place_); }
  Lane& own() const { return lane(team_.rank()); }
  const Call& call(int member, std::int64_t ticket) const { return lane(member).calls[ticket % Lane::kDepth]; }
  Operation& operation(std::int64_t ticket) { return operations_[ticket % Lane::kDepth]; }
  bool begun_by_all(std::int64_t ticket) const;
  void compare(std::int64_t ticket) const;
  void take(std::int64_t ticket);
  void finish(std::int64_t ticket);
  void release(std::int64_t ticket);

  NodeImpl& impl_;
  Team& team_;
  int place_;
  Operation operations_[Lane::kDepth];
};

}  // namespace zero
