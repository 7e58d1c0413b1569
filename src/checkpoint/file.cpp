#include "checkpoint/file.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <system_error>
#include <utility>

#include "core/check.h"

namespace zero::checkpoint {
namespace {

constexpr mode_t kFileMode = 0666;  // less the user's umask
constexpr std::int64_t kLargestCall = std::int64_t{1} << 30;

[[noreturn]] void fail(const char* what, const std::string& path, int error) {
  ZERO_FAIL(what, " ", path, ": ", std::generic_category().message(error));
}

int open_or_fail(const char* what, const std::string& path, int flags) {
  const int descriptor = ::open(path.c_str(), flags | O_CLOEXEC, kFileMode);
  if (descriptor < 0) fail(what, path, errno);
  return descriptor;
}

}  // namespace

File File::create(const std::string& path) {
  return {path, open_or_fail("can't make the file", path, O_CREAT | O_EXCL | O_RDWR)};
}
File File::open_to_read(const std::string& path) { return {path, open_or_fail("can't open", path, O_RDONLY)}; }
File File::open_to_write(const std::string& path) { return {path, open_or_fail("can't open", path, O_RDWR)}; }

File::File(File&& other) noexcept : path_(std::move(other.path_)), descriptor_(std::exchange(other.descriptor_, -1)) {}

File::~File() {
  if (descriptor_ >= 0) ::close(descriptor_);
}

void File::reserve(std::int64_t bytes) const {
  if (bytes == 0) return;
  if (::fallocate(descriptor_, 0, 0, bytes) == 0) return;
  // Where the file system can't, a full disk is met while writing.
  if (errno != EOPNOTSUPP && errno != ENOSYS && errno != EINVAL) fail("can't write", path_, errno);
  if (::ftruncate(descriptor_, bytes) != 0) fail("can't write", path_, errno);
}

void File::write(const void* data, std::int64_t bytes, std::int64_t at) const {
  const auto* from = static_cast<const char*>(data);
  while (bytes > 0) {
    const auto done = ::pwrite(descriptor_, from, static_cast<std::size_t>(std::min(bytes, kLargestCall)), at);
    if (done < 0 && errno == EINTR) continue;
    if (done < 0) fail("can't write", path_, errno);
    from += done, bytes -= done, at += done;
  }
}

void File::read(void* data, std::int64_t bytes, std::int64_t at) const {
  auto* to = static_cast<char*>(data);
  while (bytes > 0) {
    const auto done = ::pread(descriptor_, to, static_cast<std::size_t>(std::min(bytes, kLargestCall)), at);
    if (done < 0 && errno == EINTR) continue;
    if (done < 0) fail("can't read", path_, errno);
    if (done == 0) ZERO_FAIL("can't read ", path_, ": it ends at byte ", at, ", ", bytes, " bytes too early");
    to += done, bytes -= done, at += done;
  }
}

void File::start_writing(std::int64_t at, std::int64_t bytes) const {
  (void)::sync_file_range(descriptor_, at, bytes, SYNC_FILE_RANGE_WRITE);  // advice
}

void File::sync() const {
  if (::fsync(descriptor_) != 0) fail("can't write", path_, errno);
}

std::int64_t File::size() const {
  struct stat status {};
  if (::fstat(descriptor_, &status) != 0) fail("can't read", path_, errno);
  return status.st_size;
}

std::string read_whole(const std::string& path) {
  const auto file = File::open_to_read(path);
  std::string text(static_cast<std::size_t>(file.size()), '\0');
  file.read(text.data(), static_cast<std::int64_t>(text.size()), 0);
  return text;
}

void write_whole(const std::string& path, const std::string& text) {
  const auto temporary = path + ".tmp";
  {
    const auto file = File::create(temporary);
    file.write(text.data(), static_cast<std::int64_t>(text.size()), 0);
    file.sync();
  }
  rename(temporary, path);
}

void sync_folder(const std::string& path) {
  const int descriptor = open_or_fail("can't open the folder", path, O_RDONLY | O_DIRECTORY);
  const int failed = ::fsync(descriptor) == 0 || errno == EINVAL ? 0 : errno;  // EINVAL: file systems that have no need of it
  ::close(descriptor);
  if (failed != 0) fail("can't write the folder", path, failed);
}

std::int64_t size_of(const std::string& path) {
  struct stat status {};
  return ::stat(path.c_str(), &status) == 0 && S_ISREG(status.st_mode) ? status.st_size : -1;
}

bool is_folder(const std::string& path) {
  struct stat status {};
  return ::stat(path.c_str(), &status) == 0 && S_ISDIR(status.st_mode);
}

std::vector<std::string> names_in(const std::string& path) {
  std::vector<std::string> out;
  DIR* folder = ::opendir(path.c_str());
  if (folder == nullptr) {
    if (errno == ENOENT) return out;
    fail("can't read the folder", path, errno);
  }
  while (const auto* entry = ::readdir(folder)) {  // NOLINT(concurrency-mt-unsafe): a stream of this function's own
    const std::string name = entry->d_name;
    if (name != "." && name != "..") out.push_back(name);
  }
  ::closedir(folder);
  std::sort(out.begin(), out.end());
  return out;
}

void make_folder(const std::string& path) {
  std::error_code error;
  std::filesystem::create_directories(path, error);
  if (error && !is_folder(path)) fail("can't make the folder", path, error.value());
}

void remove_all(const std::string& path) {
  std::error_code error;
  std::filesystem::remove_all(path, error);
  if (error) fail("can't remove", path, error.value());
}

void rename(const std::string& from, const std::string& to) {
  if (std::rename(from.c_str(), to.c_str()) != 0) fail(("can't rename " + from + " to").c_str(), to, errno);
}

}  // namespace zero::checkpoint
