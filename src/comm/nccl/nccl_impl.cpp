// The collectives, see nccl_impl.h.
#include "comm/nccl/nccl_impl.h"

#include <cstdlib>
#include <cstring>
#include <utility>

#include "comm/errors.h"
#include "comm/nccl/averaging.h"
#include "comm/nccl/nccl_queue.h"
#include "core/check.h"

namespace zero {
namespace {

// How long the end of a communicator waits for the ranks that end theirs.
constexpr std::chrono::milliseconds kFinish = std::chrono::seconds(5);

bool wants_comparison() {
  const char* value = std::getenv("ZERO_NCCL_COMPARE");
  return value != nullptr && *value != '\0' && std::strcmp(value, "0") != 0;
}

ncclDataType_t nccl_type(kernels::DType type) {
  switch (type) {
    case kernels::DType::f64:
      return ncclFloat64;
    case kernels::DType::f16:
      return ncclFloat16;
    case kernels::DType::bf16:
      return ncclBfloat16;
    case kernels::DType::f32:
      break;
  }
  return ncclFloat32;
}

c10::ScalarType scalar_type(kernels::DType type) {
  switch (type) {
    case kernels::DType::f64:
      return c10::ScalarType::Double;
    case kernels::DType::f16:
      return c10::ScalarType::Half;
    case kernels::DType::bf16:
      return c10::ScalarType::BFloat16;
    case kernels::DType::f32:
      break;
  }
  return c10::ScalarType::Float;
}

}  // namespace

NcclImpl::NcclImpl(Communicator control, std::shared_ptr<NcclComm> comm)
    : control_(std::move(control)),
      comm_(std::move(comm)),
      device_(*comm_->device()),
      rank_(control_.rank()),
      size_(control_.size()),
      comparing_(wants_comparison()),
      ready_(comm_->device()),
      over_(comm_->device()),
      exceptions_(std::uncaught_exceptions()),
      probe_(comm_->device()) {}

// Local, as far as it can be: a rank that has failed, or whose peers have, doesn't wait for anybody: ncclCommFinalize would.
NcclImpl::~NcclImpl() {
  try {
    if (broken_ != nullptr || std::uncaught_exceptions() > exceptions_) {
      comm_->abort();
      return;
    }
    check();
    const OnDevice here(device_);
    device_.record(over_, comm_->stream());
    const auto began = Clock::now();
    wait_on_host(device_, over_, [&] {
      check();
      if (Clock::now() - began > comm_->policy.timeout) ZERO_FAIL("the device doesn't get on");
    });
    comm_->finish(kFinish);
  } catch (const PeerFailure&) {
    comm_->abort();
  } catch (const std::exception& error) {
    fail(error.what());
    comm_->abort();
  }
}

std::string NcclImpl::here() const {
  return detail::text("rank ", rank_, " of ", size_, " (", backend(), "): ", describe(current_));
}

void NcclImpl::guarded(const Call& call, const std::function<void()>& body) {
  if (broken_ != nullptr) std::rethrow_exception(broken_);
  current_ = call;
  try {
    body();
  } catch (const AgreedError&) {
    throw;
  } catch (const PeerFailure& error) {
    const auto message = detail::text(here(), ": rank ", error.origin, ' ', error.why);
    break_down(std::make_exception_ptr(PeerFailure(message, error.origin, error.why)));
    std::rethrow_exception(broken_);
  } catch (const std::exception& error) {
    const auto* ours = dynamic_cast<const c10::Error*>(&error);
    const std::string why = ours != nullptr ? ours->msg() : error.what();
    const auto message = detail::text(here(), ": ", why);
    break_down(std::make_exception_ptr(c10::Error(message)));
    control_.fail(why);
    std::rethrow_exception(broken_);
  }
}

void NcclImpl::break_down(std::exception_ptr error) noexcept {
  broken_ = std::move(error);
  group_.clear();
  comm_->abort();
  try {
    // Callers free their memory now: kernels that are about to end mustn't find it in other hands.
    const OnDevice on(device_);
    fence_after();
  } catch (const std::exception&) {
    // The device is what has failed.
  }
}

void NcclImpl::check_failures() {
  guarded(current_, [this] { check(); });
}

void NcclImpl::check() {
  comm_->check();
  control_.impl()->check_failures();
  if (!probing_) return;
  if (device_.done(probe_)) {
    probing_ = false;
  } else if (const auto timeout = comm_->policy.timeout; Clock::now() - probed_ > timeout) {
    ZERO_FAIL(
        describe(probed_call_), " hasn't been finished by the device within ", readable(timeout),
        ", the timeout: a rank hasn't called it, or calls something else (ZERO_NCCL_COMPARE=1 finds out), or a device hangs");
  }
}

void NcclImpl::watch_progress() {
  if (probing_) return;
  device_.record(probe_, comm_->stream());
  probing_ = true;
  probed_ = Clock::now();
  probed_call_ = current_;
}

void NcclImpl::enter(Call& call) {
  call.number = ++number_;
  current_ = call;
  ++traffic_.calls;
  check();
}

void NcclImpl::compare(const Call& call, const std::string& note) {
  if (!comparing_) return;
  const auto all = control_.exchange(std::string(reinterpret_cast<const char*>(&call), sizeof call) + note, "comparing calls");
  std::vector<Call> calls(all.size());
  for (std::size_t r = 0; r < all.size(); ++r) std::memcpy(static_cast<void*>(&calls[r]), all[r].data(), sizeof(Call));
  if (call.op == Op::refuse) throw AgreedError(note);
  for (std::size_t r = 0; r < all.size(); ++r) {
    if (calls[r].op == Op::refuse)
      throw AgreedError(detail::text(here(), ": refused by rank ", r, ": ", all[r].substr(sizeof(Call))));
  }
  for (std::size_t r = 1; r < all.size(); ++r) {
    if (calls[r].agrees_with(calls[0])) continue;
    throw AgreedError(detail::text(here(), ": the ranks disagree: rank 0 calls ", describe(calls[0]), "; rank ", r, " calls ",
                                   describe(calls[r])));
  }
}

void NcclImpl::refuse(const std::string& message) {
  const auto full = detail::text("rank ", rank_, " of ", size_, " (", backend(), "): ", message);
  Call call;
  call.op = Op::refuse;
  guarded(call, [&] {
    enter(call);
    compare(call, full);
    // The peers go on to NCCL, where nobody will join them: they are told.
    ZERO_FAIL(message);
  });
  ZERO_FAIL(full);  // not reached
}

void NcclImpl::fence_before() {
  device_.record(ready_, device_.compute_stream());
  device_.wait(comm_->stream(), ready_);
}

void NcclImpl::fence_after() {
  device_.record(over_, comm_->stream());
  device_.wait(device_.compute_stream(), over_);
}

void NcclImpl::run(Work work) {
  if (grouping_ > 0) {
    group_.push_back(std::move(work));
    return;
  }
  fence_before();
  launch({work});
  fence_after();
}

void NcclImpl::launch(const std::vector<Work>& works) {
  const auto& api = comm_->api();
  const bool grouped = works.size() > 1;
  if (grouped) {
    comm_->settle(api.GroupStart(), "ncclGroupStart");
    for (const auto& work : works) {
      const ncclResult_t result = work.start();
      if (result == ncclSuccess || result == ncclInProgress) continue;
      (void)api.GroupEnd();  // or the thread's next call would still be in the group
      comm_->settle(result, work.name);
    }
    comm_->settle(api.GroupEnd(), "ncclGroupEnd");
  } else {
    for (const auto& work : works) comm_->settle(work.start(), work.name);
  }
  for (const auto& work : works)
    if (work.finish) work.finish();
  watch_progress();
}

void NcclImpl::group_begin() { ++grouping_; }

void NcclImpl::group_end() {
  if (--grouping_ > 0) return;
  const auto works = std::exchange(group_, {});
  if (works.empty() && broken_ == nullptr) return;
  guarded(current_, [&] {
    const OnDevice here(device_);
    fence_before();
    launch(works);
    fence_after();
  });
}

// The peers' calls will find nobody.
void NcclImpl::group_drop() noexcept {
  --grouping_;
  if (broken_ != nullptr || group_.empty()) return group_.clear();
  const auto why = detail::text(here(), ": an exception ended the group of calls that this one is part of");
  break_down(std::make_exception_ptr(c10::Error(why)));
  control_.fail(why);
}

NcclImpl::Work NcclImpl::reduction(const Call& call, const void* input, void* output, bool scatter) {
  const auto how = averaging(call.real, call.divisor, size_, comm_->api().RedOpCreatePreMulSum != nullptr);
  const ncclDataType_t type = nccl_type(call.real);
  const ncclRedOp_t op = how.by_nccl ? ncclAvg : how.before != 1 ? comm_->scaled_sum(type, how.before) : ncclSum;
  const auto count = static_cast<std::size_t>(call.count);
  Work work;
  work.name = scatter ? "ncclReduceScatter" : "ncclAllReduce";
  work.start = [this, scatter, input, output, count, type, op] {
    const auto call_it = scatter ? comm_->api().ReduceScatter : comm_->api().AllReduce;
    return call_it(input, output, count, type, op, comm_->get(), comm_->cuda_stream());
  };
  if (how.after != 1) {
    work.finish = [this, output, dtype = scalar_type(call.real), n = call.count, divisor = how.after] {
      device_.divide(output, dtype, n, divisor, comm_->stream());
    };
  }
  return work;
}

void NcclImpl::reduce_scatter(Call call, const void* input, void* output) {
  guarded(call, [&] {
    enter(call);
    compare(call);
    const OnDevice on(device_);
    if (call.count > 0) run(reduction(call, input, output, true));
    traffic_.data_bytes += call.bytes() * (size_ - 1);
  });
}

void NcclImpl::all_gather(Call call, const void* shard, void* full) {
  guarded(call, [&] {
    enter(call);
    compare(call);
    const OnDevice on(device_);
    const auto count = static_cast<std::size_t>(call.bytes());
    if (count > 0) {
      run({"ncclAllGather",
           [this, shard, full, count] {
             return comm_->api().AllGather(shard, full, count, ncclUint8, comm_->get(), comm_->cuda_stream());
           },
           nullptr});
    }
    traffic_.data_bytes += call.bytes() * (size_ - 1);
  });
}

void NcclImpl::all_reduce(Call call, void* data) {
  guarded(call, [&] {
    enter(call);
    compare(call);
    const OnDevice on(device_);
    if (call.count > 0) run(reduction(call, data, data, false));
    traffic_.data_bytes += 2 * (size_ - 1) * call.bytes() / size_;
  });
}

void NcclImpl::broadcast(Call call, void* data) {
  guarded(call, [&] {
    enter(call);
    compare(call);
    const OnDevice on(device_);
    const auto count = static_cast<std::size_t>(call.bytes());
    if (count > 0) {
      run({"ncclBroadcast",
           [this, data, count, root = call.root] {
             return comm_->api().Broadcast(data, data, count, ncclUint8, root, comm_->get(), comm_->cuda_stream());
           },
           nullptr});
    }
    if (call.root == rank_) traffic_.data_bytes += call.bytes() * (size_ - 1);
  });
}

std::vector<std::string> NcclImpl::exchange(Call call, const std::string& mine) {
  std::vector<std::string> all;
  guarded(call, [&] {
    enter(call);
    all = control_.impl()->exchange(call, mine);
    traffic_.control_bytes += static_cast<std::int64_t>(mine.size()) * (size_ - 1);
  });
  return all;
}

void NcclImpl::set_wait_policy(const WaitPolicy& policy) {
  comm_->policy = policy;
  control_.set_wait_policy(policy);
}

Traffic NcclImpl::traffic() const {
  Traffic all = traffic_;
  all.between_nodes_bytes = control_.traffic().between_nodes_bytes;  // what NCCL sends where, it doesn't say
  return all;
}

}  // namespace zero
