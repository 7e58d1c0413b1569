// From an MPI communicator to ours: who shares a node, a control block for each node, and the implementation that fits.
#pragma once

#include <mpi.h>

#include <memory>
#include <vector>

#include "comm/mpi_support.h"
#include "comm/node_impl.h"

namespace zero {

/// Collective. Takes `comm` over.
std::shared_ptr<CommunicatorImpl> bring_up(MPI_Comm comm, const WaitPolicy& policy);

/// Those that were brought up here and still exist.
std::vector<std::shared_ptr<TeamImpl>> live_communicators();

/// Collective. As MPI_Comm_split; null for a negative color.
std::shared_ptr<CommunicatorImpl> split_mpi(MPI_Comm comm, int color, int key, const WaitPolicy& policy);

/// All ranks are processes of one node: MPI only makes and splits it.
class MpiNodeImpl final : public NodeImpl {
 public:
  MpiNodeImpl(int rank, Team::Setup setup, std::shared_ptr<OwnedComm> comm)
      : NodeImpl(rank, std::move(setup)), comm_(std::move(comm)) {}
  ~MpiNodeImpl() override {
    if (team_.unwinding()) note_mpi_failure();
  }

 protected:
  std::shared_ptr<CommunicatorImpl> form(const std::vector<int>& /*members*/, int color, int key) override {
    return split_mpi(comm_->get(), color, key, wait_policy());
  }
  void spread_failure(int /*origin*/, const std::string& /*why*/) override { note_mpi_failure(); }

 private:
  std::shared_ptr<OwnedComm> comm_;
};

}  // namespace zero
