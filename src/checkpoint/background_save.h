// A save that is written by a thread while training goes on. The ranks' threads meet in the new folder and not through a communicator: one
// belongs to the thread that trains, and MPI need not allow another. Each thread writes its file and then a note of what is in it;
// rank 0's waits for all notes and commits.
#pragma once

#include <atomic>
#include <chrono>
#include <future>
#include <optional>
#include <string>
#include <thread>

#include "checkpoint/folder.h"
#include "checkpoint/job.h"
#include "zero/communicator.h"

namespace zero {

class BackgroundSave {
 public:
  struct Plan {
    checkpoint::Job job;                          ///< in host memory
    std::string folder;                           ///< the new one
    std::optional<checkpoint::NewFolder> commit;  ///< rank 0's
    int rank = 0, ranks = 1, keep = 0;
    std::chrono::milliseconds timeout{0};  ///< for the other ranks' notes
  };
  explicit BackgroundSave(Plan plan);
  /// Until the save has ended, unless an exception is on its way: then it is given up.
  ~BackgroundSave();
  BackgroundSave(const BackgroundSave&) = delete;
  BackgroundSave& operator=(const BackgroundSave&) = delete;

  /// Collective. @returns why there is no checkpoint, the same on every rank, unless that has been taken; empty: there is one
  std::string wait(const Communicator& comm);
  /// On rank 0, which knows: has it ended without success? Said once.
  std::string take_problem();

 private:
  using Deadline = std::chrono::steady_clock::time_point;
  void run();
  void write();
  void commit(checkpoint::NewFolder& folder, Deadline deadline);
  /// @returns whether it is there; false when given up or too late
  bool await_note(int rank, Deadline deadline) const;
  std::string file(int rank) const;
  std::string note(int rank) const;

  Plan plan_;
  std::atomic<bool> cancelled_{false}, ended_{false};
  std::string write_problem_, problem_;
  bool taken_ = false;
  std::promise<void> written_;
  std::future<void> written_future_ = written_.get_future();
  std::thread thread_;
};

}  // namespace zero
