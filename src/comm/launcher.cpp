// zero-run's part: makes the shared block, starts the processes and waits for them. See zero/launch.h.
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <new>
#include <thread>

#include "comm/launched.h"
#include "core/check.h"
#include "zero/launch.h"

extern char** environ;

namespace zero {
namespace {

volatile std::sig_atomic_t received = 0;
void note_signal(int number) { received = number; }

/// While it lives SIGINT and SIGTERM are noted instead of ending this process.
class NotedSignals {
 public:
  NotedSignals() {
    struct sigaction action {};
    action.sa_handler = note_signal;
    for (std::size_t i = 0; i < 2; ++i) sigaction(kNumbers[i], &action, &before_[i]);
  }
  ~NotedSignals() {
    for (std::size_t i = 0; i < 2; ++i) sigaction(kNumbers[i], &before_[i], nullptr);
  }
  NotedSignals(const NotedSignals&) = delete;
  NotedSignals& operator=(const NotedSignals&) = delete;

 private:
  static constexpr int kNumbers[2] = {SIGINT, SIGTERM};
  struct sigaction before_[2];
};

std::vector<std::string> environment_for(int fd, int rank, int ranks) {
  std::vector<std::string> out;
  const std::string ours = std::string(kLaunchVariable) + "=";
  for (char** entry = environ; *entry != nullptr; ++entry)
    if (std::strncmp(*entry, ours.c_str(), ours.size()) != 0) out.emplace_back(*entry);
  out.push_back(ours + std::to_string(getpid()) + ":" + std::to_string(fd) + ":" + std::to_string(rank) + ":" +
                std::to_string(ranks));
  if (std::getenv("OMP_NUM_THREADS") == nullptr)
    out.push_back("OMP_NUM_THREADS=" + std::to_string(std::max(1L, sysconf(_SC_NPROCESSORS_ONLN) / ranks)));
  return out;
}

std::vector<char*> pointers(std::vector<std::string>& strings) {
  std::vector<char*> out;
  for (auto& s : strings) out.push_back(s.data());
  out.push_back(nullptr);
  return out;
}

/// Processes that haven't ended.
struct Children {
  std::vector<pid_t> pids;
  void tell(int number) const {
    for (const pid_t pid : pids) kill(pid, number);
  }
  ~Children() {
    tell(SIGKILL);
    for (const pid_t pid : pids) waitpid(pid, nullptr, 0);
  }
};

}  // namespace

int launch(int ranks, const std::vector<std::string>& command, double grace_seconds) {
  ZERO_CHECK(ranks >= 1 && ranks <= LaunchBoard::kMostRanks, "launch: ", ranks, " ranks; there can be 1 to ",
             LaunchBoard::kMostRanks);
  ZERO_CHECK(!command.empty(), "launch: no program");
  const auto memory = Mapping::create(LaunchBoard::bytes(ranks), true);
  auto* board = new (memory->data()) LaunchBoard{};
  for (int r = 0; r < ranks; ++r) new (board->slots() + r) Slot;

  const NotedSignals signals;
  Children children;
  auto arguments = command;
  for (int r = 0; r < ranks; ++r) {
    auto environment = environment_for(memory->fd(), r, ranks);
    pid_t pid = 0;
    const int error =
        posix_spawnp(&pid, arguments[0].c_str(), nullptr, nullptr, pointers(arguments).data(), pointers(environment).data());
    ZERO_CHECK(error == 0, "can't start ", arguments[0], ": ", std::strerror(error));
    children.pids.push_back(pid);
  }
  int status = 0;
  bool ended = false;
  auto deadline = std::chrono::steady_clock::time_point::max();
  while (!children.pids.empty()) {
    if (const int number = received; number != 0) {
      received = 0;
      children.tell(number);
    }
    for (std::size_t i = 0; i < children.pids.size();) {
      int how = 0;
      if (waitpid(children.pids[i], &how, WNOHANG) <= 0) {
        ++i;
        continue;
      }
      children.pids.erase(children.pids.begin() + static_cast<std::ptrdiff_t>(i));
      const int code = WIFEXITED(how) ? WEXITSTATUS(how) : 128 + WTERMSIG(how);
      if (code == 0 || status != 0) continue;
      status = code;
      deadline = std::chrono::steady_clock::now() + std::chrono::milliseconds(static_cast<std::int64_t>(1000 * grace_seconds));
    }
    if (!ended && std::chrono::steady_clock::now() > deadline) {
      ended = true;
      children.tell(SIGTERM);
      deadline = std::chrono::steady_clock::now() + std::chrono::seconds(2);
    } else if (ended && std::chrono::steady_clock::now() > deadline) {
      children.tell(SIGKILL);
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  return status;
}

}  // namespace zero
