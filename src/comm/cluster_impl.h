// Collectives of ranks on several nodes: shared memory inside a node, MPI between nodes, by slice. For the slice that rank s
// owns, every other node has one rank that deals with s (its local index is that of s, modulo the node's size): it adds its
// node's contributions and sends them to s, or receives the slice from s for its node. So all ranks carry the same share of the
// network traffic, no data goes through a leader, and any distribution of ranks over nodes works. (Leaders, the lowest ranks of
// their nodes, pass on small things only: the agreement on entry, exchange().)
//
// Order of summation: rank order within a node, then node order; between nodes in float (double for float64). A node of one rank
// sends its numbers as they are.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "comm/team_impl.h"
#include "comm/wire.h"

namespace zero {

/// Which rank is where. Filled in rank order.
struct NodeMap {
  std::vector<std::vector<int>> nodes;  ///< ranks of each node, ascending
  std::vector<int> leaders;             ///< lowest rank of each node
  std::vector<int> node_of;             ///< by rank
  std::vector<int> index_of;            ///< by rank: its place on its node

  void add(int rank, int leader);
  int ranks_on(int node) const { return static_cast<int>(nodes[static_cast<std::size_t>(node)].size()); }
  /// The rank of `node` that deals with rank s of another node.
  int deputy(int node, int s) const;
};

class ClusterImpl final : public TeamImpl {
 public:
  ClusterImpl(int rank, Team::Setup setup, std::shared_ptr<OwnedComm> comm, NodeMap map);
  ~ClusterImpl() override;
  int nodes() const override { return static_cast<int>(map_.nodes.size()); }

 protected:
  void enter(const Call& call, const void* bytes, std::int64_t count) override;
  std::vector<std::string> enter_with(const Call& call, const std::string& mine) override;
  std::vector<std::string> swap(const std::string& mine) override;
  void do_reduce_scatter(const Call& call, const char* input, char* output) override;
  void do_all_gather(const Call& call, const char* shard, char* full) override;
  void do_all_reduce(const Call& call, char* data) override;
  void do_broadcast(const Call& call, char* data) override;
  bool gathers_from_shard() const override { return false; }
  std::shared_ptr<QueueImpl> form_queue(const Call& call) override;
  std::shared_ptr<CommunicatorImpl> form(const std::vector<int>& members, int color, int key) override;
  void spread_failure(int origin, const std::string& why) override { wire_.tell(true, origin, why); }
  void check_far_failures() override { wire_.poll(); }

 private:
  friend class ClusterQueue;
  struct Reduction;
  bool alone() const { return team_.size() == 1; }
  std::int64_t chunk_bytes() const;
  char* arena(std::int64_t bytes);
  void post(int to, const void* data, std::int64_t bytes, Wire::Pending& pending);
  void combine(const Call& call, std::vector<const void*> parts, char* output, std::int64_t count);
  const std::vector<int>& slices_of(int member) const { return slices_of_[static_cast<std::size_t>(member)]; }
  void spread(std::int64_t slice, std::int64_t begin, std::int64_t bytes, std::int64_t side, char* full);

  NodeMap map_;
  int node_;                                 ///< of this rank
  std::vector<int> others_;                  ///< the other nodes
  std::vector<std::vector<int>> slices_of_;  ///< by local rank: its own slice, then those of other nodes that it deals with
  Wire wire_;
  std::shared_ptr<std::vector<char>> arena_;  ///< for parts on their way between nodes
  std::vector<char> scratch_;                 ///< conversion, padding
};

}  // namespace zero
