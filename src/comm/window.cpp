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
  if (release_)
    release_();
  else if (data_ != nullptr)
    munmap(data_, static_cast<std::size_t>(bytes_));
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
  return mapping;
}

std::shared_ptr<Mapping> Mapping::adopt(void* data, std::int64_t bytes, std::function<void()> release) {
  std::shared_ptr<Mapping> mapping(new Mapping(bytes, -1, false));
  mapping->data_ = static_cast<char*>(data);
  mapping->release_ = std::move(release);
  return mapping;
}

namespace {

bool map_part(char* at, std::int64_t bytes, int fd, std::int64_t offset) {
  // NORESERVE: only what is written takes memory, and hardly anything ever is.
  return mmap(at, static_cast<std::size_t>(bytes), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_NORESERVE | MAP_FIXED, fd,
              offset) != MAP_FAILED;
}

// Do writes to the file show in a private mapping that has been read, and do they again after its own writes were dropped?
bool private_mappings_follow() {
  try {
    const auto file = Mapping::create(1, true);
    const auto page = whole_pages(1);
    void* data = mmap(nullptr, static_cast<std::size_t>(page), PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (data == MAP_FAILED) return false;
    auto* view = static_cast<volatile char*>(data);
    auto* origin = static_cast<volatile char*>(file->data());
    bool good = map_part(static_cast<char*>(data), page, file->fd(), 0);
    if (good) {
      good = view[0] == 0;
      origin[0] = 1;
      good = good && view[0] == 1;
      view[1] = 2;
      origin[2] = 3;
      good = good && origin[1] == 0 && view[1] == 2 && madvise(data, static_cast<std::size_t>(page), MADV_DONTNEED) == 0 &&
             view[0] == 1 && view[1] == 0 && view[2] == 3;
    }
    munmap(data, static_cast<std::size_t>(page));
    return good;
  } catch (const c10::Error&) {
    return false;
  }
}

}  // namespace

std::shared_ptr<SideBySide> SideBySide::map(const Buffer::Impl& buffer, std::int64_t offset, std::int64_t bytes) {
  if (bytes == 0 || bytes != whole_pages(bytes) || offset % whole_pages(1) != 0) return nullptr;
  for (const auto& part : buffer.parts)
    if (part->fd() < 0) return nullptr;
  static const bool follows = private_mappings_follow();
  if (!follows) return nullptr;
  const auto all = bytes * static_cast<std::int64_t>(buffer.parts.size());
  void* data = mmap(nullptr, static_cast<std::size_t>(all), PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (data == MAP_FAILED) return nullptr;
  std::shared_ptr<SideBySide> view(new SideBySide(static_cast<char*>(data), all));
  auto* at = view->data_;
  for (const auto& part : buffer.parts) {
    if (!map_part(at, bytes, part->fd(), offset)) return nullptr;
    at += bytes;
  }
  return view;
}

SideBySide::~SideBySide() { munmap(data_, static_cast<std::size_t>(bytes_)); }

void SideBySide::forget_writes() { madvise(data_, static_cast<std::size_t>(bytes_), MADV_DONTNEED); }

std::string token_of(const std::shared_ptr<Mapping>& mapping, bool processes) {
  if (!processes) {
    const ThreadToken token{&mapping};
    return {reinterpret_cast<const char*>(&token), sizeof token};
  }
  const ProcessToken token{getpid(), mapping->fd()};
  return {reinterpret_cast<const char*>(&token), sizeof token};
}

std::shared_ptr<Mapping> from_token(const std::string& token, std::int64_t bytes, bool processes) {
  if (!processes) {
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
