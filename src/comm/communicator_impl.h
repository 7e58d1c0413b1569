// What a backend provides: the collectives on raw memory. `Communicator` checks tensors and forwards here, so an implementation
// may rely on valid arguments. Implemented by NodeImpl (threads of a process, processes of a node), ClusterImpl (nodes), and on top of
// one of these by NcclImpl (GPUs) and StagedImpl (GPUs, through host memory).
#pragma once

#include <c10/core/Device.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "comm/call.h"
#include "comm/queue_impl.h"
#include "zero/communicator.h"

namespace zero {

class CommunicatorImpl {
 public:
  virtual ~CommunicatorImpl() = default;

  virtual const char* backend() const = 0;
  virtual int rank() const = 0;
  virtual int size() const = 0;
  virtual int local_size() const = 0;
  virtual int nodes() const = 0;
  /// Where the tensors of its collectives lie.
  virtual c10::Device device() const { return c10::Device(c10::DeviceType::CPU); }

  /// output may be this rank's slice of input; else they don't overlap. So for shard and full.
  virtual void reduce_scatter(Call call, const void* input, void* output) = 0;
  virtual void all_gather(Call call, const void* shard, void* full) = 0;
  virtual void all_reduce(Call call, void* data) = 0;
  virtual void broadcast(Call call, void* data) = 0;
  virtual std::vector<std::string> exchange(Call call, const std::string& mine) = 0;
  virtual std::shared_ptr<Buffer::Impl> allocate(Call call) = 0;
  /// Op::split or Op::duplicate. May be null (negative color).
  virtual std::shared_ptr<CommunicatorImpl> split(Call call, int color, int key) = 0;
  virtual std::shared_ptr<QueueImpl> open_queue(Call call) = 0;
  /// The collectives between the two may be sent together, as late as at the end (none of their results is used before). No operations
  /// of queues, messages, allocations or splits between them. See Group.
  virtual void group_begin() {}
  virtual void group_end() {}
  virtual void group_drop() noexcept {}
  /// Takes part in the collective that this rank cannot do, and throws `message` on every rank.
  [[noreturn]] virtual void refuse(const std::string& message) = 0;

  virtual void fail(const std::string& why) = 0;
  /// Throws if this rank or a peer is known to have failed. Waits for nobody; not collective.
  virtual void check_failures() = 0;
  virtual void set_wait_policy(const WaitPolicy& policy) = 0;
  virtual WaitPolicy wait_policy() const = 0;
  virtual Traffic traffic() const = 0;
};

/// Sends many collectives together: those called until end(). Without end(), because an exception is under way, they are dropped.
class Group {
 public:
  explicit Group(CommunicatorImpl& impl) : impl_(&impl) { impl.group_begin(); }
  ~Group() {
    if (impl_ != nullptr) impl_->group_drop();
  }
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;
  void end() { std::exchange(impl_, nullptr)->group_end(); }

 private:
  CommunicatorImpl* impl_;
};

}  // namespace zero
