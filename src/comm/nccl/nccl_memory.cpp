// Memory for an NcclImpl's Buffers.
#include <algorithm>
#include <utility>

#include "comm/nccl/nccl_impl.h"

namespace zero {
namespace {

// What has been given to the streams may still use the memory, and unmapping it doesn't wait by itself. An error, a dead peer's for
// instance, ends NCCL's kernels; the communicator's next call finds it aborted.
void wait_for_streams(NcclComm& comm) {
  const auto& device = comm.device();
  const OwnedEvent event(device);
  const auto began = Clock::now();
  for (const DeviceApi::Stream stream : {comm.stream(), device->compute_stream()}) {
    device->record(event, stream);
    wait_on_host(*device, event, [&] {
      if (!comm.alive()) return;
      try {
        comm.check();
        if (comm.watch) comm.watch();
        if (Clock::now() - began > comm.policy.timeout) comm.abort();
      } catch (const std::exception&) {
        comm.abort();
      }
    });
  }
}

void release(const std::weak_ptr<NcclComm>& owner, const NcclApi& api, const std::shared_ptr<DeviceApi>& device, void* data,
             bool by_nccl, void* registration) noexcept {
  try {
    const OnDevice here(*device);
    // Without its communicator nothing is under way but the user's own work, which the device allocator knows about.
    if (const auto comm = owner.lock(); comm != nullptr) {
      wait_for_streams(*comm);
      if (registration != nullptr && comm->alive()) (void)api.CommDeregister(comm->get(), registration);
    } else if (by_nccl) {
      const OwnedEvent event(device);
      device->record(event, device->compute_stream());
      wait_on_host(*device, event, [] {});
    }
    if (by_nccl)
      (void)api.MemFree(data);
    else
      device->free(data);
  } catch (const std::exception&) {
    // The device is lost, or the process ends: so is its memory.
  }
}

}  // namespace

std::shared_ptr<Mapping> nccl_memory(const std::shared_ptr<NcclComm>& comm, std::int64_t bytes) {
  const auto& api = comm->api();
  const auto& device = comm->device();
  const OnDevice here(*device);
  bytes = std::max<std::int64_t>(bytes, 64);
  void* data = nullptr;
  bool by_nccl = false;
  if (api.allocates()) {
    // Where the driver can't do it, NCCL says so; where there is no room, the device allocator may find some in its caches.
    by_nccl = api.MemAlloc(&data, static_cast<std::size_t>(bytes)) == ncclSuccess && data != nullptr;
  }
  if (!by_nccl) data = device->allocate(bytes);
  void* registration = nullptr;
  if (api.registers() && by_nccl) {
    // A wish: without it collectives copy once more.
    if (api.CommRegister(comm->get(), data, static_cast<std::size_t>(bytes), &registration) != ncclSuccess)
      registration = nullptr;
  }
  auto memory = Mapping::adopt(data, bytes, [owner = std::weak_ptr<NcclComm>(comm), api, device, data, by_nccl, registration] {
    release(owner, api, device, data, by_nccl, registration);
  });
  device->zero(data, bytes, device->compute_stream());
  return memory;
}

std::shared_ptr<Buffer::Impl> NcclImpl::allocate(Call call) {
  std::shared_ptr<Buffer::Impl> window;
  guarded(call, [&] {
    enter(call);
    window = windows_.allocate(control_, call, here(), [&] { return nccl_memory(comm_, call.count); });
  });
  return window;
}

}  // namespace zero
