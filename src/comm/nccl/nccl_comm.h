// One NCCL communicator of this rank with its stream: made without blocking, watched, aborted at most once. What is sent over it is
// NcclImpl's business.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>

#include "comm/nccl/device_api.h"
#include "comm/nccl/nccl_api.h"
#include "comm/wait.h"
#include "zero/communicator.h"

namespace zero {

/// The device or the other ranks took too long.
struct NcclTimeout : c10::Error {
  explicit NcclTimeout(const std::string& message) : c10::Error(message) {}
};

class NcclComm {
 public:
  /// Nothing is asked of NCCL yet.
  NcclComm(NcclApi api, std::shared_ptr<DeviceApi> device);
  /// Aborts, unless finish() has ended it.
  ~NcclComm();
  NcclComm(const NcclComm&) = delete;
  NcclComm& operator=(const NcclComm&) = delete;

  const NcclApi& api() const { return api_; }
  const std::shared_ptr<DeviceApi>& device() const { return device_; }
  DeviceApi::Stream stream() const { return stream_; }
  cudaStream_t cuda_stream() const { return static_cast<cudaStream_t>(stream()); }
  ncclComm_t get() const { return comm_; }

  /// Joins the ranks that have the same id, and waits until all have: settle().
  void join(const ncclUniqueId& id, int rank, int size);
  /// `result` is what `call` returned: waits until NCCL has done on the host what it takes to start it (ncclInProgress is over).
  /// Throws on an error, and NcclTimeout after the policy's timeout. Not for the device.
  void settle(ncclResult_t result, const char* call);
  /// Throws if NCCL has met an error since.
  void check();
  /// Multiplies what is summed by `factor` (a power of two). Kept as long as the communicator: few are ever needed.
  ncclRedOp_t scaled_sum(ncclDataType_t type, double factor);

  /// Ends it in order: what is under way has to be over (on this device), and the ranks of a node do so together; after `patience`
  /// it is aborted.
  void finish(std::chrono::milliseconds patience) noexcept;
  /// Once: also ends what is under way on the device. Later calls do nothing.
  void abort() noexcept;
  bool alive() const { return comm_ != nullptr; }

  WaitPolicy policy;
  /// Called while settle() waits. Throws to end the wait.
  std::function<void()> watch;

 private:
  [[noreturn]] void throw_error(ncclResult_t result, const char* call) const;
  ncclResult_t async_state() const;

  NcclApi api_;
  std::shared_ptr<DeviceApi> device_;
  OwnedStream stream_;
  ncclComm_t comm_ = nullptr;
  std::map<std::pair<ncclDataType_t, double>, ncclRedOp_t> scaled_;
};

}  // namespace zero
