// The collectives of ranks that all share memory: threads of a process, processes of a node, or one rank alone. Three ways to
// move data, with the same bits: through the pages of the control block (small), straight out of the peers' memory (when it
// lies in a Buffer), or in chunks through staging memory. thread.cpp and mpi_bringup.h add how to form a new communicator.
#pragma once

#include <string>
#include <vector>

#include "comm/team_impl.h"

namespace zero {

class NodeQueue;

class NodeImpl : public TeamImpl {
 public:
  using TeamImpl::TeamImpl;
  int nodes() const override { return 1; }

 protected:
  void enter(const Call& call, const void* bytes, std::int64_t count) override;
  std::vector<std::string> enter_with(const Call& call, const std::string& mine) override;
  std::vector<std::string> swap(const std::string& mine) override { return team_.exchange(nullptr, mine); }
  void do_reduce_scatter(const Call& call, const char* input, char* output) override;
  void do_all_gather(const Call& call, const char* shard, char* full) override;
  void do_all_reduce(const Call& call, char* data) override;
  void do_broadcast(const Call& call, char* data) override;
  bool gathers_from_shard() const override { return true; }
  std::shared_ptr<QueueImpl> form_queue(const Call& call) override;

 private:
  friend class NodeQueue;
  void check_calls();
  void reduce_direct(const Call& call, char* data);
  void reduce_staged(const Call& call, char* data);
  bool serve_queues();

  std::vector<NodeQueue*> queues_;  ///< open on this rank
};

/// kernels::sum_ranks with `at(member)` as the inputs.
template <typename At>
void sum_members(void* output, int members, std::int64_t count, const Call& call, const At& at) {
  if (count == 0) return;
  constexpr int kFew = 64;
  const void* few[kFew];
  std::vector<const void*> many;
  const void** inputs = few;
  if (members > kFew) {
    many.resize(static_cast<std::size_t>(members));
    inputs = many.data();
  }
  for (int member = 0; member < members; ++member) inputs[member] = at(member);
  kernels::sum_ranks(output, inputs, members, count, call.real, call.divisor);
}

}  // namespace zero
