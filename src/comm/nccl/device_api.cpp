// DeviceApi by CUDA's runtime and c10_cuda. No call is made before somebody asks for a device: programs that use the CPU only run
// on machines without a driver.
#include "comm/nccl/device_api.h"

#include <ATen/Context.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/div.h>
#include <ATen/ops/from_blob.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <utility>

#include "core/check.h"

namespace zero {
namespace {

void check(cudaError_t code, const char* call) {
  if (code == cudaSuccess) return;
  (void)cudaGetLastError();  // otherwise the next kernel launch of somebody else would report it again
  ZERO_FAIL(call, ": ", cudaGetErrorString(code), " (", cudaGetErrorName(code), ')');
}
#define ZERO_CUDA(call) check(call, #call)

cudaStream_t as_stream(DeviceApi::Stream stream) { return static_cast<cudaStream_t>(stream); }
cudaEvent_t as_event(DeviceApi::Event event) { return static_cast<cudaEvent_t>(event); }

class CudaDevice final : public DeviceApi {
 public:
  explicit CudaDevice(c10::Device device) : device_(device) {}

  c10::Device device() const override { return device_; }

  std::string identity() const override {
    cudaDeviceProp properties{};
    ZERO_CUDA(cudaGetDeviceProperties(&properties, device_.index()));
    const auto* bytes = properties.uuid.bytes;
    if (std::any_of(bytes, bytes + sizeof properties.uuid.bytes, [](char byte) { return byte != 0; })) {
      std::string text = "GPU ";
      for (const char byte : properties.uuid.bytes) {
        char hex[3];
        std::snprintf(hex, sizeof hex, "%02x", static_cast<unsigned>(static_cast<unsigned char>(byte)));
        text += hex;
      }
      return text;
    }
    char host[256] = {};
    char bus[32] = {};
    gethostname(host, sizeof host - 1);
    ZERO_CUDA(cudaDeviceGetPCIBusId(bus, sizeof bus, device_.index()));
    return detail::text("GPU at ", bus, " of ", host);
  }

  int enter() override { return c10::cuda::ExchangeDevice(device_.index()); }
  void leave(int before) noexcept override { (void)cudaSetDevice(before); }

  Stream create_stream() override {
    const OnDevice here(*this);
    int least = 0;
    int greatest = 0;
    ZERO_CUDA(cudaDeviceGetStreamPriorityRange(&least, &greatest));
    cudaStream_t stream = nullptr;
    ZERO_CUDA(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, greatest));
    return stream;
  }
  void destroy_stream(Stream stream) noexcept override { (void)cudaStreamDestroy(as_stream(stream)); }
  Stream compute_stream() override { return c10::cuda::getCurrentCUDAStream(device_.index()).stream(); }

  Event create_event() override {
    const OnDevice here(*this);
    cudaEvent_t event = nullptr;
    ZERO_CUDA(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    return event;
  }
  void destroy_event(Event event) noexcept override { (void)cudaEventDestroy(as_event(event)); }
  void record(Event event, Stream stream) override { ZERO_CUDA(cudaEventRecord(as_event(event), as_stream(stream))); }
  void wait(Stream stream, Event event) override { ZERO_CUDA(cudaStreamWaitEvent(as_stream(stream), as_event(event), 0)); }
  bool done(Event event) override {
    const auto code = cudaEventQuery(as_event(event));
    if (code == cudaErrorNotReady) {
      (void)cudaGetLastError();
      return false;
    }
    check(code, "cudaEventQuery");
    return true;
  }

  void copy(void* to, const void* from, std::int64_t bytes, Stream stream) override {
    ZERO_CUDA(cudaMemcpyAsync(to, from, static_cast<std::size_t>(bytes), cudaMemcpyDefault, as_stream(stream)));
  }
  void zero(void* data, std::int64_t bytes, Stream stream) override {
    ZERO_CUDA(cudaMemsetAsync(data, 0, static_cast<std::size_t>(bytes), as_stream(stream)));
  }
  void divide(void* data, c10::ScalarType dtype, std::int64_t count, double divisor, Stream stream) override {
    const at::NoGradGuard no_grad;
    const c10::cuda::CUDAStreamGuard on(c10::cuda::getStreamFromExternal(as_stream(stream), device_.index()));
    auto tensor = at::from_blob(
        data, {count}, [](void*) {}, at::TensorOptions().dtype(dtype).device(device_), device_);
    tensor.div_(divisor);
  }

  void* allocate(std::int64_t bytes) override {
    const OnDevice here(*this);
    return c10::cuda::CUDACachingAllocator::raw_alloc(static_cast<std::size_t>(bytes));
  }
  void free(void* data) noexcept override {
    try {
      c10::cuda::CUDACachingAllocator::raw_delete(data);
    } catch (const std::exception& error) {
      std::fprintf(stderr, "zero: freeing memory of %s: %s\n", device_.str().c_str(), error.what());
    }
  }

  bool pin(void* data, std::int64_t bytes) override {
    const auto code = cudaHostRegister(data, static_cast<std::size_t>(bytes), cudaHostRegisterPortable);
    (void)cudaGetLastError();
    return code == cudaSuccess;
  }
  void unpin(void* data) noexcept override { (void)cudaHostUnregister(data); }

 private:
  c10::Device device_;
};

}  // namespace

void load_torch_cuda() {
  constexpr const char* kName = "libtorch_cuda.so";
  static const std::string problem = [] {
    if (dlopen(kName, RTLD_NOW | RTLD_NOLOAD) != nullptr) return std::string();
    // Beside the half that is there.
    Dl_info here{};
    std::string path = kName;
    if (dladdr(reinterpret_cast<const void*>(&at::globalContext), &here) != 0 && here.dli_fname != nullptr) {
      const std::string known = here.dli_fname;
      if (const auto slash = known.rfind('/'); slash != std::string::npos) path = known.substr(0, slash + 1) + kName;
    }
    if (dlopen(path.c_str(), RTLD_NOW) != nullptr || dlopen(kName, RTLD_NOW) != nullptr) return std::string();
    const char* why = dlerror();
    return std::string(why != nullptr ? why : "no reason given");
  }();
  ZERO_CHECK(problem.empty(), "LibTorch's CUDA library can't be loaded: ", problem,
             ". Take a LibTorch with CUDA, or link the program with torch_cuda");
}

int cuda_devices() {
  const auto count = static_cast<unsigned char>(c10::cuda::device_count());
  if (count > 0) load_torch_cuda();
  return count;
}

std::shared_ptr<DeviceApi> cuda_device(c10::Device device) {
  ZERO_CHECK(device.is_cuda(), "zero: ", device.str(), " is not a CUDA device; name one like cuda:0");
  const int count = cuda_devices();
  ZERO_CHECK(count > 0, "zero: ", device.str(),
             ": this process sees no GPU (no driver, or CUDA_VISIBLE_DEVICES is empty): check nvidia-smi, or stay on the CPU");
  if (!device.has_index()) device = c10::Device(c10::kCUDA, c10::cuda::current_device());
  ZERO_CHECK(device.index() < count, "zero: ", device.str(), " doesn't exist: this process sees ", count, " GPU",
             count == 1 ? "" : "s");
  at::globalContext().lazyInitDevice(c10::kCUDA);  // LibTorch's allocator, which a tensor would have made
  return std::make_shared<CudaDevice>(device);
}

}  // namespace zero
