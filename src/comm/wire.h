// Messages between nodes: non-blocking MPI with the same rules for waiting as in shared memory (timeout, warning, peers that
// failed or left), and the notices by which ranks of different nodes learn about those. Used by ClusterImpl.
#pragma once

#include <mpi.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "comm/mpi_support.h"
#include "comm/team.h"

namespace zero {

/// One message is at most this long (and its length fits MPI's int).
constexpr std::int64_t kMaxMessage = std::int64_t{4} << 20;

/// Ranks of one node name who is missing there after the timeout; who waits for another node gives them this much more to do so.
constexpr std::chrono::milliseconds kPatience{200};

class Wire {
 public:
  /// Messages that are on their way; wait() for them before their memory is touched or freed. When an exception gets in the way,
  /// they are cancelled as far as MPI can, and the memory in `keep` is never freed, as MPI may still use it.
  struct Pending {
    Pending() = default;
    explicit Pending(std::shared_ptr<void> memory) : keep(std::move(memory)) {}
    ~Pending();
    Pending(const Pending&) = delete;
    Pending& operator=(const Pending&) = delete;

    std::vector<MPI_Request> requests;
    std::vector<int> peers;
    std::vector<bool> receives;
    std::shared_ptr<void> keep;
  };

  /// @param far the ranks on other nodes
  Wire(std::shared_ptr<OwnedComm> comm, Team& team, std::vector<int> far);

  void send(int to, const void* data, std::int64_t bytes, Pending& pending);
  void receive(int from, void* data, std::int64_t bytes, Pending& pending);
  void wait(Pending& pending);

  /// The same for control messages of any length: `out` to every peer, one message back from each.
  std::vector<std::string> swap(const std::vector<int>& peers, const std::string& out);

  /// Reads notices; throws if a far rank has failed. Keeps other messages moving.
  void poll();
  /// Tells the far ranks. Never throws, never waits.
  void tell(bool failed, int origin, const std::string& why) noexcept;

  MPI_Comm comm() const { return comm_->get(); }

 private:
  struct Notice {
    std::int32_t failed = 0;  // else: left
    std::int32_t origin = 0;
    char why[504] = {};
  };
  void read_notices();
  void look_around(const Pending& pending, Clock::time_point began, bool& warned);

  std::shared_ptr<OwnedComm> comm_;
  Team& team_;
  std::vector<int> far_;
  std::vector<Clock::time_point> left_;  ///< by rank: when it said that it leaves
  bool far_failed_ = false;
  Notice failure_;
};

}  // namespace zero
