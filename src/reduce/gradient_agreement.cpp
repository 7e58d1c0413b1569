// What the ranks tell each other about gradients at the end of a backward and at the step, and what follows from it here.
#include <ATen/core/grad_mode.h>

#include <algorithm>

#include "core/check.h"
#include "reduce/arena_store.h"
#include "reduce/gradients.h"
#include "reduce/shard_store.h"

namespace zero {

std::string Gradients::problem() const {
  for (std::size_t k = 0; k < context_.parameters.size(); ++k) {
    const int i = static_cast<int>(k);
    const auto& grad = grad_of(i);
    if (!grad.defined() || !has_place(i) || is_ours(i, grad)) continue;
    const auto& p = context_.parameters[k];
    if (grad.layout() != at::kStrided)
      return p.name + " has a sparse gradient, which can't be sharded; build the layer with sparse(false)";
    if (!fits(i, grad))
      return detail::text(p.name, " has a gradient of shape ", grad.sizes(), " and type ", grad.scalar_type(),
                          ", but the parameter was registered with shape ", p.sizes(), " and type ",
                          context_.dtype(context_.layout.slot(i).space));
  }
  return {};
}

void Gradients::prepare() {
  aborted_ = false;
  if (!settings_.sharded) return;
  for (std::size_t k = 0; k < entries_.size(); ++k) {
    const int i = static_cast<int>(k);
    auto& entry = entries_[k];
    if (!has_place(i)) continue;
    const bool ours = is_ours(i, grad_of(i));
    if (entry.deferred.defined()) {
      auto gradient = std::move(entry.deferred);
      entry.deferred.reset();
      if (ours) store_->add(i, gradient, entry.told_onto);
    } else if (!ours && entry.told_arrived) {
      shards_->drop(i);  // arrived, and cleared or replaced since
    }
  }
  shards_->complete_plan();
}

std::vector<std::uint8_t> Gradients::flags() const {
  std::vector<std::uint8_t> out(context_.parameters.size(), 0);
  for (std::size_t k = 0; k < entries_.size(); ++k) {
    const int i = static_cast<int>(k);
    if (!has_place(i) || !context_.parameters[k].active) continue;
    const auto& grad = grad_of(i);
    std::uint8_t flags = store_->flags(i);
    if (grad.defined()) flags |= is_ours(i, grad) ? kOurs : kForeign;
    if (entries_[k].told_arrived) flags |= kArrived;
    if (entries_[k].told_onto) flags |= kOnto;
    if (entries_[k].zeroed) flags |= kZeroed;
    out[k] = flags;
  }
  return out;
}

void Gradients::take_new(const std::vector<char>& placed) {
  const at::NoGradGuard no_grad;
  for (std::size_t k = 0; k < entries_.size(); ++k) {
    const int i = static_cast<int>(k);
    const auto& grad = grad_of(i);
    if (placed[k] || !has_place(i) || !grad.defined() || is_ours(i, grad) || !fits(i, grad)) continue;
    entries_[k].onto = entries_[k].told_onto = false;
    entries_[k].told_arrived = true;
    take(i, grad.detach());
    show(i);
  }
}

std::int64_t Gradients::under_way() const { return store_->under_way(); }
std::vector<int> Gradients::completion_order() const { return store_->completion_order(); }

void Gradients::finish(const GradientAgreement& agreed) {
  unfinished_ = false;
  all_deferred_ = true;
  check_cleared(agreed);
  const auto give_up = [&](int i, const char* why) {
    for (auto& entry : entries_) entry.told_arrived = entry.told_onto = false;
    ZERO_FAIL("the ranks disagree about the gradient of ", context_.parameters[i].name, ": ", why);
  };
  store_->finish(agreed);
  for (std::size_t k = 0; k < entries_.size(); ++k) {
    const int i = static_cast<int>(k);
    if (!has_place(i)) continue;
    bool fresh = false, onto = false;
    for (const auto& rank : agreed.flags) {
      if (!(rank[k] & kArrived) || (rank[k] & kForeign)) continue;
      (rank[k] & kOnto ? onto : fresh) = true;
    }
    if (fresh && onto) give_up(i, "before this backward it was cleared on one rank and kept on another");
    if (onto && is_ours(i, grad_of(i))) apply_factor(i);  // as the ranks did on which something arrived
    // A rank on which nothing arrived has the average like all others.
    if (!grad_of(i).defined() && agreed.any(i, kOurs)) {
      leave_to_holders(i);
      if (!onto) store_->add_nothing(i);
      show(i);
      entries_[k].factor = 1;
    }
    entries_[k].told_arrived = entries_[k].told_onto = entries_[k].zeroed = false;
  }
  if (std::any_of(agreed.flags.begin(), agreed.flags.end(), [&](const auto& rank) {
        return std::any_of(rank.begin(), rank.end(), [](std::uint8_t f) { return f & kArrived; });
      }))
    ++edits_;
}

void Gradients::collect(const GradientAgreement& agreed) {
  const at::NoGradGuard no_grad;
  check_cleared(agreed);
  for (std::size_t k = 0; k < entries_.size(); ++k) {
    entries_[k].onto = entries_[k].zeroed = false;
    if (has_place(static_cast<int>(k)) && is_ours(static_cast<int>(k), grad_of(static_cast<int>(k))))
      apply_factor(static_cast<int>(k));
  }
  store_edits();
  bool foreign = false;
  for (std::size_t k = 0; k < entries_.size(); ++k) {
    const int i = static_cast<int>(k);
    if (!has_place(i)) continue;
    const auto& grad = grad_of(i);
    if (!agreed.any(i, kForeign)) {
      // Cleared on this rank alone: it is the average that all have, so it stays.
      if (!grad.defined() && agreed.any(i, kOurs)) {
        leave_to_holders(i);
        show(i);
      }
      continue;
    }
    foreign = true;
    ZERO_CHECK(!settings_.sharded || !agreed.any(i, kOurs), "the ranks disagree about the gradient of ",
               context_.parameters[k].name, ": it was assigned on one rank, and is what backward brought on another");
    if (grad.defined() && !is_ours(i, grad)) {
      leave_to_holders(i);
      look_at(i, grad);
      store_->add(i, grad.detach(), false);
    } else if (!grad.defined()) {
      store_->add_nothing(i);
    } else if (arena_ != nullptr) {
      arena_->make_local(context_.layout.unit_of(i));
    }
  }
  if (foreign && settings_.sharded) {
    auto late = agreed;
    late.under_way = 0;
    late.order.clear();
    for (auto& rank : late.flags)
      for (auto& flags : rank) flags = flags & kForeign ? kWaiting : 0;
    store_->finish(late);
  }
}

void Gradients::follow(const std::vector<std::vector<std::uint8_t>>& others) {
  const at::NoGradGuard no_grad;
  for (std::size_t k = 0; k < entries_.size(); ++k) {
    const int i = static_cast<int>(k);
    if (!has_place(i)) continue;
    bool there = false, fresh = false, zeroed = false;
    for (const auto& rank : others) {
      there = there || (rank[k] & (kOurs | kForeign));
      fresh = fresh || ((rank[k] & kArrived) && !(rank[k] & kOnto));
      zeroed = zeroed || (rank[k] & kZeroed);
    }
    auto& grad = grad_of(i);
    if (grad.defined() && (fresh || !there)) grad.reset();
    if (zeroed && is_ours(i, grad)) {
      entries_[k].factor = 1;
      store_->edit(i, true, [](const at::Tensor& part) { part.zero_(); });
      ++edits_;
    }
  }
}

}  // namespace zero
