// Have the processes of the peers ended? Asked by Team while it waits.
#pragma once

#include <sys/types.h>

#include <vector>

namespace zero {

class ProcessWatch {
 public:
  ProcessWatch() = default;  ///< watches nobody: the ranks are threads of one process
  explicit ProcessWatch(std::vector<pid_t> pids);
  ~ProcessWatch();
  ProcessWatch(const ProcessWatch&) = delete;
  ProcessWatch& operator=(const ProcessWatch&) = delete;

  bool ended(int index) const;
  pid_t pid(int index) const { return pids_.empty() ? 0 : pids_[static_cast<std::size_t>(index)]; }

 private:
  std::vector<pid_t> pids_;
  std::vector<int> handles_;  ///< pidfds, -1 where the kernel has none: they can't be confused by a reused process id
};

}  // namespace zero
