// What the communicators of a device need of it: streams, events, copies, memory. CUDA's runtime in production (device_api.cpp);
// in the tests a double on the CPU, whose streams are threads (tests/support/fake_cuda.h). No CUDA header is needed to use it.
//
// Bound to one device. Calls that can fail throw c10::Error; those that give something back don't throw.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

namespace zero {

class DeviceApi {
 public:
  using Stream = void*;  ///< a cudaStream_t
  using Event = void*;   ///< a cudaEvent_t

  virtual ~DeviceApi() = default;

  virtual c10::Device device() const = 0;
  /// Names the piece of hardware: equal for two ranks if and only if they use the same one.
  virtual std::string identity() const = 0;

  /// Makes it the calling thread's current device; returns the one before, for leave(). See OnDevice.
  virtual int enter() = 0;
  virtual void leave(int before) noexcept = 0;

  /// Of the highest priority, and not waiting for the legacy default stream.
  virtual Stream create_stream() = 0;
  virtual void destroy_stream(Stream stream) noexcept = 0;
  /// The calling thread's current stream, on which LibTorch's operators compute.
  virtual Stream compute_stream() = 0;

  virtual Event create_event() = 0;  ///< without timing
  virtual void destroy_event(Event event) noexcept = 0;
  virtual void record(Event event, Stream stream) = 0;
  /// What is put on `stream` from now on waits, on the device, for what `event` has recorded last.
  virtual void wait(Stream stream, Event event) = 0;
  /// Is what `event` has recorded last over? Doesn't wait.
  virtual bool done(Event event) = 0;

  virtual void copy(void* to, const void* from, std::int64_t bytes, Stream stream) = 0;
  virtual void zero(void* data, std::int64_t bytes, Stream stream) = 0;
  /// data[i] /= divisor, on `stream`. @param dtype a real float type
  virtual void divide(void* data, c10::ScalarType dtype, std::int64_t count, double divisor, Stream stream) = 0;

  /// LibTorch's allocator of the device. free(): whatever streams but the compute stream used it have to be over.
  virtual void* allocate(std::int64_t bytes) = 0;
  virtual void free(void* data) noexcept = 0;

  /// Makes host memory reachable by asynchronous copies. False: not possible, copies still work but stage once more.
  virtual bool pin(void* data, std::int64_t bytes) = 0;
  virtual void unpin(void* data) noexcept = 0;
};

/// The calling thread works on the device as long as this lives.
class OnDevice {
 public:
  explicit OnDevice(DeviceApi& api) : api_(api), before_(api.enter()) {}
  ~OnDevice() { api_.leave(before_); }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

 private:
  DeviceApi& api_;
  int before_;
};

/// An event, as long as this lives.
class OwnedEvent {
 public:
  explicit OwnedEvent(std::shared_ptr<DeviceApi> api) : api_(std::move(api)), event_(api_->create_event()) {}
  ~OwnedEvent() { api_->destroy_event(event_); }
  OwnedEvent(const OwnedEvent&) = delete;
  OwnedEvent& operator=(const OwnedEvent&) = delete;
  operator DeviceApi::Event() const { return event_; }  // NOLINT(google-explicit-constructor): it is one

 private:
  std::shared_ptr<DeviceApi> api_;
  DeviceApi::Event event_;
};

/// A private stream, as long as this lives.
class OwnedStream {
 public:
  explicit OwnedStream(std::shared_ptr<DeviceApi> api) : api_(std::move(api)), stream_(api_->create_stream()) {}
  ~OwnedStream() { api_->destroy_stream(stream_); }
  OwnedStream(const OwnedStream&) = delete;
  OwnedStream& operator=(const OwnedStream&) = delete;
  operator DeviceApi::Stream() const { return stream_; }  // NOLINT(google-explicit-constructor): it is one

 private:
  std::shared_ptr<DeviceApi> api_;
  DeviceApi::Stream stream_;
};

/// Waits on the host until the event is over, with naps; `meanwhile` is called again and again and ends the wait by throwing.
void wait_on_host(DeviceApi& api, DeviceApi::Event event, const std::function<void()>& meanwhile);

/// LibTorch's CUDA half, libtorch_cuda.so: nothing of this library asks for it by a symbol, so a program that isn't linked with it is
/// given it when it first asks for a GPU (a second, a gigabyte). Before anything else asks LibTorch about CUDA. Builds with CUDA only.
/// @throws c10::Error with the loader's words
void load_torch_cuda();
/// The GPUs that this process sees; 0 without a driver. A build without CUDA throws an error that names the fix.
int cuda_devices();
/// The production implementation. A build without CUDA throws an error that names the fix.
std::shared_ptr<DeviceApi> cuda_device(c10::Device device);

}  // namespace zero
