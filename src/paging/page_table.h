// Which storages of this process are paged, and who owns them. One table for all optimizers and ranks (threads).
#pragma once

#include <c10/core/StorageImpl.h>

#include <memory>
#include <optional>
#include <shared_mutex>
#include <unordered_map>

#include "paging/page_owner.h"

namespace zero {

class PageTable {
 public:
  static PageTable& global();

  /// The entry holds the storage weakly: its address can't be used by another one while the entry is there.
  void add(const c10::intrusive_ptr<c10::StorageImpl>& storage, std::weak_ptr<PageOwner> owner, int page);
  void remove(const c10::StorageImpl* storage);

  struct Found {
    std::shared_ptr<PageOwner> owner;
    int page = -1;
  };
  /// Nothing if the storage isn't paged, or its owner is gone.
  std::optional<Found> find(const c10::StorageImpl* storage) const;
  std::size_t size() const;

 private:
  struct Entry {
    c10::weak_intrusive_ptr<c10::StorageImpl> storage;
    std::weak_ptr<PageOwner> owner;
    int page;
  };
  mutable std::shared_mutex mutex_;
  std::unordered_map<const c10::StorageImpl*, Entry> entries_;
};

}  // namespace zero
