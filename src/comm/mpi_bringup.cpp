// See mpi_bringup.h. Uses MPI's collectives, all of them here; from then on a single node needs none.
#include "comm/mpi_bringup.h"

#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <limits>
#include <string>

#include "comm/cluster_impl.h"
#include "comm/shared_slots.h"
#include "comm/thread_impl.h"

namespace zero {
namespace {

struct Hello {
  int leader;  // lowest rank of this node
  pid_t pid;
};

// How many ranks may share a node's memory.
int sharing_limit() {
  const char* value = std::getenv("ZERO_NODE_SHARING");
  if (value == nullptr || *value == '\0' || std::string(value) == "1") return std::numeric_limits<int>::max();
  char* end = nullptr;
  const long limit = std::strtol(value, &end, 10);
  ZERO_CHECK(*end == '\0' && limit >= 0, "ZERO_NODE_SHARING=", value, ": must be 0 (no), 1 (yes) or the most ranks that share");
  return static_cast<int>(std::max(limit, 1L));
}

// The lowest rank that shares memory with this one.
int leader_of_node(MPI_Comm comm, int rank, const WaitPolicy& policy) {
  // The lowest limit counts: all have to see the same nodes.
  const auto limits = gather_values(comm, sharing_limit(), policy, "making a communicator");
  const int limit = *std::min_element(limits.begin(), limits.end());
  MPI_Comm node = MPI_COMM_NULL;
  ZERO_MPI(MPI_Comm_split_type(comm, MPI_COMM_TYPE_SHARED, rank, MPI_INFO_NULL, &node));
  const OwnedComm owner(node);
  ZERO_MPI(MPI_Comm_set_errhandler(node, MPI_ERRORS_RETURN));
  const auto ranks = gather_values(node, rank, policy, "making a communicator");
  const auto index = static_cast<int>(std::find(ranks.begin(), ranks.end(), rank) - ranks.begin());
  const int first = index - index % limit;
  return ranks[static_cast<std::size_t>(first)];
}

struct Live {
  std::mutex mutex;
  std::vector<std::weak_ptr<TeamImpl>> all;
};

Live& live() {
  static auto* it = new Live;  // also after static destructors
  return *it;
}

}  // namespace

std::vector<std::shared_ptr<TeamImpl>> live_communicators() {
  const std::lock_guard<std::mutex> lock(live().mutex);
  std::vector<std::shared_ptr<TeamImpl>> there;
  for (const auto& one : live().all)
    if (auto impl = one.lock()) there.push_back(std::move(impl));
  live().all.assign(there.begin(), there.end());
  return there;
}

std::shared_ptr<CommunicatorImpl> bring_up(MPI_Comm comm, const WaitPolicy& policy) {
  const auto owner = std::make_shared<OwnedComm>(comm);
  ZERO_MPI(MPI_Comm_set_errhandler(comm, MPI_ERRORS_RETURN));
  int rank = 0;
  int size = 0;
  ZERO_MPI(MPI_Comm_rank(comm, &rank));
  ZERO_MPI(MPI_Comm_size(comm, &size));
  const auto hellos = gather_values(comm, Hello{leader_of_node(comm, rank, policy), getpid()}, policy, "making a communicator");

  NodeMap map;
  Team::Setup setup;
  setup.world = size;
  setup.backend = "mpi";
  const int leader = hellos[static_cast<std::size_t>(rank)].leader;
  for (int r = 0; r < size; ++r) {
    const Hello& hello = hellos[static_cast<std::size_t>(r)];
    map.add(r, hello.leader);
    if (hello.leader != leader) continue;
    if (r == rank) setup.rank = static_cast<int>(setup.ranks.size());
    setup.ranks.push_back(r);
    setup.pids.push_back(hello.pid);
  }
  setup.slots = share_slots([&](const SlotOffer& mine) { return gather_values(comm, mine, policy, "making a communicator"); },
                            rank, leader, static_cast<int>(setup.ranks.size()));

  std::shared_ptr<TeamImpl> made;
  if (map.nodes.size() == 1) {
    made = std::make_shared<MpiNodeImpl>(rank, std::move(setup), owner);
  } else {
    owner->keep();
    made = std::make_shared<ClusterImpl>(rank, std::move(setup), owner, std::move(map));
  }
  made->set_wait_policy(policy);
  live_communicators();  // forgets those that have gone
  const std::lock_guard<std::mutex> lock(live().mutex);
  live().all.push_back(made);
  return made;
}

std::shared_ptr<CommunicatorImpl> split_mpi(MPI_Comm comm, int color, int key, const WaitPolicy& policy) {
  MPI_Comm part = MPI_COMM_NULL;
  ZERO_MPI(MPI_Comm_split(comm, color < 0 ? MPI_UNDEFINED : color, key, &part));
  return part == MPI_COMM_NULL ? nullptr : bring_up(part, policy);
}

}  // namespace zero
