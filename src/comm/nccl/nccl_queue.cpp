// See nccl_queue.h.
#include "comm/nccl/nccl_queue.h"

#include <utility>

#include "core/check.h"

namespace zero {

// What is under way goes on; its outputs are the allocator's again, in the compute stream's order.
NcclQueue::~NcclQueue() {
  if (under_way_.empty()) return;
  try {
    impl_.device_.wait(impl_.device_.compute_stream(), *under_way_.back().over);
  } catch (const std::exception& error) {
    impl_.fail(error.what());
  }
}

void NcclQueue::retire() const {
  while (!under_way_.empty() && impl_.device_.done(*under_way_.front().over)) {
    spare_.push_back(std::move(under_way_.front().over));
    under_way_.pop_front();
    ++finished_;
  }
}

std::int64_t NcclQueue::finished() const {
  retire();
  return finished_;
}

std::int64_t NcclQueue::begin(Call call, const at::Tensor& input, const at::Tensor& output) {
  const std::int64_t ticket = begun();
  call.number = ticket;
  impl_.guarded(call, [&] {
    ZERO_CHECK(impl_.grouping_ == 0, "operations of a queue can't be part of a group");
    impl_.check();
    const OnDevice here(impl_.device_);
    retire();
    const std::int64_t bytes = call.bytes() * impl_.size();
    auto window = impl_.windows_.find(input.const_data_ptr(), bytes);
    ZERO_CHECK(window != nullptr || bytes == 0, "input is not inside a Buffer of this communicator");
    impl_.compare(call);
    std::unique_ptr<OwnedEvent> over;
    if (spare_.empty()) {
      over = std::make_unique<OwnedEvent>(impl_.comm_->device());
    } else {
      over = std::move(spare_.back());
      spare_.pop_back();
    }
    impl_.fence_before();
    if (call.count > 0) impl_.launch({impl_.reduction(call, input.const_data_ptr(), output.mutable_data_ptr(), true)});
    impl_.device_.record(*over, impl_.comm_->stream());
    ++impl_.traffic_.calls;
    impl_.traffic_.data_bytes += call.bytes() * (impl_.size() - 1);
    under_way_.push_back({call, std::move(over), std::move(window), output});
  });
  return ticket;
}

void NcclQueue::refuse(const std::string& message) {
  impl_.guarded(impl_.current_, [&] { ZERO_FAIL(message); });
  ZERO_FAIL(message);  // not reached
}

void NcclQueue::poll() {
  impl_.guarded(impl_.current_, [this] {
    impl_.check();
    retire();
  });
}

void NcclQueue::wait(std::int64_t ticket) {
  const std::int64_t index = ticket - finished_;
  if (index < 0) return;
  Operation& operation = under_way_[static_cast<std::size_t>(index)];
  impl_.guarded(operation.call, [&] {
    impl_.check();
    const OnDevice here(impl_.device_);
    impl_.device_.wait(impl_.device_.compute_stream(), *operation.over);
    for (std::int64_t i = 0; i <= index; ++i) under_way_[static_cast<std::size_t>(i)].output = at::Tensor();
  });
}

}  // namespace zero
