// Memory that all ranks of a node can reach: one mapping per rank. Threads share pointers; each process has a memfd of its own
// that the peers open through its /proc entry, so that nothing has a name, nothing outlives the processes, and each rank can
// let go of its part by itself. Made by TeamImpl::allocate().
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "zero/communicator.h"

namespace zero {

/// Pages mapped into this process and unmapped at the end, or memory of a device.
class Mapping {
 public:
  /// Zero-filled memory of this process. `shared`: backed by a memfd, all of it reserved.
  static std::shared_ptr<Mapping> create(std::int64_t bytes, bool shared);
  /// The memfd of another process. The descriptor stays open, too.
  static std::shared_ptr<Mapping> open(pid_t pid, int fd, std::int64_t bytes);
  /// Memory from elsewhere (of a device), given back by `release` instead of being unmapped.
  static std::shared_ptr<Mapping> adopt(void* data, std::int64_t bytes, std::function<void()> release);
  ~Mapping();
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;

  char* data() const { return data_; }
  int fd() const { return fd_; }  ///< -1: none, or closed
  /// Nobody will open it or map it again: the mapping alone keeps the memory.
  void close_fd();

 private:
  Mapping(std::int64_t bytes, int fd, bool counted);
  char* data_ = nullptr;
  std::int64_t bytes_;  ///< whole pages
  int fd_ = -1;
  bool counted_;
  std::function<void()> release_;
};

/// How this process shows a mapping to its peers; from_token() is for the peer.
std::string token_of(const std::shared_ptr<Mapping>& mapping, bool processes);
std::shared_ptr<Mapping> from_token(const std::string& token, std::int64_t bytes, bool processes);

/// Bytes that live mappings made by this process hold.
std::int64_t bytes_held();

/// What is behind a Buffer.
struct Buffer::Impl {
  std::vector<std::shared_ptr<Mapping>> parts;  ///< by rank on the node
  int self = 0;
  std::int64_t bytes = 0;
  std::int64_t id = 0;  ///< the same on every rank of the communicator

  char* data(int member) const { return parts[static_cast<std::size_t>(member)]->data(); }
};

/// The ranks' parts [offset, offset + bytes) of a Buffer with Backing::file, one after the other in one range of addresses, without
/// a copy. Whatever a rank writes in its part shows here, but for pages that have been written here: those are this process's own
/// until forget_writes(). (Private mappings of the files; that later writes to the file show in them is what Linux does, see
/// mmap(2), and is tried out once.)
class SideBySide {
 public:
  /// Null where it can't be done: no files, not whole pages, no more mappings.
  static std::shared_ptr<SideBySide> map(const Buffer::Impl& buffer, std::int64_t offset, std::int64_t bytes);
  ~SideBySide();
  SideBySide(const SideBySide&) = delete;
  SideBySide& operator=(const SideBySide&) = delete;

  char* data() const { return data_; }
  /// Shows again what the parts hold.
  void forget_writes();

 private:
  SideBySide(char* data, std::int64_t bytes) : data_(data), bytes_(bytes) {}
  char* data_;
  std::int64_t bytes_;  ///< of all parts
};

}  // namespace zero
