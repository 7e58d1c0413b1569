// What the backends have in common: numbering and agreement of the calls, what becomes of the communicator after an error,
// traffic, memory that peers can reach. NodeImpl and ClusterImpl add how data moves.
#pragma once

#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "comm/communicator_impl.h"
#include "comm/team.h"
#include "comm/window.h"

namespace zero {

/// How much memory for staging copies each rank has: ZERO_STAGING_BYTES, in whole cache lines.
std::int64_t staging_bytes_wanted(int ranks);

class TeamImpl : public CommunicatorImpl {
 public:
  TeamImpl(int rank, Team::Setup setup);

  const char* backend() const override { return team_.backend(); }
  int rank() const override { return rank_; }
  int size() const override { return team_.world(); }
  int local_size() const override { return team_.size(); }

  void reduce_scatter(Call call, const void* input, void* output) override;
  void all_gather(Call call, const void* shard, void* full) override;
  void all_reduce(Call call, void* data) override;
  void broadcast(Call call, void* data) override;
  std::vector<std::string> exchange(Call call, const std::string& mine) override;
  std::shared_ptr<Buffer::Impl> allocate(Call call) override;
  std::shared_ptr<CommunicatorImpl> split(Call call, int color, int key) override;
  std::shared_ptr<QueueImpl> open_queue(Call call) override;
  [[noreturn]] void refuse(const std::string& message) override;

  void fail(const std::string& why) override;
  void check_failures() override;
  bool peer_failed() const { return team_.peer_failed(); }
  void set_wait_policy(const WaitPolicy& policy) override { team_.policy = policy; }
  WaitPolicy wait_policy() const override { return team_.policy; }
  Traffic traffic() const override { return traffic_; }

 protected:
  /// Everybody shows its call; throws AgreedError unless all are the same. Few bytes may ride along (NodeImpl shows them).
  virtual void enter(const Call& call, const void* bytes, std::int64_t count) = 0;
  /// The same, with a message from each rank of the communicator.
  virtual std::vector<std::string> enter_with(const Call& call, const std::string& mine) = 0;
  /// Messages within a call.
  virtual std::vector<std::string> swap(const std::string& mine) = 0;

  // After enter().
  virtual void do_reduce_scatter(const Call& call, const char* input, char* output) = 0;
  virtual void do_all_gather(const Call& call, const char* shard, char* full) = 0;
  virtual void do_all_reduce(const Call& call, char* data) = 0;
  virtual void do_broadcast(const Call& call, char* data) = 0;
  /// Which memory a collective would like to find in a window: the shard, or all of `full`.
  virtual bool gathers_from_shard() const = 0;
  /// Collective over all ranks: a communicator of `members` (ranks of this one, in the new order; empty: none for this rank).
  virtual std::shared_ptr<CommunicatorImpl> form(const std::vector<int>& members, int color, int key) = 0;
  /// Within Op::open_queue. The owner is set by open_queue()'s caller.
  virtual std::shared_ptr<QueueImpl> form_queue(const Call& call) = 0;
  /// Tells ranks that share no memory with this one, and hears from them.
  virtual void spread_failure(int /*origin*/, const std::string& /*why*/) {}
  virtual void check_far_failures() {}

  /// Throws AgreedError unless all calls are the same; `notes` holds the message of each rank that refuses its call.
  void compare(const std::vector<Call>& calls, const std::vector<std::string>& notes) const;
  /// Decides what an exception of `body` means: whether the communicator is broken by it. Broken already: throws that.
  void guarded(const std::function<void()>& body);
  /// The user's Buffer that this memory lies in, noted in `call`; null: none.
  std::shared_ptr<Buffer::Impl> find_window(Call& call, const void* data, std::int64_t bytes);
  /// Fills reach_, given every rank's call on this node.
  void resolve(const std::function<const Call&(int)>& call_of);

  /// Memory for staging copies: made when first needed (collective over the node), kept from then on.
  const Buffer::Impl& staging();
  /// Its size per rank: two halves, so that one can be filled while peers read the other.
  std::int64_t staging_bytes() const { return staging_bytes_; }

  /// Where the memory of each rank of the node is that the current collective works on; empty: it has to be staged.
  std::vector<char*> reach_;
  Traffic traffic_;
  Team team_;

 private:
  /// Runs one collective: numbers it, and decides what an exception means.
  template <typename Body>
  auto run(Call& call, const Body& body);
  using Swap = std::function<std::vector<std::string>(const std::string&)>;
  std::shared_ptr<Buffer::Impl> make_window(std::int64_t bytes, const std::string& what, Backing backing,
                                            const std::vector<std::string>& verdicts, const Swap& swap);
  std::string room_verdict(std::int64_t bytes) const;
  void break_down(std::exception_ptr error, int origin, const std::string& why);

  int rank_;
  std::int64_t number_ = 0;
  std::int64_t next_window_ = 0;
  std::int64_t staging_bytes_;
  std::exception_ptr broken_;                         ///< what every further call repeats
  std::vector<std::weak_ptr<Buffer::Impl>> windows_;  ///< the user's Buffers
  std::shared_ptr<Buffer::Impl> window_;              ///< of the current collective, held while it runs
  std::shared_ptr<Buffer::Impl> staging_;
};

}  // namespace zero
