// Was this process started as one of several by mpirun or its kind? Asked by make_communicator(), with and without MPI.
#pragma once

#include <cstdlib>
#include <initializer_list>

namespace zero {

/// The number of processes of the job, by the variables that Open MPI, MPICH, Intel MPI, MVAPICH and Slurm's launchers set;
/// 0 if there are none.
inline int launched_ranks() {
  const auto number = [](const char* text) { return static_cast<int>(std::strtol(text, nullptr, 10)); };
  for (const char* variable : {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE"}) {
    if (const char* value = std::getenv(variable); value != nullptr) return number(value);
  }
  // srun --mpi=pmix or pmi2 gives only a rank; its step knows the size.
  if (std::getenv("PMIX_RANK") != nullptr || std::getenv("PMI_RANK") != nullptr) {
    const char* value = std::getenv("SLURM_STEP_NUM_TASKS");
    return value != nullptr ? number(value) : 1;
  }
  return 0;
}

}  // namespace zero
