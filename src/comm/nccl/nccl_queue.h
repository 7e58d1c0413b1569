// Reduce-scatters on an NcclImpl's stream that the compute stream doesn't wait for: an event each, which the compute stream waits for
// when asked. The stream keeps their order, so they finish in it. NCCL's kernel on this rank is over when this rank's input has been
// read and its output written: released and finished are the same. Made by NcclImpl::open_queue().
#pragma once

#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "comm/nccl/nccl_impl.h"

namespace zero {

class NcclQueue final : public QueueImpl {
 public:
  NcclQueue(NcclImpl& impl, std::string what) : QueueImpl(std::move(what)), impl_(impl) {}
  ~NcclQueue() override;

  std::int64_t begin(Call call, const at::Tensor& input, const at::Tensor& output) override;
  [[noreturn]] void refuse(const std::string& message) override;
  void poll() override;
  void wait(std::int64_t ticket) override;
  void wait_released(std::int64_t ticket) override { wait(ticket); }
  std::int64_t begun() const override { return finished_ + static_cast<std::int64_t>(under_way_.size()); }
  std::int64_t finished() const override;
  std::int64_t released() const override { return finished(); }

 private:
  struct Operation {
    Call call;
    std::unique_ptr<OwnedEvent> over;
    std::shared_ptr<Buffer::Impl> window;  ///< the memory of the input
    at::Tensor output;                     ///< until the compute stream waits for it: from then on it may be freed there
  };
  void retire() const;

  NcclImpl& impl_;
  // Asking whether operations are over moves them from one to the other.
  mutable std::int64_t finished_ = 0;
  mutable std::deque<Operation> under_way_;
  mutable std::vector<std::unique_ptr<OwnedEvent>> spare_;
};

}  // namespace zero
