// make_nccl_communicator() of a build with CUDA, see zero/nccl.h.
#include "zero/nccl.h"

#include "comm/nccl/device_api.h"
#include "comm/nccl/nccl_api.h"
#include "comm/nccl/nccl_impl.h"

namespace zero {

Communicator make_nccl_communicator(const Communicator& control, std::optional<c10::Device> device) {
  const auto place = device.has_value() ? *device : choose_device(control);
  return NcclImpl::make(
      control, [place] { return cuda_device(place); }, [] { return nccl(); });
}

}  // namespace zero
