// Small things that every file using MPI here needs: checked calls, an owned communicator, and gathering at bring-up with a
// timeout.
#pragma once

#include <mpi.h>

#include <cstring>
#include <memory>
#include <vector>

#include "core/check.h"
#include "zero/communicator.h"

namespace zero {

void check_mpi(int code, const char* call);
/// Initialised and not yet finalised.
bool mpi_is_up();
/// Something failed on a communicator of this process: then the end of the process doesn't wait for the others for long.
void note_mpi_failure();

/// Throws c10::Error with MPI's own text unless the call succeeds.
#define ZERO_MPI(call) ::zero::check_mpi(call, #call)

/// A communicator of ours. MPI frees communicators collectively, which a destructor can't wait for. On one node, where no message
/// ever travels on it, freeing is a local matter in practice; between nodes it is kept until MPI is finalised.
class OwnedComm {
 public:
  explicit OwnedComm(MPI_Comm comm) : comm_(comm) {}
  ~OwnedComm();
  OwnedComm(const OwnedComm&) = delete;
  OwnedComm& operator=(const OwnedComm&) = delete;
  MPI_Comm get() const { return comm_; }
  void keep() { keep_ = true; }

 private:
  MPI_Comm comm_;
  bool keep_ = false;
};

/// Waits for `request` as long as `policy` says. False: it is still pending.
bool poll_request(MPI_Request& request, const WaitPolicy& policy, const char* what);

/// Every rank's value.
template <typename T>
std::vector<T> gather_values(MPI_Comm comm, const T& mine, const WaitPolicy& policy, const char* what) {
  struct Buffers {
    T mine;
    std::vector<T> all;
  };
  int size = 0;
  ZERO_MPI(MPI_Comm_size(comm, &size));
  auto buffers = std::make_unique<Buffers>(Buffers{mine, std::vector<T>(static_cast<std::size_t>(size))});
  MPI_Request request = MPI_REQUEST_NULL;
  ZERO_MPI(MPI_Iallgather(&buffers->mine, sizeof(T), MPI_BYTE, buffers->all.data(), sizeof(T), MPI_BYTE, comm, &request));
  if (!poll_request(request, policy, what)) {
    static_cast<void>(buffers.release());  // MPI may still write there
    ZERO_FAIL("zero: ", what, ": not all of the ", size, " ranks came within the timeout (ZERO_TIMEOUT_SECONDS)");
  }
  return std::move(buffers->all);
}

}  // namespace zero
