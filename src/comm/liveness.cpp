// Watching processes by pidfd, or by signal 0 and /proc where pidfds aren't to be had. See liveness.h.
#include "comm/liveness.h"

#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <fstream>
#include <string>
#include <utility>

#ifndef SYS_pidfd_open
#define SYS_pidfd_open 434
#endif

namespace zero {
namespace {

bool is_zombie(pid_t pid) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
  std::string line;
  if (!std::getline(file, line)) return false;
  const auto end_of_name = line.rfind(')');
  return end_of_name != std::string::npos && end_of_name + 2 < line.size() && line[end_of_name + 2] == 'Z';
}

}  // namespace

ProcessWatch::ProcessWatch(std::vector<pid_t> pids) : pids_(std::move(pids)) {
  for (pid_t pid : pids_) handles_.push_back(pid == getpid() ? -1 : static_cast<int>(syscall(SYS_pidfd_open, pid, 0)));
}

ProcessWatch::~ProcessWatch() {
  for (int handle : handles_) {
    if (handle >= 0) close(handle);
  }
}

bool ProcessWatch::ended(int index) const {
  if (pids_.empty()) return false;
  const auto i = static_cast<std::size_t>(index);
  if (pids_[i] == getpid()) return false;
  if (handles_[i] >= 0) {
    pollfd entry{handles_[i], POLLIN, 0};
    return poll(&entry, 1, 0) == 1;
  }
  return (kill(pids_[i], 0) != 0 && errno == ESRCH) || is_zombie(pids_[i]);
}

}  // namespace zero
