// Processes of this machine as ranks, without MPI: `zero-run -n 4 ./trainer`, and its heart for programs that start themselves.
#pragma once

#include <string>
#include <vector>

#include "zero/export.h"

namespace zero {

/// Starts `command` (a program and its arguments) `ranks` times and waits for all. In the processes make_communicator() gives the
/// communicator of these ranks; like mpirun's of one node they meet in shared memory. OMP_NUM_THREADS is set to the cores per rank unless it
/// is set. SIGINT and SIGTERM are passed on. When one fails, the others have `grace_seconds` to notice by themselves and to say so; then
/// they are ended.
/// @returns the exit status of the first that failed (128 + signal if it was killed), or 0
/// @throws c10::Error if the processes can't be started
ZERO_API int launch(int ranks, const std::vector<std::string>& command, double grace_seconds = 10);

}  // namespace zero
