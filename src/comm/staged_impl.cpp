// See staged_impl.h. All copies are on one stream and the host waits for it before inner's collective, so that the stream's order is
// all that keeps apart the uses of the staging memory: what is copied into it comes after what was copied out of it.
#include "comm/staged_impl.h"

#include <algorithm>
#include <utility>

#include "comm/errors.h"
#include "comm/team_impl.h"
#include "core/check.h"

namespace zero {

// Its operations are over when they have begun: nothing moves data while the ranks compute.
class StagedQueue final : public QueueImpl {
 public:
  StagedQueue(StagedImpl& impl, std::string what) : QueueImpl(std::move(what)), impl_(impl) {}

  std::int64_t begin(Call call, const at::Tensor& input, const at::Tensor& output) override {
    const std::int64_t bytes = call.bytes() * impl_.size();
    if (bytes > 0 && impl_.windows_.find(input.const_data_ptr(), bytes) == nullptr)
      refuse(detail::text(describe(call), ": input is not inside a Buffer of this communicator"));
    try {
      impl_.reduce_scatter(call, input.const_data_ptr(), output.mutable_data_ptr());
    } catch (const AgreedError& error) {
      impl_.fail(error.msg());  // all errors of a queue break the communicator
      ZERO_FAIL(error.msg());
    }
    return begun_++;
  }
  [[noreturn]] void refuse(const std::string& message) override {
    impl_.fail(message);
    ZERO_FAIL("rank ", impl_.rank(), " of ", impl_.size(), " (", impl_.backend(), "): ", message);
  }
  void poll() override { impl_.check_failures(); }
  void wait(std::int64_t /*ticket*/) override {}
  void wait_released(std::int64_t /*ticket*/) override {}
  std::int64_t begun() const override { return begun_; }
  std::int64_t finished() const override { return begun_; }
  std::int64_t released() const override { return begun_; }

