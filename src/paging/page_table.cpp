#include "paging/page_table.h"

#include <mutex>
#include <utility>

namespace zero {

PageTable& PageTable::global() {
  static auto* table = new PageTable;  // outlives every tensor, also those that end with the process
  return *table;
}

void PageTable::add(const c10::intrusive_ptr<c10::StorageImpl>& storage, std::weak_ptr<PageOwner> owner, int page) {
  const std::unique_lock<std::shared_mutex> lock(mutex_);
  entries_.insert_or_assign(storage.get(), Entry{c10::weak_intrusive_ptr<c10::StorageImpl>(storage), std::move(owner), page});
}

void PageTable::remove(const c10::StorageImpl* storage) {
  const std::unique_lock<std::shared_mutex> lock(mutex_);
  entries_.erase(storage);
}

std::optional<PageTable::Found> PageTable::find(const c10::StorageImpl* storage) const {
  const std::shared_lock<std::shared_mutex> lock(mutex_);
  const auto it = entries_.find(storage);
  if (it == entries_.end()) return std::nullopt;
  auto owner = it->second.owner.lock();
  if (owner == nullptr) return std::nullopt;
  return Found{std::move(owner), it->second.page};
}

std::size_t PageTable::size() const {
  const std::shared_lock<std::shared_mutex> lock(mutex_);
  return entries_.size();
}

}  // namespace zero
