#include "checkpoint/folder.h"

#include <fcntl.h>
#include <linux/fs.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <filesystem>
#include <string_view>
#include <system_error>
#include <utility>

#include "checkpoint/file.h"
#include "checkpoint/manifest.h"
#include "core/check.h"

namespace zero::checkpoint {
namespace {

constexpr std::string_view kStep = "step-";
constexpr std::string_view kTemporary = ".tmp-";

// The number of "step-00000012", or -1.
std::int64_t step_of(const std::string& name) {
  if (name.compare(0, kStep.size(), kStep) != 0 || name.size() == kStep.size() || name.size() > kStep.size() + 18) return -1;
  std::int64_t step = 0;
  for (std::size_t i = kStep.size(); i < name.size(); ++i) {
    if (name[i] < '0' || name[i] > '9') return -1;
    step = step * 10 + (name[i] - '0');
  }
  return step;
}

std::string in(const std::string& folder, const std::string& name) {
  std::string path = folder;
  return path.append("/").append(name);
}

// The folder's lock, or -1 if another holds it (or there is no such folder any more).
int try_lock(const std::string& path) {
  const int descriptor = ::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (descriptor < 0) return -1;
  if (::flock(descriptor, LOCK_EX | LOCK_NB) == 0) return descriptor;
  ::close(descriptor);
  return -1;
}

void remove_leftovers(const std::string& directory) {
  for (const auto& name : names_in(directory)) {
    if (name.compare(0, kTemporary.size(), kTemporary) != 0) continue;
    const auto path = in(directory, name);
    const int lock = try_lock(path);
    if (lock < 0) continue;  // in progress
    remove_all(path);
    ::close(lock);
  }
}

std::string temporary_name(const std::string& directory, const std::string& what) {
  std::string path = directory + "/" + std::string(kTemporary) + what + "-XXXXXX";
  if (::mkdtemp(path.data()) == nullptr)
    ZERO_FAIL("can't make a folder in ", directory, ": ", std::generic_category().message(errno));
  // As an ordinary folder: mkdtemp's are the user's alone.
  const auto mask = ::umask(0);
  ::umask(mask);
  (void)::chmod(path.c_str(), 0777 & ~mask);
  return path;
}

// Never taken for a checkpoint while it goes.
void retire(const std::string& directory, const std::string& name) {
  const auto hidden = temporary_name(directory, "old");
  rename(directory + "/" + name, hidden);  // over an empty folder
  remove_all(hidden);
}

// `from` becomes `to`. If there is one already (the same step was saved before), the two change places in one act.
void take_place(const std::string& from, const std::string& to) {
  if (!is_folder(to)) {
    rename(from, to);
    return;
  }
  if (::syscall(SYS_renameat2, AT_FDCWD, from.c_str(), AT_FDCWD, to.c_str(), RENAME_EXCHANGE) != 0)
    ZERO_FAIL("can't replace ", to, ": ", std::generic_category().message(errno), "; remove it, or save to another folder");
}

}  // namespace

std::string step_folder(const std::string& directory, std::int64_t step) {
  char name[32];
  (void)std::snprintf(name, sizeof name, "step-%08lld", static_cast<long long>(step));
  return directory + "/" + name;
}

NewFolder NewFolder::make(const std::string& directory, std::int64_t step) {
  if (!is_folder(directory)) {
    make_folder(directory);
    const auto parent = std::filesystem::path(directory).parent_path().string();
    sync_folder(parent.empty() ? "." : parent);
  }
  remove_leftovers(directory);
  auto path = temporary_name(directory, std::string(kStep) + std::to_string(step));
  const int lock = try_lock(path);
  return {directory, std::move(path), step, lock};
}

NewFolder::NewFolder(NewFolder&& other) noexcept
    : directory_(std::move(other.directory_)),
      path_(std::exchange(other.path_, {})),
      step_(other.step_),
      lock_(std::exchange(other.lock_, -1)) {}

NewFolder::~NewFolder() {
  if (!path_.empty()) {
    try {
      remove_all(path_);
    } catch (const c10::Error&) {  // the next save tries again
    }
  }
  if (lock_ >= 0) ::close(lock_);
}

std::string NewFolder::commit(const std::string& manifest, int keep) {
  auto place = step_folder(directory_, step_);
  write_whole(path_ + "/" + kManifestName, manifest);
  sync_folder(path_);
  take_place(path_, place);
  sync_folder(directory_);
  // What remains under the temporary name, if anything, is the step's older checkpoint.
  const auto rest = std::exchange(path_, {});
  if (is_folder(rest)) remove_all(rest);
  if (keep > 0) {
    auto all = checkpoints_in(directory_);
    // A run that was set back saves steps before those that are there: what it saves stays.
    all.erase(std::remove(all.begin(), all.end(), place), all.end());
    for (std::size_t i = 0; i + static_cast<std::size_t>(keep - 1) < all.size(); ++i)
      retire(directory_, all[i].substr(directory_.size() + 1));
  }
  return place;
}

std::vector<std::string> checkpoints_in(const std::string& directory) {
  std::vector<std::pair<std::int64_t, std::string>> found;
  for (const auto& name : names_in(directory)) {
    const auto step = step_of(name);
    if (step < 0) continue;
    const auto path = in(directory, name);
    try {
      (void)read_manifest(path);
    } catch (const c10::Error&) {
      // One of a newer format is a checkpoint all the same: who loads it should hear so.
      const auto manifest = path + "/" + kManifestName;
      if (size_of(manifest) < 0 || !is_newer(read_whole(manifest))) continue;
    }
    found.emplace_back(step, path);
  }
  std::sort(found.begin(), found.end());
  std::vector<std::string> out;
  for (auto& [step, path] : found) out.push_back(std::move(path));
  return out;
}

}  // namespace zero::checkpoint
