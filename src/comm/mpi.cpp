// Starting and ending MPI, and make_communicator() of a build that has it. See zero/mpi.h.
#include "zero/mpi.h"

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <thread>
#include <vector>

#include "comm/launch.h"
#include "comm/launched.h"
#include "comm/mpi_bringup.h"
#include "comm/mpi_support.h"
#include "comm/wait.h"

namespace zero {
namespace {

std::atomic<bool> failed{false};

constexpr std::chrono::seconds kOthersEnd{2};

// Whether all processes come here, too. Once one is known to have failed, it is waited for so long.
bool all_are_ending(const std::vector<std::shared_ptr<TeamImpl>>& live) {
  MPI_Request request = MPI_REQUEST_NULL;
  if (MPI_Ibarrier(MPI_COMM_WORLD, &request) != MPI_SUCCESS) return false;
  auto failed_at = Clock::time_point::max();
  for (int done = 0;;) {
    if (MPI_Test(&request, &done, MPI_STATUS_IGNORE) != MPI_SUCCESS) return false;
    if (done != 0) return true;
    const auto now = Clock::now();
    if (failed_at == Clock::time_point::max()) {
      if (failed.load() || std::any_of(live.begin(), live.end(), [](const auto& impl) { return impl->peer_failed(); }))
        failed_at = now;
    } else if (now - failed_at > kOthersEnd) {
      return false;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

// At exit, when it was us who started MPI. MPI_Finalize waits for all processes. After a failure some may never come: if they are
// not all at this point soon, MPI isn't finalised, and mpirun ends the job. A program may also end in the midst of its work
// (exit() in a function that is called in forward): its communicators still exist, and the others are told.
void finalize_at_exit() {
  if (!mpi_is_up()) return;
  const auto live = live_communicators();
  const bool before = failed.load();
  for (const auto& impl : live) impl->fail("its program ended without destroying the communicator");
  failed.store(before);  // that was no reason to hurry: if all end like this, nothing is wrong
  if ((!before && live.empty()) || all_are_ending(live)) MPI_Finalize();
}

}  // namespace

void check_mpi(int code, const char* call) {
  if (code == MPI_SUCCESS) return;
  char message[MPI_MAX_ERROR_STRING] = "unknown error";
  int length = 0;
  MPI_Error_string(code, message, &length);
  ZERO_FAIL(call, ": ", message);
}

bool mpi_is_up() {
  int up = 0;
  int down = 0;
  MPI_Initialized(&up);
  MPI_Finalized(&down);
  return up != 0 && down == 0;
}

void note_mpi_failure() { failed.store(true); }

OwnedComm::~OwnedComm() {
  if (comm_ != MPI_COMM_NULL && !keep_ && mpi_is_up()) MPI_Comm_free(&comm_);
}

bool poll_request(MPI_Request& request, const WaitPolicy& policy, const char* what) {
  const auto began = Clock::now();
  Backoff backoff(2);
  bool warned = false;
  while (true) {
    int done = 0;
    ZERO_MPI(MPI_Test(&request, &done, MPI_STATUS_IGNORE));
    if (done != 0) return true;
    if (backoff.pause()) continue;
    const auto waited = std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - began);
    if (waited >= policy.timeout) return false;
    if (!warned && what != nullptr && waited >= policy.warn_after) {
      warned = true;
      std::fprintf(stderr, "zero: %s: has waited %s for the other ranks\n", what, readable(waited).c_str());
    }
    std::this_thread::sleep_for(std::chrono::microseconds(200));
  }
}

void init_mpi() {
  int up = 0;
  int down = 0;
  int provided = MPI_THREAD_SINGLE;
  ZERO_MPI(MPI_Initialized(&up));
  ZERO_MPI(MPI_Finalized(&down));
  ZERO_CHECK(down == 0, "zero::init_mpi: MPI has been finalised");
  if (up != 0) {
    ZERO_MPI(MPI_Query_thread(&provided));
  } else {
    ZERO_MPI(MPI_Init_thread(nullptr, nullptr, MPI_THREAD_SERIALIZED, &provided));
    std::atexit(finalize_at_exit);
  }
  if (provided < MPI_THREAD_SERIALIZED) {
    std::fprintf(
        stderr,
        "zero: MPI gives less than MPI_THREAD_SERIALIZED: call the optimizer and its communicators from the thread that "
        "initialised MPI\n");
  }
}

Communicator make_mpi_communicator(MPI_Comm comm) {
  ZERO_CHECK(mpi_is_up(), "make_mpi_communicator: MPI is not initialised (see zero::init_mpi), or has been finalised");
  ZERO_CHECK(comm != MPI_COMM_NULL, "make_mpi_communicator: the communicator is MPI_COMM_NULL");
  int inter = 0;
  ZERO_MPI(MPI_Comm_test_inter(comm, &inter));
  ZERO_CHECK(inter == 0, "make_mpi_communicator: needs an intra-communicator");
  MPI_Comm own = MPI_COMM_NULL;
  ZERO_MPI(MPI_Comm_dup(comm, &own));
  return Communicator(bring_up(own, WaitPolicy()));
}

Communicator make_communicator() {
  if (auto launched = launched_communicator(); launched.defined()) return launched;
  int up = 0;
  ZERO_MPI(MPI_Initialized(&up));
  if (up == 0 && launched_ranks() == 0) return make_self_communicator();
  if (up == 0) init_mpi();
  return make_mpi_communicator(MPI_COMM_WORLD);
}

}  // namespace zero
