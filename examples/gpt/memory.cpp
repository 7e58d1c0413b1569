// Counting allocations and reading /proc.
#include "memory.h"

#include <c10/core/Allocator.h>

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <mutex>
#include <string>
#include <unordered_map>

namespace gpt {
namespace {

/// Passes everything on to the allocator that was there, and keeps a list of what is live. Data and context pointer stay equal,
/// as code that frees raw memory expects.
class CountingAllocator final : public c10::Allocator {
 public:
  explicit CountingAllocator(c10::Allocator* base) : base_(base) { instance_ = this; }

  c10::DataPtr allocate(std::size_t bytes) override {
    c10::DataPtr data = base_->allocate(bytes);
    if (data.get() != nullptr && data.get() == data.get_context()) {
      const std::lock_guard lock(mutex_);
      sizes_[data.get()] = bytes;
      live_ += static_cast<std::int64_t>(bytes);
      peak_ = std::max(peak_, live_);
      free_ = data.get_deleter();
      TORCH_CHECK(data.compare_exchange_deleter(free_, &release), "the CPU allocator's deleter changed");
    }
    return data;
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { base_->copy_data(to, from, bytes); }

  std::int64_t live() {
    const std::lock_guard lock(mutex_);
    return live_;
  }
  std::int64_t peak() {
    const std::lock_guard lock(mutex_);
    return peak_;
  }
  void reset_peak() {
    const std::lock_guard lock(mutex_);
    peak_ = live_;
  }

  static CountingAllocator* instance() { return instance_; }

 private:
  static void release(void* data) {
    c10::DeleterFnPtr free = nullptr;
    {
      const std::lock_guard lock(instance_->mutex_);
      if (const auto it = instance_->sizes_.find(data); it != instance_->sizes_.end()) {
        instance_->live_ -= static_cast<std::int64_t>(it->second);
        instance_->sizes_.erase(it);
      }
      free = instance_->free_;
    }
    if (free != nullptr) free(data);
  }

  static inline CountingAllocator* instance_ = nullptr;
  c10::Allocator* base_;
  std::mutex mutex_;
  std::unordered_map<void*, std::size_t> sizes_;
  std::int64_t live_ = 0, peak_ = 0;
  c10::DeleterFnPtr free_ = nullptr;
};

/// The value in KiB after `key` in a file of /proc, in bytes; 0 where there is none.
std::int64_t kernel_figure(const char* path, const std::string& key) {
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);)
    if (line.compare(0, key.size(), key) == 0) return std::stoll(line.substr(key.size())) * 1024;
  return 0;
}

}  // namespace

void count_allocations() {
  // Never destroyed: tensors of static lifetime are freed after main() has ended.
  if (CountingAllocator::instance() == nullptr)
    c10::SetAllocator(c10::DeviceType::CPU, new CountingAllocator(c10::GetAllocator(c10::DeviceType::CPU)), /*priority=*/100);
}

std::int64_t live_tensor_bytes() {
  return CountingAllocator::instance() == nullptr ? 0 : CountingAllocator::instance()->live();
}
std::int64_t peak_tensor_bytes() {
  return CountingAllocator::instance() == nullptr ? 0 : CountingAllocator::instance()->peak();
}

std::int64_t shared_bytes_per_rank(int ranks) {
  std::ifstream maps("/proc/self/maps");
  std::int64_t bytes = 0;
  for (std::string line; std::getline(maps, line);) {
    unsigned long long begin = 0;
    unsigned long long end = 0;
    char shared = 0;  // 'p': a second, private view of the same memory
    if (line.find("/memfd:") != std::string::npos &&
        std::sscanf(line.c_str(), "%llx-%llx %*c%*c%*c%c", &begin, &end, &shared) == 3 && shared == 's')
      bytes += static_cast<std::int64_t>(end - begin);
  }
  return bytes / ranks;
}

std::int64_t resident_set() { return kernel_figure("/proc/self/status", "VmRSS:"); }
std::int64_t peak_resident_set() { return kernel_figure("/proc/self/status", "VmHWM:"); }
std::int64_t proportional_set() { return kernel_figure("/proc/self/smaps_rollup", "Pss:"); }

void reset_peaks() {
  std::ofstream("/proc/self/clear_refs") << "5\n";  // VmHWM starts again from the present resident set (proc(5))
  if (CountingAllocator::instance() != nullptr) CountingAllocator::instance()->reset_peak();
}

}  // namespace gpt
