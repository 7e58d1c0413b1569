// The Communicator handle: checks tensors, describes the call, forwards to the backend. See zero/communicator.h.
//
// An argument that is wrong on one rank only must not leave the others waiting: it is refused as a collective.
#include "zero/communicator.h"

#include <cmath>
#include <utility>

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

std::string wrong_tensor(const at::Tensor& tensor, const char* name) {
  if (!tensor.defined()) return text(name, " is not defined");
  if (!tensor.device().is_cpu()) return text(name, " is on ", tensor.device().str(), "; this communicator works on the CPU");
  if (tensor.layout() != at::kStrided) return text(name, " is not a dense tensor");
  if (!tensor.is_contiguous()) return text(name, " is not contiguous");
  return {};
}

// Describes tensors to the backend, or says what is wrong with them.
class Arguments {
 public:
  Arguments(const CommunicatorImpl& impl, Call& call) : impl_(impl), call_(call) {}

  void tensor(const at::Tensor& tensor, const char* name) {
    if (ok()) wrong_ = wrong_tensor(tensor, name);
  }

  // small × N elements, as large; they are apart, or small is this rank's slice of large.
  void slices(const at::Tensor& small, const char* small_name, const at::Tensor& large, const char* large_name) {
    tensor(small, small_name);
    tensor(large, large_name);
    if (!ok()) return;
    if (small.scalar_type() != large.scalar_type()) {
      wrong_ = text(small_name, " is ", c10::toString(small.scalar_type()), " but ", large_name, " is ",
                    c10::toString(large.scalar_type()));
    } else if (small.numel() * impl_.size() != large.numel()) {
      wrong_ = text(large_name, " must have ", impl_.size(), " (ranks) times the elements of ", small_name, ": has ",
                    large.numel(), ", not ", impl_.size(), " × ", small.numel());
    } else if (small.numel() > 0) {
      const auto* begin = static_cast<const char*>(large.const_data_ptr());
      const auto* part = static_cast<const char*>(small.const_data_ptr());
      const auto bytes = static_cast<std::ptrdiff_t>(small.nbytes());
      const bool apart = part + bytes <= begin || begin + bytes * impl_.size() <= part;
      if (!apart && part != begin + impl_.rank() * bytes) {
        wrong_ = text(small_name, " overlaps ", large_name, " but is not this rank's slice of it");
      }
    }
  }

  // Numbers that are added.
  void sums(const at::Tensor& tensor, double divisor) {
    if (!ok()) return;
    using c10::ScalarType;
    call_.dtype = tensor.scalar_type();
    call_.count = tensor.numel() * (tensor.is_complex() ? 2 : 1);
    call_.divisor = divisor;
    switch (call_.dtype) {
      case ScalarType::Float:
      case ScalarType::ComplexFloat:
        call_.real = kernels::DType::f32;
        break;
      case ScalarType::Double:
      case ScalarType::ComplexDouble:
        call_.real = kernels::DType::f64;
        break;
      case ScalarType::Half:
      case ScalarType::ComplexHalf:
        call_.real = kernels::DType::f16;
        break;
      case ScalarType::BFloat16:
        call_.real = kernels::DType::bf16;
        break;
      default:
        wrong_ = text("cannot add tensors of type ", c10::toString(call_.dtype));
        return;
    }
    call_.item_bytes = kernels::size_of(call_.real);
    if (divisor == 0 || std::isnan(divisor)) wrong_ = text("divisor is ", divisor);
  }

  // Bytes that are moved.
  void moves(const at::Tensor& tensor) {
    if (!ok()) return;
    call_.dtype = tensor.scalar_type();
    call_.count = static_cast<std::int64_t>(tensor.nbytes());
  }

  bool ok() const { return wrong_.empty(); }
  void require(bool condition, const std::string& message) {
    if (ok() && !condition) wrong_ = message;
  }

  void check(CommunicatorImpl& impl) const {
    if (ok()) return;
    impl.refuse(text(name_of(call_.op), call_.what[0] != '\0' ? text(" '", call_.what, '\'') : std::string(), ": ", wrong_));
  }

 private:
  const CommunicatorImpl& impl_;
  Call& call_;
  std::string wrong_;
};

}  // namespace

Communicator::Communicator(std::shared_ptr<CommunicatorImpl> impl) : impl_(std::move(impl)) {}

int Communicator::rank() const { return attached(impl_).rank(); }
int Communicator::size() const { return attached(impl_).size(); }
const char* Communicator::backend() const { return attached(impl_).backend(); }
int Communicator::local_size() const { return attached(impl_).local_size(); }
int Communicator::nodes() const { return attached(impl_).nodes(); }

Buffer Communicator::allocate(std::int64_t bytes, const std::string& what) const {
  auto& impl = attached(impl_);
  Call call = call_of(Op::allocate, what);
  call.count = bytes;
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

void Communicator::fail(const std::string& why) const { attached(impl_).fail(why); }
void Communicator::set_wait_policy(const WaitPolicy& policy) const { attached(impl_).set_wait_policy(policy); }
WaitPolicy Communicator::wait_policy() const { return attached(impl_).wait_policy(); }
Traffic Communicator::traffic() const { return attached(impl_).traffic(); }

}  // namespace zero
