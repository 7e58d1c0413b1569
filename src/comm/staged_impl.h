// A communicator for tensors of a device over one of the CPU: every collective goes through staging memory of the host in chunks, by
// the device's copies on a private stream, and `inner` works there. The staging memory is a Buffer of `inner`, so that its
// collectives read it where it is; it is pinned where the system lets us. Same numbers, agreement and errors as inner's.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "comm/communicator_impl.h"
#include "comm/nccl/device_api.h"
#include "comm/nccl/device_windows.h"

namespace zero {

class StagedImpl final : public CommunicatorImpl {
 public:
  using MakeDevice = std::function<std::shared_ptr<DeviceApi>()>;
  /// Collective over `inner`, which is duplicated. A device that can't be had on one rank is an error on all.
  static Communicator make(const Communicator& inner, const MakeDevice& device);

  /// @param inner of its own
  /// @param staging of inner
  StagedImpl(Communicator inner, std::shared_ptr<DeviceApi> device, Buffer staging);
  ~StagedImpl() override;

  const char* backend() const override { return "staged"; }
  int rank() const override { return inner_.rank(); }
  int size() const override { return inner_.size(); }
  int local_size() const override { return inner_.local_size(); }
  int nodes() const override { return inner_.nodes(); }
  c10::Device device() const override { return device_->device(); }

  void reduce_scatter(Call call, const void* input, void* output) override;
  void all_gather(Call call, const void* shard, void* full) override;
  void all_reduce(Call call, void* data) override;
  void broadcast(Call call, void* data) override;
  std::vector<std::string> exchange(Call call, const std::string& mine) override;
  std::shared_ptr<Buffer::Impl> allocate(Call call) override;
  std::shared_ptr<CommunicatorImpl> split(Call call, int color, int key) override;
  std::shared_ptr<QueueImpl> open_queue(Call call) override;
  [[noreturn]] void refuse(const std::string& message) override;

  void fail(const std::string& why) override { inner_.fail(why); }
  void check_failures() override { inner_.impl()->check_failures(); }
  void set_wait_policy(const WaitPolicy& policy) override { inner_.set_wait_policy(policy); }
  WaitPolicy wait_policy() const override { return inner_.wait_policy(); }
  Traffic traffic() const override;

 private:
  friend class StagedQueue;

  /// Collective.
  static std::shared_ptr<StagedImpl> bring_up(Communicator inner, const MakeDevice& make_device);

  /// Runs one collective on tensors: counts it, fences it, tells the peers of an error that is only this rank's.
  void run(Call call, const std::function<void()>& body);
  void fence_after() noexcept;
  /// "rank 1 of 4 (staged): reduce_scatter #3 of …"
  std::string here() const;
  /// inner's collective on what has been copied to the staging memory so far.
  void on_host(const std::function<void(CommunicatorImpl&)>& collective);
  void to_host(std::int64_t offset, const char* from, std::int64_t bytes);
  void to_device(char* to, std::int64_t offset, std::int64_t bytes);
  /// Calls step(begin, bytes) for pieces of `bytes` of which `pieces` fit into the staging memory side by side; at least once, since
  /// the ranks compare their calls even if nothing is moved.
  void in_chunks(std::int64_t bytes, std::int64_t pieces, const std::function<void(std::int64_t, std::int64_t)>& step);

  Communicator inner_;
  std::shared_ptr<DeviceApi> device_;
  OwnedStream stream_;
  OwnedEvent event_;
  Buffer staging_;
  char* host_;  ///< its memory
  bool pinned_;
  DeviceWindows windows_;
  Call current_;
  Traffic traffic_;  ///< calls and data; the rest is inner's
};

}  // namespace zero
