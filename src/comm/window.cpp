// Mappings and memfds, see window.h; and the Buffer handle.
#include "comm/window.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <utility>

#include "comm/room.h"
#include "core/check.h"

namespace zero {
namespace {

std::atomic<std::int64_t> held{0};

std::int64_t whole_pages(std::int64_t bytes) {
  const std::int64_t page = sysconf(_SC_PAGESIZE);
  return (std::max<std::int64_t>(bytes, 1) + page - 1) / page * page;
}

struct ThreadToken {
  const std::shared_ptr<Mapping>* mapping;
};
struct ProcessToken {
  pid_t pid;
  int fd;
};

}  // namespace

std::int64_t bytes_held() { return held.load(); }

Mapping::Mapping(std::int64_t bytes, int fd, bool counted) : bytes_(whole_pages(bytes)), fd_(fd), counted_(counted) {
  if (counted_) held += bytes_;
}

Mapping::~Mapping() {
  if (data_ != nullptr) munmap(data_, static_cast<std::size_t>(bytes_));
  close_fd();
  if (counted_) held -= bytes_;
}

void Mapping::close_fd() {
  if (fd_ >= 0) close(std::exchange(fd_, -1));
}

std::shared_ptr<Mapping> Mapping::create(std::int64_t bytes, bool shared) {
  int fd = -1;
  if (shared) {
    fd = memfd_create("zero", MFD_CLOEXEC);
    ZERO_CHECK(fd >= 0, "memfd_create: ", std::strerror(errno));
  }
  std::shared_ptr<Mapping> mapping(new Mapping(bytes, fd, true));
  const auto length = mapping->bytes_;
  if (shared) {
    int error = 0;
    // Reserves every page now: otherwise the first touch of one that isn't there is a SIGBUS.
    do {
      error = posix_fallocate(fd, 0, length);
    } while (error == EINTR);
    ZERO_CHECK(error == 0, "reserving ", readable_bytes(length), " of shared memory: ", std::strerror(error));
  }
  void* data = mmap(nullptr, static_cast<std::size_t>(length), PROT_READ | PROT_WRITE,
                    shared ? MAP_SHARED : MAP_PRIVATE | MAP_ANONYMOUS, fd, 0);
  ZERO_CHECK(data != MAP_FAILED, "mapping ", readable_bytes(length), ": ", std::strerror(errno));
  mapping->data_ = static_cast<char*>(data);
  madvise(data, static_cast<std::size_t>(length), MADV_HUGEPAGE);  // a wish; many kernels don't have them for shared memory
  return mapping;
}

std::shared_ptr<Mapping> Mapping::open(pid_t pid, int fd, std::int64_t bytes) {
  const std::string path = detail::text("/proc/", pid, "/fd/", fd);
  std::shared_ptr<Mapping> mapping(new Mapping(bytes, ::open(path.c_str(), O_RDWR | O_CLOEXEC), false));
  ZERO_CHECK(mapping->fd_ >= 0, "cannot reach the memory of process ", pid, " on this node: ", path, ": ", std::strerror(errno),
             "; where processes are kept apart (containers, other users) set ZERO_NODE_SHARING=0");
  void* data = mmap(nullptr, static_cast<std::size_t>(mapping->bytes_), PROT_READ | PROT_WRITE, MAP_SHARED, mapping->fd_, 0);
  ZERO_CHECK(data != MAP_FAILED, "mapping ", readable_bytes(bytes), " of process ", pid, ": ", std::strerror(errno));
  mapping->data_ = static_cast<char*>(data);
  mapping->close_fd();
  return mapping;
}

std::string token_of(const std::shared_ptr<Mapping>& mapping, bool shared) {
  if (!shared) {
    const ThreadToken token{&mapping};
    return {reinterpret_cast<const char*>(&token), sizeof token};
  }
  const ProcessToken token{getpid(), mapping->fd()};
  return {reinterpret_cast<const char*>(&token), sizeof token};
}

std::shared_ptr<Mapping> from_token(const std::string& token, std::int64_t bytes, bool shared) {
  if (!shared) {
    ThreadToken thread{};
    std::memcpy(&thread, token.data(), sizeof thread);
    return *thread.mapping;
  }
  ProcessToken process{};
  std::memcpy(&process, token.data(), sizeof process);
  return Mapping::open(process.pid, process.fd, bytes);
}

Buffer::Buffer(std::shared_ptr<Impl> impl) : impl_(std::move(impl)) {}

void* Buffer::data() const {
  ZERO_CHECK(defined(), "zero::Buffer: not allocated");
  return impl_->data(impl_->self);
}

std::int64_t Buffer::bytes() const { return defined() ? impl_->bytes : 0; }

}  // namespace zero
