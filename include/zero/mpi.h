// Communicators over MPI. The one public header that includes mpi.h.
#pragma once

#include <mpi.h>

#include "zero/communicator.h"

namespace zero {

/// Collective over `comm` (any intra-communicator; it is duplicated, never used or freed itself). MPI must be initialised,
/// by the program or by init_mpi(). Inside a node the ranks work on shared memory of their own (memfd: nothing appears in
/// /dev/shm, nothing is left behind by a killed job), and MPI is used only between nodes.
///
/// Environment: ZERO_NODE_SHARING=0 treats every rank as a node of its own (all traffic goes through MPI); a number k > 1 lets
/// at most k ranks share memory, which makes several nodes of one for tests.
ZERO_API Communicator make_mpi_communicator(MPI_Comm comm);

/// Initialises MPI (MPI_THREAD_SERIALIZED) unless the program has done so; if we did, MPI is finalised at exit.
/// A job whose MPI provides less than MPI_THREAD_SERIALIZED gets a warning: calls are then the program's to serialise.
ZERO_API void init_mpi();

}  // namespace zero
