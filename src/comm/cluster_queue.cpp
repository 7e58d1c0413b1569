// A ReduceQueue over several nodes: begin() is the collective itself, so that its operations are over when they have begun. Nothing
// else moves messages between nodes while the ranks compute.
#include <utility>

#include "comm/cluster_impl.h"
#include "core/check.h"

namespace zero {

class ClusterQueue final : public QueueImpl {
 public:
  ClusterQueue(ClusterImpl& impl, std::string what) : QueueImpl(std::move(what)), impl_(impl) {}

  std::int64_t begin(Call call, const at::Tensor& input, const at::Tensor& output) override {
    const std::int64_t bytes = call.bytes() * impl_.size();
    Call unused;  // as on one node, so that a program which works here works there
    if (bytes > 0 && impl_.find_window(unused, input.const_data_ptr(), bytes) == nullptr) {
      refuse(detail::text(describe(call), ": input is not inside a Buffer of this communicator"));
    }
    try {
      impl_.reduce_scatter(call, input.const_data_ptr(), output.mutable_data_ptr());
    } catch (const AgreedError& error) {
      impl_.guarded([&] { ZERO_FAIL(error.msg()); });
    }
    return begun_++;
  }

  [[noreturn]] void refuse(const std::string& message) override {
    impl_.guarded([&] { ZERO_FAIL("rank ", impl_.rank(), " of ", impl_.size(), " (", impl_.backend(), "): ", message); });
    ZERO_FAIL(message);  // not reached
  }

  void poll() override {
    impl_.guarded([this] {
      impl_.team_.check_failures();
      impl_.check_far_failures();
    });
  }
  void wait(std::int64_t /*ticket*/) override {}
  void wait_released(std::int64_t /*ticket*/) override {}
  std::int64_t begun() const override { return begun_; }
  std::int64_t finished() const override { return begun_; }
  std::int64_t released() const override { return begun_; }

 private:
  ClusterImpl& impl_;
  std::int64_t begun_ = 0;
};

std::shared_ptr<QueueImpl> ClusterImpl::form_queue(const Call& call) {
  enter_with(call, {});
  return std::make_shared<ClusterQueue>(*this, call.what);
}

}  // namespace zero
