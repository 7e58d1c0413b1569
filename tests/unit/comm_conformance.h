// What every communicator has to do, whatever it is made of: each check is a function of one rank's communicator, called on
// all ranks. Run by test_comm.cpp (threads, self) and tests/mpi/test_comm_mpi.cpp (processes, nodes).
//
// Catch2's assertions aren't made for several threads, so a check that fails throws: then the other ranks throw too, and
// nobody is left waiting.
#pragma once

#include "comm_conformance_checks.h"
#include "comm_conformance_queues.h"

namespace zero::conformance {

struct Check {
  const char* name;
  void (*run)(const Communicator&);
};
inline constexpr Check kChecks[] = {
    {"reductions", reductions},
    {"complex numbers", complex_numbers},
    {"gathers", gathers},
    {"broadcasts", broadcasts},
    {"messages", messages},
    {"mismatches", mismatches},
    {"bad arguments", bad_arguments},
    {"failures", failures},
    {"little room", little_room},
    {"mapped side by side", mapped},
    {"traffic", traffic},
    {"splits", splits},
    {"queues", queues},
    {"queues: input reused", queue_reuse},
    {"queues among other collectives", queue_interleaved},
    {"queues: places", queue_places},
    {"queues: traffic", queue_traffic},
    {"queues: failures", queue_failures},
};
/// Those that move data: repeated with little staging memory.
inline constexpr Check kMoving[] = {{"reductions", reductions}, {"gathers", gathers}, {"broadcasts", broadcasts}};

}  // namespace zero::conformance
