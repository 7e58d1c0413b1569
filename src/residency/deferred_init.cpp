#include "zero/deferred_init.h"

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "core/check.h"

namespace zero {
namespace {

thread_local DeferredInit* t_scope = nullptr;

constexpr long kTmpfs = 0x01021994, kRamfs = 0x858458f6;

bool on_disk(const std::string& folder) {
  struct statfs info {};
  return statfs(folder.c_str(), &info) == 0 && info.f_type != kTmpfs && info.f_type != kRamfs;
}

// A file without a name; −1 and errno.
int make_file(const std::string& folder) {
  const int fd = open(folder.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
  if (fd >= 0) return fd;
  auto name = folder + "/zero-XXXXXX";  // a file system without O_TMPFILE
  const int named = mkostemp(name.data(), O_CLOEXEC);
  if (named >= 0) unlink(name.c_str());
  return named;
}

std::string choose_folder(const std::string& wanted) {
  std::vector<std::string> folders{wanted};
  if (wanted.empty()) {
    folders.clear();
    if (const char* tmp = std::getenv("TMPDIR")) folders.emplace_back(tmp);
    for (const char* folder : {"/var/tmp", "/tmp", "."}) folders.emplace_back(folder);
  }
  std::string tried;
  for (const auto& folder : folders) {
    const int fd = on_disk(folder) ? make_file(folder) : -1;
    if (fd >= 0) {
      close(fd);
      return folder;
    }
    tried += (tried.empty() ? "" : ", ") + folder;
  }
  ZERO_FAIL("DeferredInit: no file can be made on a disk in ", tried, "; name a folder that is not in memory (tmpfs)");
}

}  // namespace

class FileAllocator final : public c10::Allocator {
 public:
  static void install() {
    static std::once_flag once;
    std::call_once(once, [] {
      // Never destroyed: tensors of static lifetime are freed after main() has ended.
      instance_ = new FileAllocator(c10::GetAllocator(c10::kCPU));
      c10::SetAllocator(c10::kCPU, instance_, /*priority=*/255);
    });
  }

  c10::DataPtr allocate(std::size_t bytes) override {
    auto* scope = t_scope;
    if (scope == nullptr || bytes == 0 || static_cast<std::int64_t>(bytes) < scope->least_bytes_) return base_->allocate(bytes);
    const int fd = make_file(scope->folder_);
    ZERO_CHECK(fd >= 0, "DeferredInit: no file in ", scope->folder_, ": ", std::strerror(errno));
    void* memory = MAP_FAILED;
    // Room is reserved now: a full disk is an error here, and not a signal in the middle of somebody's loop.
    const int failed = posix_fallocate(fd, 0, static_cast<off_t>(bytes));
    if (failed == 0) memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    const int error = failed != 0 ? failed : errno;
    close(fd);
    ZERO_CHECK(memory != MAP_FAILED, "DeferredInit: ", bytes, " bytes in ", scope->folder_, ": ", std::strerror(error));
    const std::lock_guard<std::mutex> lock(mutex_);
    // What was made before stays in its file: this process lets go of the pages, once they are written, so that the kernel can take
    // them at any time. (If it is still there: its address may be another's.)
    if (const auto before = sizes_.find(scope->latest_); before != sizes_.end()) {
      msync(before->first, before->second, MS_SYNC);
      madvise(before->first, before->second, MADV_DONTNEED);
    }
    sizes_[memory] = bytes;
    scope->latest_ = memory;
    return {memory, memory, &release, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { base_->copy_data(to, from, bytes); }

 private:
  explicit FileAllocator(c10::Allocator* base) : base_(base) {}

  static void release(void* data) {
    std::size_t bytes = 0;
    {
      const std::lock_guard<std::mutex> lock(instance_->mutex_);
      if (const auto it = instance_->sizes_.find(data); it != instance_->sizes_.end()) {
        bytes = it->second;
        instance_->sizes_.erase(it);
      }
    }
    if (bytes > 0) {
      munmap(data, bytes);
    } else if (auto* free = instance_->base_->raw_deleter()) {
      free(data);
    }
  }

  static inline FileAllocator* instance_ = nullptr;
  c10::Allocator* base_;
  std::mutex mutex_;
  std::unordered_map<void*, std::size_t> sizes_;
};

DeferredInit::DeferredInit(const std::string& folder, std::int64_t least_bytes)
    : outer_(t_scope), folder_(choose_folder(folder)), least_bytes_(least_bytes) {
  FileAllocator::install();
  t_scope = this;
}

DeferredInit::~DeferredInit() { t_scope = outer_; }

}  // namespace zero
