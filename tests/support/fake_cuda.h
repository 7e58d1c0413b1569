// A double of the device for tests on the CPU. A stream is a queue of work with a thread of its own that dawdles at random, so that
// what a forgotten fence leaves to chance goes wrong here; "device memory" is host memory, and tensors in it are of type CPU.
//
// Each rank has a FakeDevice. The thread that drives it is the host: what it reads and writes without synchronize() is at its own risk,
// as on a real device.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "comm/nccl/device_api.h"

namespace fake {

/// Every wait in the doubles ends after this long, with an exception: tests fail, they don't hang.
constexpr std::chrono::seconds kPatience{20};

class Stream {
 public:
  explicit Stream(std::string name, unsigned seed = 1);
  ~Stream();  ///< after what was put on it
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  void push(std::function<void()> task);
  bool idle() const;
  void synchronize();
  const std::string& name() const { return name_; }
  /// Sleeps up to so long before every fourth task or so.
  void dawdle(std::chrono::microseconds most) { dawdle_.store(most.count()); }

 private:
  void work();

  std::string name_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> tasks_;  ///< the first one is being executed
  bool ending_ = false;
  std::atomic<std::int64_t> dawdle_{300};
  std::minstd_rand random_;
  std::thread thread_;
};

/// ThreadSanitizer sees what a fence left out does (and reports it, as it should): those tests are not for it.
#ifdef __SANITIZE_THREAD__
constexpr bool kMayRace = false;
#else
constexpr bool kMayRace = true;
#endif

/// Which fence a FakeDevice leaves out, to see a test fail.
enum class Omit { nothing, waits_of_private_streams, waits_of_the_compute_stream };

class FakeDevice final : public zero::DeviceApi {
 public:
  explicit FakeDevice(int index, unsigned seed = 1);
  ~FakeDevice() override;

  // What tests use.
  fake::Stream& compute() { return *current_; }
  /// Another current stream, as by a stream guard.
  void use(fake::Stream& stream) { current_ = &stream; }
  fake::Stream& default_stream() { return default_; }
  /// The first one made that still is.
  fake::Stream& private_stream() { return *streams_.front(); }
  /// Everything on every stream is over.
  void synchronize();
  std::vector<std::string> log() const;
  void note(const std::string& line);
  int live_allocations() const { return live_.load(); }
  int live_events() const { return events_.load(); }
  int live_streams() const;
  int pinned() const { return pinned_.load(); }
  Omit omit = Omit::nothing;
  std::string identity_text;
  bool can_pin = true;
  std::int64_t room = std::int64_t{1} << 40;  ///< larger allocations fail
  std::function<void()> on_copy;              ///< may throw

  // DeviceApi.
  c10::Device device() const override { return c10::Device(c10::DeviceType::CPU); }
  std::string identity() const override { return identity_text; }
  int enter() override { return 0; }
  void leave(int) noexcept override {}
  DeviceApi::Stream create_stream() override;
  void destroy_stream(DeviceApi::Stream stream) noexcept override;
  DeviceApi::Stream compute_stream() override { return current_; }
  Event create_event() override;
  void destroy_event(Event event) noexcept override;
  void record(Event event, DeviceApi::Stream stream) override;
  void wait(DeviceApi::Stream stream, Event event) override;
  bool done(Event event) override;
  void copy(void* to, const void* from, std::int64_t bytes, DeviceApi::Stream stream) override;
  void zero(void* data, std::int64_t bytes, DeviceApi::Stream stream) override;
  void divide(void* data, c10::ScalarType dtype, std::int64_t count, double divisor, DeviceApi::Stream stream) override;
  void* allocate(std::int64_t bytes) override;
  void free(void* data) noexcept override;
  bool pin(void* data, std::int64_t bytes) override;
  void unpin(void* data) noexcept override;

 private:
  fake::Stream default_;
  fake::Stream* current_ = &default_;
  unsigned seed_;
  mutable std::mutex mutex_;
  std::vector<std::unique_ptr<fake::Stream>> streams_;
  std::vector<std::string> log_;
  std::atomic<int> live_{0};
  std::atomic<int> events_{0};
  std::atomic<int> pinned_{0};
};

}  // namespace fake
