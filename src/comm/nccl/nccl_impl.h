// A communicator of GPUs: data goes over NCCL on a private stream, everything else over a communicator of the CPU, the control.
//
// Fences. The compute stream is the calling thread's current one. A collective records an event there, makes the private stream wait
// for it, puts itself on the private stream, records an event there, and makes the compute stream wait for that one. So memory that a
// caller frees after the call, on the compute stream, isn't reused before the collective is over, and no allocator has to be told
// about the second stream. The host waits for no device, but for NCCL to have started a call (NcclComm::settle).
//
// Errors. Ranks notice each other's failures on the control: at the entry of each call, and in every wait on the host. The
// first error on a rank aborts its NCCL communicator (which ends its kernels, too), tells the control, and is repeated from then on.
#pragma once

#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "comm/communicator_impl.h"
#include "comm/nccl/device_windows.h"
#include "comm/nccl/nccl_comm.h"

namespace zero {

class NcclImpl final : public CommunicatorImpl {
 public:
  using MakeDevice = std::function<std::shared_ptr<DeviceApi>()>;
  using MakeApi = std::function<NcclApi()>;
  /// Collective over `control`, which is duplicated. What one rank can't make is an error on all.
  static Communicator make(const Communicator& control, const MakeDevice& device, const MakeApi& api);

  /// @param control of its own
  NcclImpl(Communicator control, std::shared_ptr<NcclComm> comm);
  ~NcclImpl() override;

  const char* backend() const override { return "nccl"; }
  int rank() const override { return rank_; }
  int size() const override { return size_; }
  int local_size() const override { return control_.local_size(); }
  int nodes() const override { return control_.nodes(); }
  c10::Device device() const override { return comm_->device()->device(); }

  void reduce_scatter(Call call, const void* input, void* output) override;
  void all_gather(Call call, const void* shard, void* full) override;
  void all_reduce(Call call, void* data) override;
  void broadcast(Call call, void* data) override;
  std::vector<std::string> exchange(Call call, const std::string& mine) override;
  std::shared_ptr<Buffer::Impl> allocate(Call call) override;
  std::shared_ptr<CommunicatorImpl> split(Call call, int color, int key) override;
  std::shared_ptr<QueueImpl> open_queue(Call call) override;
  [[noreturn]] void refuse(const std::string& message) override;
  void group_begin() override;
  void group_end() override;
  void group_drop() noexcept override;

  void fail(const std::string& why) override { control_.fail(why); }
  void check_failures() override;
  void set_wait_policy(const WaitPolicy& policy) override;
  WaitPolicy wait_policy() const override { return comm_->policy; }
  Traffic traffic() const override;

 private:
  friend class NcclQueue;

  /// A collective that has been checked and counted: hands it to NCCL.
  struct Work {
    const char* name = "";  ///< of NCCL's function
    std::function<ncclResult_t()> start;
    std::function<void()> finish;  ///< on the stream, after it; null: nothing
  };

  // Collective. The makers' errors, two ranks on one device, different libraries: thrown on every rank.
  static std::shared_ptr<NcclImpl> bring_up(Communicator control, const MakeDevice& make_device, const MakeApi& make_api);

  /// Decides what an exception of `body` means: whether the communicator is broken by it. Broken already: throws that.
  void guarded(const Call& call, const std::function<void()>& body);
  void break_down(std::exception_ptr error) noexcept;
  /// "rank 1 of 4 (nccl): reduce_scatter #3 of …"
  std::string here() const;
  /// Numbers a call and looks for failures.
  void enter(Call& call);
  /// What a call can find out without waiting: NCCL's state, the peers', and whether the device still gets on.
  void check();
  /// With ZERO_NCCL_COMPARE: everybody shows its call. Throws AgreedError on all unless they are the same.
  void compare(const Call& call, const std::string& note = {});
  void run(Work work);
  void launch(const std::vector<Work>& works);
  void fence_before();
  void fence_after();
  void watch_progress();
  Work reduction(const Call& call, const void* input, void* output, bool scatter);

  Communicator control_;
  std::shared_ptr<NcclComm> comm_;  ///< shared with the Buffers
  DeviceApi& device_;
  int rank_;
  int size_;
  bool comparing_;
  OwnedEvent ready_;  ///< the compute stream's work before a call
  OwnedEvent over_;   ///< the call
  int grouping_ = 0;
  std::vector<Work> group_;

  std::int64_t number_ = 0;
  Call current_;
  Traffic traffic_;
  std::exception_ptr broken_;
  int exceptions_;  ///< in flight when this was made
  DeviceWindows windows_;

  // One call at a time is timed: does the device still get on?
  OwnedEvent probe_;
  bool probing_ = false;
  Clock::time_point probed_{};
  Call probed_call_;
};

/// Memory of the device that NCCL likes best (its own, registered), as far as the library offers it; else the device allocator's.
/// Zero-filled on the compute stream. Freeing it waits on the host for what the streams have been given, as cudaFree does.
std::shared_ptr<Mapping> nccl_memory(const std::shared_ptr<NcclComm>& comm, std::int64_t bytes);

}  // namespace zero
