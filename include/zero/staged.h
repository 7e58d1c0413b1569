// Communicators of GPUs over those of the CPU. Needs no CUDA header. In a build without CUDA the function throws and says so.
#pragma once

#include <c10/core/Device.h>

#include "zero/communicator.h"

namespace zero {

/// Collective over `inner`. A communicator over the same ranks for tensors on `device`, which copies them to pinned host memory,
/// calls `inner` there, and copies the results back. For what NCCL can't do: several ranks on one GPU (tests, debugging), or nodes
/// that only MPI connects. Same bits, agreement and errors as `inner`.
///
/// Slow by nature: every collective waits on the host for the device, and moves chunks of what ZERO_STAGING_BYTES says (8 MiB
/// per rank by default, allocated here and kept). ReduceQueue::begin() is a collective here, in the same order among
/// all calls on every rank, and its operations are over when it returns.
///
/// @param inner  a communicator of the CPU: mpi, thread, self. It is duplicated.
/// @param device may be shared by ranks and may differ between them (see choose_device in zero/nccl.h).
ZERO_API Communicator make_staged_communicator(const Communicator& inner, c10::Device device);

}  // namespace zero
