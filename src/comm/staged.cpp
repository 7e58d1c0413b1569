// make_staged_communicator(), see zero/staged.h.
#include "zero/staged.h"

#include "comm/staged_impl.h"

namespace zero {

Communicator make_staged_communicator(const Communicator& inner, c10::Device device) {
  return StagedImpl::make(inner, [device] { return cuda_device(device); });
}

}  // namespace zero
