// Communicators of GPUs over NCCL. Needs no CUDA header. In a build without CUDA these functions throw and say how to get one.
#pragma once

#include <c10/core/Device.h>

#include <optional>

#include "zero/communicator.h"

namespace zero {

/// Collective over `control`. The GPU that this rank should use: the environment variable ZERO_DEVICE ("cuda:1", or "1") where it is
/// set; otherwise ranks on one host count through the GPUs that they see, in rank order. More ranks than GPUs share them, which
/// NCCL can't (see make_staged_communicator). Throws on every rank if one sees no GPU. Changes nothing: a trainer puts its model
/// there, and usually makes it current (c10::cuda::set_device).
ZERO_API c10::Device choose_device(const Communicator& control);

/// Collective over `control`. A communicator over the same ranks for tensors on `device`, by default choose_device(control).
///
/// Collectives are put on a private stream of high priority. It waits for what the current stream of the device has been given
/// before the call, and the current stream waits for it after the call: on the device; the host doesn't wait, and tensors are used
/// afterwards as if LibTorch's own operators had written them. In a ReduceQueue wait() and wait_released() are where the current
/// stream waits; finished() asks the device.
///
/// @param control a communicator of the CPU: mpi, thread, self. It is duplicated. Over it goes what the device must not wait for:
///                exchange() and barrier(), how NCCL finds its peers, splits, and notice of failures. barrier() is one of the
///                hosts: it doesn't wait for what the devices have been given.
/// @param device  one GPU to each rank; two ranks on one are refused, on every rank.
///
/// Sums are NCCL's: in the tensor's type, in an order of its own, not the bits of the other backends; division see
/// docs/communicators.md. What the ranks call isn't compared unless ZERO_NCCL_COMPARE=1 is set on all of them (for debugging: every
/// call then waits for its peers on the host). A wrong argument on one rank breaks the communicator, unless it is set.
/// Waits for other ranks give up after control's WaitPolicy.
ZERO_API Communicator make_nccl_communicator(const Communicator& control, std::optional<c10::Device> device = std::nullopt);

}  // namespace zero