 private:
  StagedImpl& impl_;
  std::int64_t begun_ = 0;
};

Communicator StagedImpl::make(const Communicator& inner, const MakeDevice& device) {
  ZERO_CHECK(inner.defined(), "zero::make_staged_communicator: the inner communicator is not attached to any ranks");
  ZERO_CHECK(inner.device().is_cpu(), "zero::make_staged_communicator: the inner communicator must be one of the CPU, not ",
             inner.backend());
  return Communicator(bring_up(inner.duplicate(), device));
}

std::shared_ptr<StagedImpl> StagedImpl::bring_up(Communicator inner, const MakeDevice& make_device) {
  std::shared_ptr<DeviceApi> device;
  std::string problem;
  try {
    device = make_device();
  } catch (const c10::Error& error) {
    problem = error.msg();
  } catch (const std::exception& error) {
    problem = error.what();
  }
  const auto all = inner.exchange(problem, "staging for a device");
  for (std::size_t r = 0; r < all.size(); ++r)
    if (!all[r].empty()) throw AgreedError(detail::text("zero::make_staged_communicator: rank ", r, ": ", all[r]));
  const auto bytes = staging_bytes_wanted(inner.size());
  auto staging = inner.allocate(bytes, "staging copies of a device");
  return std::make_shared<StagedImpl>(std::move(inner), std::move(device), std::move(staging));
}

StagedImpl::StagedImpl(Communicator inner, std::shared_ptr<DeviceApi> device, Buffer staging)
    : inner_(std::move(inner)),
      device_(std::move(device)),
      stream_(device_),
      event_(device_),
      staging_(std::move(staging)),
      host_(static_cast<char*>(staging_.data())),
      pinned_(device_->pin(host_, staging_.bytes())) {}

// The last copy out of the staging memory may be under way.
StagedImpl::~StagedImpl() {
  try {
    const OnDevice here(*device_);
    device_->record(event_, stream_);
    wait_on_host(*device_, event_, [] {});
  } catch (const std::exception& error) {
    fail(error.what());
  }
  if (pinned_) device_->unpin(host_);
}

std::string StagedImpl::here() const {
  return detail::text("rank ", rank(), " of ", size(), " (", backend(), "): ", describe(current_));
}

void StagedImpl::run(Call call, const std::function<void()>& body) {
  call.number = ++traffic_.calls;
  current_ = call;
  try {
    const OnDevice on(*device_);
    device_->record(event_, device_->compute_stream());
    device_->wait(stream_, event_);
    // Also after an error: callers free their memory then, which copies may still read.
    struct Fence {
      StagedImpl& impl;
      ~Fence() { impl.fence_after(); }
    } fence{*this};
    body();
  } catch (const AgreedError&) {
    throw;
  } catch (const c10::Error& error) {
    fail(error.msg());
    throw;
  } catch (const std::exception& error) {
    fail(error.what());
    throw;
  }
}

// An error of the device shows again in the next call.
void StagedImpl::fence_after() noexcept {
  try {
    device_->record(event_, stream_);
    device_->wait(device_->compute_stream(), event_);
  } catch (const std::exception& error) {
    fail(error.what());
  }
}

void StagedImpl::on_host(const std::function<void(CommunicatorImpl&)>& collective) {
  device_->record(event_, stream_);
  wait_on_host(*device_, event_, [this] {
    try {
      check_failures();
    } catch (const PeerFailure& error) {  // which inner has met in a call before this one
      throw PeerFailure(detail::text(here(), ": rank ", error.origin, ' ', error.why), error.origin, error.why);
    }
  });
  collective(*inner_.impl());
}

void StagedImpl::to_host(std::int64_t offset, const char* from, std::int64_t bytes) {
  if (bytes > 0) device_->copy(host_ + offset, from, bytes, stream_);
}

void StagedImpl::to_device(char* to, std::int64_t offset, std::int64_t bytes) {
  if (bytes > 0) device_->copy(to, host_ + offset, bytes, stream_);
}

void StagedImpl::in_chunks(std::int64_t bytes, std::int64_t pieces,
                           const std::function<void(std::int64_t, std::int64_t)>& step) {
  const std::int64_t chunk = staging_.bytes() / pieces / 64 * 64;
  std::int64_t begin = 0;
  do {
    step(begin, std::min(chunk, bytes - begin));
    begin += chunk;
  } while (begin < bytes);
}

void StagedImpl::reduce_scatter(Call call, const void* input, void* output) {
  const auto* from = static_cast<const char*>(input);
  auto* to = static_cast<char*>(output);
  const std::int64_t slice = call.bytes();
  run(call, [&] {
    in_chunks(slice, size(), [&](std::int64_t begin, std::int64_t bytes) {
      for (int r = 0; r < size(); ++r) to_host(r * bytes, from + r * slice + begin, bytes);
      on_host([&](CommunicatorImpl& inner) {
        call.count = bytes / call.item_bytes;
        inner.reduce_scatter(call, host_, host_ + rank() * bytes);
      });
      to_device(to + begin, rank() * bytes, bytes);
    });
    traffic_.data_bytes += slice * (size() - 1);
  });
}

void StagedImpl::all_gather(Call call, const void* shard, void* full) {
  const auto* from = static_cast<const char*>(shard);
  auto* to = static_cast<char*>(full);
  const std::int64_t slice = call.bytes();
  run(call, [&] {
    in_chunks(slice, size(), [&](std::int64_t begin, std::int64_t bytes) {
      to_host(rank() * bytes, from + begin, bytes);
      on_host([&](CommunicatorImpl& inner) {
        call.count = bytes;
        inner.all_gather(call, host_ + rank() * bytes, host_);
      });
      for (int r = 0; r < size(); ++r) to_device(to + r * slice + begin, r * bytes, bytes);
    });
    traffic_.data_bytes += slice * (size() - 1);
  });
}

void StagedImpl::all_reduce(Call call, void* data) {
  auto* bytes_of = static_cast<char*>(data);
  const std::int64_t all = call.bytes();
  run(call, [&] {
    in_chunks(all, 1, [&](std::int64_t begin, std::int64_t bytes) {
      to_host(0, bytes_of + begin, bytes);
      on_host([&](CommunicatorImpl& inner) {
        call.count = bytes / call.item_bytes;
        inner.all_reduce(call, host_);
      });
      to_device(bytes_of + begin, 0, bytes);
    });
    traffic_.data_bytes += 2 * (size() - 1) * all / size();
  });
}

void StagedImpl::broadcast(Call call, void* data) {
  auto* bytes_of = static_cast<char*>(data);
  const std::int64_t all = call.bytes();
  const bool root = call.root == rank();
  run(call, [&] {
    in_chunks(all, 1, [&](std::int64_t begin, std::int64_t bytes) {
      if (root) to_host(0, bytes_of + begin, bytes);
      on_host([&](CommunicatorImpl& inner) {
        call.count = bytes;
        inner.broadcast(call, host_);
      });
      if (!root) to_device(bytes_of + begin, 0, bytes);
    });
    if (root) traffic_.data_bytes += all * (size() - 1);
  });
}

void StagedImpl::refuse(const std::string& message) {
  inner_.impl()->refuse(message);
  ZERO_FAIL(message);  // not reached
}

std::vector<std::string> StagedImpl::exchange(Call call, const std::string& mine) {
  ++traffic_.calls;
  return inner_.impl()->exchange(call, mine);
}

std::shared_ptr<Buffer::Impl> StagedImpl::allocate(Call call) {
  ++traffic_.calls;
  call.number = traffic_.calls;
  current_ = call;
  return windows_.allocate(inner_, call, here(), [&] {
    const OnDevice on(*device_);
    const auto bytes = std::max<std::int64_t>(call.count, 64);
    void* data = device_->allocate(bytes);
    // The compute stream waits for each call's copies, so in its order the memory is free when nobody holds it any more.
    auto memory = Mapping::adopt(data, bytes, [device = device_, data] { device->free(data); });
    device_->zero(data, bytes, device_->compute_stream());
    return memory;
  });
}

std::shared_ptr<CommunicatorImpl> StagedImpl::split(Call call, int color, int key) {
  ++traffic_.calls;
  auto inner = inner_.impl()->split(call, color, key);
  if (inner == nullptr) return nullptr;
  return bring_up(Communicator(std::move(inner)), [this] { return device_; });
}

std::shared_ptr<QueueImpl> StagedImpl::open_queue(Call call) {
  ++traffic_.calls;
  inner_.impl()->exchange(call, {});
  return std::make_shared<StagedQueue>(*this, call.what);
}

Traffic StagedImpl::traffic() const {
  Traffic all = inner_.traffic();
  all.calls = traffic_.calls;
  all.data_bytes = traffic_.data_bytes;
  return all;
}

}  // namespace zero
