// The ranks of one node, seen through their slots: arriving, waiting for all, messages, and noticing who is gone.
// Everything that a collective needs besides the memory it works on. Used by TeamImpl and the collectives of a node.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "comm/control_block.h"
#include "comm/errors.h"
#include "comm/liveness.h"
#include "comm/wait.h"
#include "zero/communicator.h"

namespace zero {

class Team {
 public:
  struct Setup {
    int rank = 0;            ///< in this team
    std::vector<int> ranks;  ///< of the communicator, by rank in the team: what messages name
    int world = 1;           ///< size of the communicator
    const char* backend = "self";
    std::shared_ptr<Slot> slots;  ///< ranks.size() of them; the pointer keeps the memory
    std::vector<pid_t> pids;      ///< empty: threads of this process
  };
  explicit Team(Setup setup);
  ~Team();
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  int rank() const { return setup_.rank; }
  int size() const { return static_cast<int>(setup_.ranks.size()); }
  int rank_in_world(int member) const { return setup_.ranks[static_cast<std::size_t>(member)]; }
  int world() const { return setup_.world; }
  const char* backend() const { return setup_.backend; }
  bool processes() const { return !setup_.pids.empty(); }
  const ProcessWatch& watch() const { return watch_; }

  /// Arrives, and waits until all have arrived as often. What was written before is visible to all after.
  void sync();
  /// What a rank waits for: each member gets somewhere.
  struct Goal {
    std::function<bool(int member)> there;     ///< never again false once true
    std::function<bool(int member)> given_up;  ///< null: none does. It won't get there any more, though it hasn't left
    const char* to_do = "";                    ///< in the message of a timeout: "… for rank 2" + " to begin it"
    /// A member that has arrived in a collective before it got there waits for this rank, as this rank does for it.
    bool before_collectives = false;
  };
  /// Waits until all are there. Throws if somebody has failed, or won't get there, or after the timeout.
  void await(const Goal& goal);
  /// This rank has written something that others wait for: wakes them.
  void ring();

  Lane& lane(int member, int index) const { return slot(member).lanes[index]; }

  /// The page that the next sync() shows to the others.
  Page& next_page();
  /// What `member` showed at the last sync(), to be read before this rank's next.
  const Page& page(int member) const;

  /// Everybody's message. The first sync also carries the call, if there is one; `inspect` then looks at the pages.
  std::vector<std::string> exchange(const Call* call, std::string_view mine, const std::function<void()>& inspect = {});

  /// Throws if this rank or a peer has failed.
  void check_failures() const;
  bool peer_failed() const;
  /// An exception is destroying what this belongs to.
  bool unwinding() const;
  /// Marks this rank as failed, once. The peers throw "rank `origin` `why`".
  /// @returns false if it was marked already
  bool fail(int origin, const std::string& why);

  /// "rank 1 of 4 (mpi): all_reduce #3"
  std::string here() const;
  const Call& current() const { return current_; }
  void set_current(const Call& call) { current_ = call; }

  WaitPolicy policy;
  /// Added to the timeout where those waited for may themselves be waiting for the rank that is missing: they name it first.
  std::chrono::milliseconds patience{0};
  /// Called now and then while waiting (with short naps instead of long sleeps): progress of messages between nodes.
  std::function<void()> progress;
  /// Called while waiting: work of this rank that others may be waiting for, which they announce on bells that it isn't looking
  /// at. True: there may be more before long, so take short naps.
  std::function<bool()> serve;

 private:
  Slot& slot(int member) const { return setup_.slots.get()[member]; }
  struct Wait {
    const Goal& goal;
    Clock::time_point began{};
    Clock::time_point given_up{};  ///< when somebody who has given up was first seen
    bool warned = false;
  };
  void wait_for(int member, Wait& wait);
  bool look_around(int member, Wait& wait) const;
  void check_order(int member, const Goal& goal) const;
  int first_failed() const;  ///< -1: nobody has
  [[noreturn]] void throw_failure_of(int member) const;
  [[noreturn]] void throw_peer_failure(int member, const std::string& reason) const;

  Setup setup_;
  ProcessWatch watch_;
  Call current_;
  std::uint64_t sequence_ = 0;
  int exceptions_;  ///< in flight when this was made
};

/// "rank 2", "ranks 1, 2 and 5"
std::string name_ranks(const std::vector<int>& ranks);

}  // namespace zero
