// What operators meet at stage 3: parameters become whole when they are touched, within the budget.
#include <c10/util/Exception.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <set>
#include <utility>

#include "comm/window.h"
#include "core/check.h"
#include "core/memory.h"
#include "paging/storage.h"
#include "residency/paged_parameters.h"

namespace zero {

std::vector<Touch> PagedParameters::paged_of(const std::vector<int>& parameters, Access access) const {
  std::vector<Touch> touches;
  for (const int i : parameters)
    if (manages(i) && entries_[i].paged) touches.push_back({i, access});
  return touches;
}

void PagedParameters::hold(const std::vector<int>& parameters) {
  begin(paged_of(parameters, Access::reads), "zero::GatherGuard", true);
}

void PagedParameters::unhold(const std::vector<int>& parameters, bool written) noexcept {
  const auto touches = paged_of(parameters, written ? Access::writes : Access::reads);
  mark_own_pages(units_of(touches));  // a raw pointer may have been used for anything
  end(touches);
}

void PagedParameters::mark_own_pages(const std::vector<int>& units) noexcept {
  for (const int unit : units)
    if (units_[unit].view) units_[unit].own_pages = true;
}

void PagedParameters::begin(const std::vector<Touch>& touches, const std::string& op) { begin(touches, op, false); }

void PagedParameters::begin(const std::vector<Touch>& touches, const std::string& op, bool may_exceed) {
  const auto units = units_of(touches);
  const bool traced = std::this_thread::get_id() ==
                      trainer_.load(std::memory_order_relaxed);  // a reader's touches say nothing about the next step
  if (traced) {
    if (held_.empty() && pager_.written_bytes() > 0) settle_written(units_of(touches, true));
    for (const int unit : units) {
      prefetcher_.touch(unit, held_);
      held_.push_back(unit);
    }
  }
  if (settings_.debug) log_fault(touches, op);
  try {
    pager_.pin(units, may_exceed);
  } catch (...) {
    if (traced) held_.resize(held_.size() - units.size());
    try {
      throw;
    } catch (const OverBudget& error) {
      auto all = units;
      all.insert(all.end(), held_.begin(), held_.end());
      refuse(touches, op, std::max(error.needed, unwritten_bytes(all)));
    }
  }
  if (traced && !may_exceed && settings_.beyond == Settings::Beyond::warned) warn_beyond();
}

void PagedParameters::warn_beyond() {
  if (pager_.resident_bytes() - pager_.written_bytes() <= pager_.budget()) return;
  settings_.beyond = Settings::Beyond::allowed;  // once
  TORCH_WARN(callbacks_.when(), ": operators need more whole parameters at a time than Options::memory_budget, ",
             pager_.budget(), " bytes; going on with more");
}

void PagedParameters::end(const std::vector<Touch>& touches) noexcept {
  const auto units = units_of(touches);
  if (std::this_thread::get_id() == trainer_.load(std::memory_order_relaxed))
    for (const int unit : units)  // guards needn't end in the order in which they began
      if (const auto at = std::find(held_.rbegin(), held_.rend(), unit); at != held_.rend()) held_.erase(std::next(at).base());
  const auto written = units_of(touches, true);
  mark_own_pages(written);
  pager_.unpin(units, written);
}

// Edited units stay whole until their slices have been written, and before that the ranks have to meet: at an edit, when edited units
// would need more than the budget. That depends on the edits alone, which all ranks make, and not on what else they touch or on what
// happens to be resident.
void PagedParameters::settle_written(const std::vector<int>& units) {
  if (!units.empty() && pager_.written_bytes() + unwritten_bytes(units) > pager_.budget()) callbacks_.write_back();
}

// What the units, which may be there several times, take of the budget.
std::int64_t PagedParameters::unwritten_bytes(const std::vector<int>& units) const {
  std::int64_t sum = 0;
  for (const int unit : std::set<int>(units.begin(), units.end()))
    if (!pager_.written(unit)) sum += bytes(unit);
  return sum;
}

void PagedParameters::refuse(const std::vector<Touch>& touches, const std::string& op, std::int64_t needed) const {
  std::string names;
  for (const auto& touch : touches) names += (names.empty() ? "" : ", ") + parameters_[touch.page].name;
  ZERO_FAIL(callbacks_.when(), ": operator ", op, " uses ", names, ", whose buckets don't fit Options::memory_budget, ",
            pager_.budget(), " bytes. The least budget that works here is ", needed,
            "; or choose smaller Options::bucket_bytes, or allow Options::exceed_budget()");
}

// Of a rank on this node, by its number there.
char* PagedParameters::shard_of(int unit, int member) const {
  return shards_[layout_.place(unit).space].impl()->data(member) + units_[unit].offset;
}

void PagedParameters::fetch(int unit) {
  const auto start = std::chrono::steady_clock::now();
  auto& u = units_[unit];
  const auto slice = layout_.shard_bytes(unit), whole = bytes(unit);
  UnitMemory::Block block;
  if (u.view) {
    block = UnitMemory::Block(u.view, u.view->data());
  } else {
    block = memory_.take(whole, pager_.budget());
    if (gathers_.defined()) {
      const auto bytes_at = [this](char* memory, std::int64_t count) {
        return tensor_over(memory, nullptr, {count}, {1}, at::kByte, comm_.device());
      };
      // On this node the rank's own window is the communicator's `self`.
      const auto& own = *shards_[layout_.place(unit).space].impl();
      gathers_.all_gather(bytes_at(shard_of(unit, own.self), slice), bytes_at(block.get(), whole), callbacks_.label(unit));
    } else {
      for (int r = 0; r < layout_.ranks() && slice > 0; ++r)
        std::memcpy(block.get() + r * slice, shard_of(unit, r), static_cast<std::size_t>(slice));
    }
  }
  bytes_gathered_ += whole - slice;
  for (const int i : layout_.members(unit)) {
    if (!manages(i) || !entries_[i].paged) continue;
    place_storage(*entries_[i].storage.unsafeGetStorageImpl(), block.get() + layout_.bytes_in_bucket(i), block);
  }
  u.block = std::move(block);
  if (std::this_thread::get_id() == trainer_.load(std::memory_order_relaxed))
    fetch_seconds_ += std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

std::int64_t PagedParameters::mapped_bytes() const {
  std::int64_t sum = 0;
  for (int unit = 0; unit < layout_.units(); ++unit)
    if (units_[unit].view) sum += bytes(unit);
  return sum;
}

void PagedParameters::store(int unit) {
  const auto slice = layout_.shard_bytes(unit);
  if (slice == 0) return;
  const auto& own = *shards_[layout_.place(unit).space].impl();
  copy_bytes(shard_of(unit, own.self), units_[unit].block.get() + slice * comm_.rank(), slice, comm_.device());
}

void PagedParameters::release(int unit) {
  for (const int i : layout_.members(unit))
    if (manages(i) && entries_[i].paged) release_storage(*entries_[i].storage.unsafeGetStorageImpl(), entries_[i].refusal);
  auto& u = units_[unit];
  // 0xFFFF… is a NaN in every floating type: who has kept a pointer sees it.
  if (settings_.debug) fill_bytes(u.block.get(), 0xFF, bytes(unit), comm_.device());
  u.block.reset();
  if (std::exchange(u.own_pages, false)) u.view->forget_writes();
}

}  // namespace zero
