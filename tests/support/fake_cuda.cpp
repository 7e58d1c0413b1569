// See fake_cuda.h.
#include "fake_cuda.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "core/check.h"

namespace fake {
namespace {

// The last word of a test that would hang: there is no way to throw out of a stream's thread into the test.
[[noreturn]] void give_up(const std::string& what) {
  std::fprintf(stderr, "fake device: %s: not over after %d s\n", what.c_str(), static_cast<int>(kPatience.count()));
  std::abort();
}

struct FakeEvent {
  std::mutex mutex;
  std::condition_variable changed;
  std::int64_t recorded = 0;
  std::int64_t reached = 0;
};

// Shared: an event may be destroyed while streams still wait for it, as CUDA's may.
using EventHandle = std::shared_ptr<FakeEvent>;
EventHandle& handle_of(zero::DeviceApi::Event event) { return *static_cast<EventHandle*>(event); }
Stream& stream_of(zero::DeviceApi::Stream stream) { return *static_cast<Stream*>(stream); }

template <typename T>
void divide_by(void* data, std::int64_t count, double divisor) {
  using Wide = std::conditional_t<std::is_same_v<T, double>, double, float>;
  auto* values = static_cast<T*>(data);
  for (std::int64_t i = 0; i < count; ++i)
    values[i] = static_cast<T>(static_cast<Wide>(values[i]) / static_cast<Wide>(divisor));
}

}  // namespace

Stream::Stream(std::string name, unsigned seed) : name_(std::move(name)), random_(seed), thread_([this] { work(); }) {}

Stream::~Stream() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    ending_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

void Stream::push(std::function<void()> task) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    tasks_.push_back(std::move(task));
  }
  changed_.notify_all();
}

bool Stream::idle() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return tasks_.empty();
}

void Stream::synchronize() {
  std::unique_lock<std::mutex> lock(mutex_);
  if (!changed_.wait_for(lock, kPatience, [this] { return tasks_.empty(); })) give_up("stream " + name_);
}

void Stream::work() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return ending_ || !tasks_.empty(); });
    if (tasks_.empty()) return;
    const auto task = tasks_.front();
    lock.unlock();
    if (const auto most = dawdle_.load(); most > 0 && random_() % 4 == 0)
      std::this_thread::sleep_for(std::chrono::microseconds(static_cast<std::int64_t>(random_()) % most));
    task();
    lock.lock();
    tasks_.pop_front();
    changed_.notify_all();
  }
}

FakeDevice::FakeDevice(int index, unsigned seed)
    : identity_text("fake GPU " + std::to_string(index)),
      default_("compute", seed * 101 + static_cast<unsigned>(index)),
      seed_(seed) {}

FakeDevice::~FakeDevice() = default;

void FakeDevice::synchronize() {
  std::vector<fake::Stream*> all{&default_, current_};
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (const auto& stream : streams_) all.push_back(stream.get());
  }
  for (auto* stream : all) stream->synchronize();
}

std::vector<std::string> FakeDevice::log() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return log_;
}

void FakeDevice::note(const std::string& line) {
  const std::lock_guard<std::mutex> lock(mutex_);
  log_.push_back(line);
}

int FakeDevice::live_streams() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return static_cast<int>(streams_.size());
}

zero::DeviceApi::Stream FakeDevice::create_stream() {
  const std::lock_guard<std::mutex> lock(mutex_);
  streams_.push_back(std::make_unique<fake::Stream>("private", seed_ * 7 + 3));
  return streams_.back().get();
}

void FakeDevice::destroy_stream(DeviceApi::Stream stream) noexcept {
  std::unique_ptr<fake::Stream> gone;
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto it = std::find_if(streams_.begin(), streams_.end(), [&](const auto& known) { return known.get() == stream; });
  gone = std::move(*it);
  streams_.erase(it);
}

zero::DeviceApi::Event FakeDevice::create_event() {
  ++events_;
  return new EventHandle(std::make_shared<FakeEvent>());
}

void FakeDevice::destroy_event(Event event) noexcept {
  --events_;
  delete static_cast<EventHandle*>(event);
}

void FakeDevice::record(Event event, DeviceApi::Stream stream) {
  note("record " + stream_of(stream).name());
  const EventHandle its = handle_of(event);
  std::int64_t number = 0;
  {
    const std::lock_guard<std::mutex> lock(its->mutex);
    number = ++its->recorded;
  }
  stream_of(stream).push([its, number] {
    const std::lock_guard<std::mutex> lock(its->mutex);
    its->reached = std::max(its->reached, number);
    its->changed.notify_all();
  });
}

void FakeDevice::wait(DeviceApi::Stream stream, Event event) {
  note(stream_of(stream).name() + " waits");
  const bool is_private = stream_of(stream).name() == "private";
  if (omit == (is_private ? Omit::waits_of_private_streams : Omit::waits_of_the_compute_stream)) return;
  const EventHandle its = handle_of(event);
  std::int64_t number = 0;
  {
    const std::lock_guard<std::mutex> lock(its->mutex);
    number = its->recorded;
  }
  stream_of(stream).push([its, number] {
    std::unique_lock<std::mutex> lock(its->mutex);
    if (!its->changed.wait_for(lock, kPatience, [&] { return its->reached >= number; })) give_up("a wait for an event");
  });
}

bool FakeDevice::done(Event event) {
  const EventHandle its = handle_of(event);
  const std::lock_guard<std::mutex> lock(its->mutex);
  return its->reached >= its->recorded;
}

void FakeDevice::copy(void* to, const void* from, std::int64_t bytes, DeviceApi::Stream stream) {
  if (on_copy) on_copy();
  stream_of(stream).push([=] { std::memcpy(to, from, static_cast<std::size_t>(bytes)); });
}

void FakeDevice::zero(void* data, std::int64_t bytes, DeviceApi::Stream stream) {
  stream_of(stream).push([=] { std::memset(data, 0, static_cast<std::size_t>(bytes)); });
}

void FakeDevice::divide(void* data, c10::ScalarType dtype, std::int64_t count, double divisor, DeviceApi::Stream stream) {
  note("divide " + stream_of(stream).name());
  stream_of(stream).push([=] {
    if (dtype == c10::ScalarType::Float) divide_by<float>(data, count, divisor);
    if (dtype == c10::ScalarType::Double) divide_by<double>(data, count, divisor);
    if (dtype == c10::ScalarType::Half) divide_by<c10::Half>(data, count, divisor);
    if (dtype == c10::ScalarType::BFloat16) divide_by<c10::BFloat16>(data, count, divisor);
  });
}

void* FakeDevice::allocate(std::int64_t bytes) {
  ZERO_CHECK(bytes <= room, "the fake device is out of memory");
  void* data = std::aligned_alloc(64, static_cast<std::size_t>((bytes + 63) / 64 * 64));
  std::memset(data, 0x5a, static_cast<std::size_t>(bytes));
  ++live_;
  return data;
}

// In the order of the stream that is current, as LibTorch's allocator reuses memory.
void FakeDevice::free(void* data) noexcept {
  --live_;
  current_->push([data] { std::free(data); });
}

bool FakeDevice::pin(void* /*data*/, std::int64_t /*bytes*/) {
  if (can_pin) ++pinned_;
  return can_pin;
}

void FakeDevice::unpin(void* /*data*/) noexcept { --pinned_; }

}  // namespace fake
