// Memory that all ranks of a node can reach: one mapping per rank. Threads share pointers; each process has a memfd of its own
// that the peers open through its /proc entry, so that nothing has a name, nothing outlives the processes, and each rank can
// let go of its part by itself. Made by TeamImpl::allocate().
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "zero/communicator.h"

namespace zero {

/// Pages mapped into this process; unmapped at the end.
class Mapping {
 public:
  /// Zero-filled memory of this process. `shared`: backed by a memfd, all of it reserved.
  static std::shared_ptr<Mapping> create(std::int64_t bytes, bool shared);
  /// The memfd of another process.
  static std::shared_ptr<Mapping> open(pid_t pid, int fd, std::int64_t bytes);
  ~Mapping();
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;

  char* data() const { return data_; }
  int fd() const { return fd_; }
  /// Peers have opened it: the mapping alone keeps the memory.
  void close_fd();

 private:
  Mapping(std::int64_t bytes, int fd, bool counted);
  char* data_ = nullptr;
  std::int64_t bytes_;  ///< whole pages
  int fd_ = -1;
  bool counted_;
};

/// How this process shows a mapping to its peers; from_token() is for the peer.
std::string token_of(const std::shared_ptr<Mapping>& mapping, bool shared);
std::shared_ptr<Mapping> from_token(const std::string& token, std::int64_t bytes, bool shared);

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

}  // namespace zero
