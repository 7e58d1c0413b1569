#include "residency/unit_memory.h"

#include <c10/core/Allocator.h>

#include <map>
#include <mutex>
#include <utility>

namespace zero {

struct UnitMemory::Pool {
  std::mutex mutex;
  std::multimap<std::int64_t, c10::DataPtr> spare;
  std::int64_t in_use = 0, spare_bytes = 0;
  bool open = true;  ///< false: what comes back is freed
};

UnitMemory::UnitMemory(c10::Device device) : device_(device), pool_(std::make_shared<Pool>()) {}

UnitMemory::~UnitMemory() {
  const std::lock_guard<std::mutex> lock(pool_->mutex);
  pool_->open = false;
  pool_->spare.clear();
}

UnitMemory::Block UnitMemory::take(std::int64_t bytes, std::int64_t limit) {
  c10::DataPtr memory;
  {
    const std::lock_guard<std::mutex> lock(pool_->mutex);
    auto& spare = pool_->spare;
    if (const auto found = spare.find(bytes); found != spare.end()) {
      memory = std::move(found->second);
      spare.erase(found);
      pool_->spare_bytes -= bytes;
    }
    pool_->in_use += bytes;
    // Of other sizes: the smallest first, which are the cheapest to make again.
    while (!spare.empty() && pool_->in_use + pool_->spare_bytes > limit) {
      pool_->spare_bytes -= spare.begin()->first;
      spare.erase(spare.begin());
    }
  }
  if (!memory && bytes > 0) {
    try {
      memory = c10::GetAllocator(device_.type())->allocate(static_cast<std::size_t>(bytes));
    } catch (...) {
      const std::lock_guard<std::mutex> lock(pool_->mutex);
      pool_->in_use -= bytes;
      throw;
    }
  }
  auto* data = static_cast<char*>(memory.get());
  auto held = std::make_shared<c10::DataPtr>(std::move(memory));
  return Block(data, [pool = pool_, held, bytes](char*) {
    const std::lock_guard<std::mutex> lock(pool->mutex);
    pool->in_use -= bytes;
    if (!pool->open || bytes == 0) return;
    pool->spare.emplace(bytes, std::move(*held));
    pool->spare_bytes += bytes;
  });
}

std::int64_t UnitMemory::bytes() const {
  const std::lock_guard<std::mutex> lock(pool_->mutex);
  return pool_->in_use + pool_->spare_bytes;
}

void UnitMemory::trim() {
  const std::lock_guard<std::mutex> lock(pool_->mutex);
  pool_->spare.clear();
  pool_->spare_bytes = 0;
}

}  // namespace zero
