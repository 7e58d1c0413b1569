// Stands in for mpi.cpp in a build without MPI.
#include "comm/launch.h"
#include "comm/launched.h"
#include "core/check.h"
#include "zero/communicator.h"

namespace zero {

Communicator make_communicator() {
  if (auto launched = launched_communicator(); launched.defined()) return launched;
  ZERO_CHECK(launched_ranks() <= 1, "this build of zero has no MPI, but ", launched_ranks(),
             " processes were started: each would train a model of its own. Build with MPI (ZERO_WITH_MPI=ON), or start "
             "them by zero-run");
  return make_self_communicator();
}

}  // namespace zero
