// Joining the ranks that zero-run has started, see launched.h.
#include "comm/launched.h"

#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "comm/node_impl.h"
#include "comm/shared_slots.h"
#include "comm/wait.h"
#include "core/check.h"

namespace zero {
namespace {

/// All ranks are processes of this machine that know each other's memory by /proc.
class LaunchedImpl final : public NodeImpl {
 public:
  explicit LaunchedImpl(const Team::Setup& setup) : NodeImpl(setup.rank, setup), pids_(setup.pids) {}

 protected:
  std::shared_ptr<CommunicatorImpl> form(const std::vector<int>& members, int /*color*/, int /*key*/) override {
    const auto count = static_cast<int>(members.size());
    const auto swap_offers = [this](const SlotOffer& mine) {
      std::vector<SlotOffer> all;
      for (const auto& packed : swap({reinterpret_cast<const char*>(&mine), sizeof mine})) {
        all.emplace_back();
        std::memcpy(static_cast<void*>(&all.back()), packed.data(), sizeof(SlotOffer));
      }
      return all;
    };
    auto slots = share_slots(swap_offers, rank(), members.empty() ? -1 : members[0], count);
    if (slots == nullptr) return nullptr;
    Team::Setup setup;
    setup.world = count;
    setup.backend = backend();
    for (int i = 0; i < count; ++i) {
      if (members[static_cast<std::size_t>(i)] == rank()) setup.rank = i;
      setup.ranks.push_back(i);
      setup.pids.push_back(pids_[static_cast<std::size_t>(members[static_cast<std::size_t>(i)])]);
    }
    setup.slots = std::move(slots);
    auto formed = std::make_shared<LaunchedImpl>(setup);
    formed->set_wait_policy(wait_policy());
    return formed;
  }

 private:
  const std::vector<pid_t> pids_;  ///< by rank
};

// Waits until all have come.
std::vector<pid_t> meet(LaunchBoard& board, pid_t launcher, int rank, int ranks) {
  const WaitPolicy policy;
  board.pids[rank].store(getpid());
  const auto began = Clock::now();
  std::vector<pid_t> pids(static_cast<std::size_t>(ranks));
  for (bool warned = false;;) {
    std::string missing;
    for (int r = 0; r < ranks; ++r) {
      pids[static_cast<std::size_t>(r)] = board.pids[r].load();
      if (pids[static_cast<std::size_t>(r)] == 0) missing += (missing.empty() ? "" : ", ") + std::to_string(r);
    }
    if (missing.empty()) return pids;
    const auto waited = std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - began);
    ZERO_CHECK(waited < policy.timeout, "make_communicator: rank ", rank, " has waited ", readable(waited), " for rank(s) ",
               missing, " to call it");
    ZERO_CHECK(kill(launcher, 0) == 0 || errno != ESRCH, "make_communicator: zero-run has ended before rank(s) ", missing,
               " came");
    if (!warned && waited >= policy.warn_after) {
      warned = true;
      std::fprintf(stderr, "zero: make_communicator: rank %d has waited %s for rank(s) %s\n", rank, readable(waited).c_str(),
                   missing.c_str());
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

Communicator join(const char* value) {
  int launcher = 0, fd = 0, rank = -1, ranks = 0;
  // NOLINTNEXTLINE(bugprone-unchecked-string-to-number-conversion): a number that overflows is none of zero-run's either
  const int read = std::sscanf(value, "%d:%d:%d:%d", &launcher, &fd, &rank, &ranks);
  ZERO_CHECK(read == 4 && ranks >= 1 && ranks <= LaunchBoard::kMostRanks && rank >= 0 && rank < ranks, kLaunchVariable, "=",
             value, ": not what zero-run sets; start the program by `zero-run -n N program`");
  const auto memory = Mapping::open(launcher, fd, LaunchBoard::bytes(ranks));
  memory->close_fd();
  auto& board = *reinterpret_cast<LaunchBoard*>(memory->data());
  Team::Setup setup;
  setup.rank = rank;
  setup.world = ranks;
  for (int r = 0; r < ranks; ++r) setup.ranks.push_back(r);
  setup.backend = "launched";
  setup.slots = {memory, board.slots()};
  setup.pids = meet(board, launcher, rank, ranks);
  return Communicator(std::make_shared<LaunchedImpl>(setup));
}

}  // namespace

Communicator launched_communicator() {
  const char* value = std::getenv(kLaunchVariable);
  if (value == nullptr || *value == '\0') return {};
  static std::mutex mutex;
  static auto* const first = new Communicator;  // to the end of the process: others may be waiting for it
  const std::lock_guard<std::mutex> lock(mutex);
  if (first->defined()) return first->duplicate();
  *first = join(value);
  return first->duplicate();
}

}  // namespace zero
