// The Communicator handle: checks tensors, describes the call, forwards to the backend. See zero/communicator.h.
//
// An argument that is wrong on one rank only must not leave the others waiting: it is refused as a collective.
#include "zero/communicator.h"

#include <utility>

#include "comm/arguments.h"
#include "comm/communicator_impl.h"
#include "core/check.h"

namespace zero {
namespace {

using detail::text;

CommunicatorImpl& attached(const std::shared_ptr<CommunicatorImpl>& impl) {
  ZERO_CHECK(impl != nullptr, "zero::Communicator: not attached to any ranks");
  return *impl;
}

Call call_of(Op op, const std::string& what) {
  Call call;
  call.op = op;
  call.set_what(what);
  return call;
}

}  // namespace

Communicator::Communicator(std::shared_ptr<CommunicatorImpl> impl) : impl_(std::move(impl)) {}

int Communicator::rank() const { return attached(impl_).rank(); }
int Communicator::size() const { return attached(impl_).size(); }
const char* Communicator::backend() const { return attached(impl_).backend(); }
int Communicator::local_size() const { return attached(impl_).local_size(); }
int Communicator::nodes() const { return attached(impl_).nodes(); }
c10::Device Communicator::device() const { return attached(impl_).device(); }

Buffer Communicator::allocate(std::int64_t bytes, const std::string& what, Backing backing) const {
  auto& impl = attached(impl_);
  Call call = call_of(Op::allocate, what);
  call.count = bytes;
  call.root = static_cast<std::int32_t>(backing);
  Arguments arguments(impl, call);
  arguments.require(bytes >= 0, text("bytes is ", bytes));
  arguments.check(impl);
  return Buffer(impl.allocate(call));
}

void Communicator::reduce_scatter(const at::Tensor& input, const at::Tensor& output, double divisor,
                                  const std::string& what) const {
  auto& impl = attached(impl_);
  Call call = call_of(Op::reduce_scatter, what);
  Arguments arguments(impl, call);
  arguments.slices(output, "output", input, "input");
  arguments.sums(output, divisor);
  arguments.check(impl);
  impl.reduce_scatter(call, input.const_data_ptr(), output.mutable_data_ptr());
}

void Communicator::all_gather(const at::Tensor& shard, const at::Tensor& full, const std::string& what) const {
  auto& impl = attached(impl_);
  Call call = call_of(Op::all_gather, what);
  Arguments arguments(impl, call);
  arguments.slices(shard, "shard", full, "full");
  arguments.moves(shard);
  arguments.check(impl);
  impl.all_gather(call, shard.const_data_ptr(), full.mutable_data_ptr());
}

void Communicator::all_reduce(const at::Tensor& tensor, double divisor, const std::string& what) const {
  auto& impl = attached(impl_);
  Call call = call_of(Op::all_reduce, what);
  Arguments arguments(impl, call);
  arguments.tensor(tensor, "tensor");
  arguments.sums(tensor, divisor);
  arguments.check(impl);
  impl.all_reduce(call, tensor.mutable_data_ptr());
}

void Communicator::broadcast(const at::Tensor& tensor, int root, const std::string& what) const {
  auto& impl = attached(impl_);
  Call call = call_of(Op::broadcast, what);
  call.root = root;
  Arguments arguments(impl, call);
  arguments.tensor(tensor, "tensor");
  arguments.require(root >= 0 && root < impl.size(), text("root is ", root, ", of ", impl.size(), " ranks"));
  arguments.moves(tensor);
  arguments.check(impl);
  impl.broadcast(call, tensor.mutable_data_ptr());
}

std::vector<std::string> Communicator::exchange(const std::string& mine, const std::string& what) const {
  return attached(impl_).exchange(call_of(Op::exchange, what), mine);
}

void Communicator::barrier(const std::string& what) const { attached(impl_).exchange(call_of(Op::barrier, what), {}); }

Communicator Communicator::split(int color, int key) const {
  return Communicator(attached(impl_).split(call_of(Op::split, {}), color, key));
}

Communicator Communicator::duplicate() const {
  return Communicator(attached(impl_).split(call_of(Op::duplicate, {}), 0, rank()));
}

ReduceQueue Communicator::open_queue(const std::string& what) const {
  auto queue = attached(impl_).open_queue(call_of(Op::open_queue, what));
  queue->keep(impl_);
  return ReduceQueue(std::move(queue));
}

void Communicator::fail(const std::string& why) const { attached(impl_).fail(why); }
void Communicator::set_wait_policy(const WaitPolicy& policy) const { attached(impl_).set_wait_policy(policy); }
WaitPolicy Communicator::wait_policy() const { return attached(impl_).wait_policy(); }
Traffic Communicator::traffic() const { return attached(impl_).traffic(); }

}  // namespace zero
