// The part of Gradients that answers operators which touch p.grad(): faults, edits, and the memory behind pages.
#include <ATen/core/grad_mode.h>
#include <ATen/ops/count_nonzero.h>
#include <ATen/ops/ones.h>

#include <algorithm>

#include "core/check.h"
#include "paging/storage.h"
#include "reduce/gradients.h"

namespace zero {

void Gradients::begin(const std::vector<Touch>& touches, const std::string&) {
  const at::NoGradGuard no_grad;
  if (!over_ && unfinished_) callbacks_.agree();
  ZERO_CHECK(!over_, "this gradient is of a model that has been converted since; clear gradients after to()");
  for (const auto& touch : touches)
    if (touch.access != Access::reads) refuse_edit(touch.page);
  const auto units = units_of(touches);
  for (const int unit : units)
    if (pager_.resident(unit)) apply_factors(unit);  // others when they are gathered
  pager_.pin(units);
}

void Gradients::apply_factors(int unit) {
  for (const int i : context_.layout.members(unit))
    if (is_ours(i, grad_of(i))) apply_factor(i);
}

void Gradients::refuse_edit(int parameter) const {
  ZERO_CHECK(!no_edits_, "the gradient of ", context_.parameters[parameter].name,
             " can't be edited in place: a rank that is out of data (Join) could not follow. Clip with zero::clip_grad_norm_, "
             "or scale "
             "the loss instead");
}

void Gradients::end(const std::vector<Touch>& touches) noexcept {
  const auto written = units_of(touches, true);
  for (const auto& touch : touches)
    if (touch.access != Access::reads) count_edit(touch.page);
  pager_.unpin(units_of(touches), written);
}

bool Gradients::edit_in_parts(const Touch& touch, const std::function<void(const at::Tensor&)>& run) {
  const at::NoGradGuard no_grad;
  const int i = touch.page, unit = context_.layout.unit_of(i);
  const bool overwrites = touch.access == Access::overwrites;
  auto& entry = entries_[i];
  const bool clears = overwrites && gives_zeros(i, run);
  // Clearing what has not been exchanged yet asks no other rank: on some, nothing may have arrived that they could clear.
  if (!over_ && unfinished_ && !(clears && all_deferred_)) callbacks_.agree();
  ZERO_CHECK(!over_, "this gradient is of a model that has been converted since; clear gradients after to()");
  if (clears) {
    if (entry.deferred.defined()) entry.deferred.zero_();
    entry.zeroed = true;
    entry.factor = 1;
    ++edits_;
    if (!settings_.sharded || !pager_.resident(unit)) return store_->edit(i, true, run);
    run(resident_values(i));
    pager_.pin({unit});
    pager_.unpin({unit}, {unit});
    return true;
  }
  if (settings_.sharded && pager_.resident(unit)) return false;
  if (overwrites) {
    refuse_edit(i);
    entry.factor = 1;
  } else if (settings_.sharded) {
    apply_factor(i);
  }
  if (!store_->edit(i, overwrites, run)) return false;
  count_edit(i);
  return true;
}

bool Gradients::gives_zeros(int parameter, const std::function<void(const at::Tensor&)>& run) const {
  const auto probe =
      at::ones({1}, at::TensorOptions().dtype(context_.dtype(context_.layout.slot(parameter).space)).device(context_.device));
  run(probe);
  return probe.count_nonzero().item<std::int64_t>() == 0;
}

// A sum over pages: which ones, and how often each.
void Gradients::count_edit(int parameter) {
  ++edits_;
  edited_ += (static_cast<std::uint64_t>(parameter) + 1) * 0x9E3779B97F4A7C15U;
}

// In an edit of a part that all ranks have to make, or in a clearing: what one rank doesn't do is not done to its shard.
void Gradients::check_cleared(const GradientAgreement& agreed) const {
  for (std::size_t k = 0; k < context_.parameters.size(); ++k) {
    if (!agreed.any(static_cast<int>(k), kZeroed)) continue;
    for (std::size_t r = 0; r < agreed.flags.size(); ++r) {
      const auto flags = agreed.flags[r][k];
      const bool had_it = (flags & kOurs) && (!(flags & kArrived) || (flags & kOnto));
      ZERO_CHECK(!had_it || (flags & kZeroed), "the ranks disagree about the gradient of ", context_.parameters[k].name,
                 ": it was set to zero on another rank and kept on rank ", r, ". Every rank has to make the same edits");
    }
  }
}

void Gradients::fetch(int unit) {
  callbacks_.announce(unit);
  gather(unit);
  for (const int i : context_.layout.members(unit)) {
    if (entries_[i].page.defined())
      place_storage(*entries_[i].page.storage().unsafeGetStorageImpl(), store_->memory(i), store_->keeper(unit));
  }
}

void Gradients::gather(int unit) {
  if (settings_.sharded) apply_factors(unit);
  callbacks_.counted([&] { store_->fetch(unit); });
  if (!settings_.sharded) apply_factors(unit);  // the average times the factor, as at every other stage
}

void Gradients::gather_for_others(int unit) {
  if (pager_.resident(unit)) return;
  gather(unit);
  store_->release(unit);
}

void Gradients::release(int unit) {
  for (const int i : context_.layout.members(unit)) {
    auto& page = entries_[i].page;
    if (page.defined()) release_storage(*page.storage().unsafeGetStorageImpl(), how_to(i));
  }
  store_->release(unit);
}

void Gradients::gather_all() {
  const at::NoGradGuard no_grad;
  for (int unit = 0; unit < context_.layout.units(); ++unit) {
    const auto& of = context_.layout.members(unit);
    const bool there = std::any_of(of.begin(), of.end(), [&](int i) { return is_ours(i, grad_of(i)); });
    if (!there || std::find(held_.begin(), held_.end(), unit) != held_.end()) continue;
    pager_.pin({unit});
    held_.push_back(unit);
  }
}

void Gradients::store_edits() {
  if (!settings_.paged) return;
  // Whoever has a raw pointer may have written.
  if (!held_.empty()) {
    pager_.pin(held_);
    pager_.unpin(held_, held_);
  }
  pager_.store();
}

void Gradients::release() {
  if (!settings_.paged) return;
  if (!held_.empty()) pager_.unpin(held_, held_);
  held_.clear();
  // What lies in an arena costs nothing by staying.
  settings_.sharded ? pager_.release() : pager_.store();
}

}  // namespace zero
