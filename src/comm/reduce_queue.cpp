// The ReduceQueue handle: checks tensors, describes the operation, forwards to the backend. See zero/communicator.h.
#include <utility>

#include "comm/arguments.h"
#include "comm/queue_impl.h"
#include "core/check.h"
#include "zero/communicator.h"

namespace zero {
namespace {

QueueImpl& open(const std::shared_ptr<QueueImpl>& impl) {
  ZERO_CHECK(impl != nullptr, "zero::ReduceQueue: not open");
  return *impl;
}

QueueImpl& with_ticket(const std::shared_ptr<QueueImpl>& impl, std::int64_t ticket) {
  QueueImpl& queue = open(impl);
  ZERO_CHECK(ticket >= 0 && ticket < queue.begun(), "zero::ReduceQueue '", queue.what(), "': no operation has the ticket ",
             ticket, "; ", queue.begun(), " have begun");
  return queue;
}

}  // namespace

ReduceQueue::ReduceQueue(std::shared_ptr<QueueImpl> impl) : impl_(std::move(impl)) {}

std::int64_t ReduceQueue::begin(const at::Tensor& input, const at::Tensor& output, double divisor,
                                const std::string& what) const {
  QueueImpl& queue = open(impl_);
  Call call;
  call.op = Op::queued;
  call.number = queue.begun();
  call.set_what(what.empty() ? queue.what() : what);
  Arguments arguments(queue.owner(), call);
  arguments.slices(output, "output", input, "input");
  arguments.apart(output, "output", input, "input");
  arguments.sums(output, divisor);
  if (!arguments.ok()) queue.refuse(arguments.message());
  return queue.begin(call, input, output);
}

void ReduceQueue::poll() const { open(impl_).poll(); }
bool ReduceQueue::finished(std::int64_t ticket) const { return with_ticket(impl_, ticket).finished() > ticket; }
bool ReduceQueue::released(std::int64_t ticket) const { return with_ticket(impl_, ticket).released() > ticket; }
void ReduceQueue::wait(std::int64_t ticket) const { with_ticket(impl_, ticket).wait(ticket); }
void ReduceQueue::wait_released(std::int64_t ticket) const { with_ticket(impl_, ticket).wait_released(ticket); }
std::int64_t ReduceQueue::begun() const { return open(impl_).begun(); }

}  // namespace zero
