#include "reduce/gradients.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/all.h>
#include <ATen/ops/full.h>
#include <ATen/ops/isfinite.h>

#include <algorithm>
#include <limits>

#include "core/check.h"
#include "paging/page_table.h"
#include "paging/storage.h"
#include "reduce/arena_store.h"
#include "reduce/shard_store.h"

namespace zero {

Gradients::Gradients(GradientContext context, Settings settings, Callbacks callbacks)
    : context_(std::move(context)),
      settings_(settings),
      callbacks_(std::move(callbacks)),
      pager_(*this, std::make_unique<LeastRecentlyUsed>(),
             settings.sharded ? settings.budget : std::numeric_limits<std::int64_t>::max()) {
  if (settings_.sharded) {
    auto made = std::make_unique<ShardStore>(context_);
    shards_ = made.get();
    store_ = std::move(made);
  } else {
    auto made = std::make_unique<ArenaStore>(context_);
    arena_ = made.get();
    store_ = std::move(made);
  }
  store_->before_change = [this](int unit) { retire(unit); };
  store_->has_gradient = [this](int parameter) { return holds_average(parameter); };
}

Gradients::~Gradients() {
  if (!over_) leave_pages();
}

void Gradients::leave_pages() {
  for (std::size_t i = 0; i < entries_.size(); ++i) {
    if (!settings_.paged || !entries_[i].page.defined()) continue;
    auto* storage = entries_[i].page.storage().unsafeGetStorageImpl();
    PageTable::global().remove(storage);
    // What was gathered stays readable for whoever holds it, what wasn't says so.
    if (is_released(*storage))
      release_storage(*storage,
                      context_.parameters[i].name + ": its gradient was not resident when the optimizer was destroyed");
  }
}

at::Tensor& Gradients::grad_of(int parameter) const {
  return const_cast<at::Tensor&>(context_.parameters[parameter].tensor).mutable_grad();
}

void Gradients::allocate() {
  store_->allocate();
  entries_.resize(context_.parameters.size());
}

void Gradients::watch() {
  entries_.resize(context_.parameters.size());
  for (std::size_t i = 0; i < context_.parameters.size(); ++i) {
    const auto& tensor = context_.parameters[i].tensor;
    // Also without a place: when it is unfrozen, the end of its first backward gives it one.
    if (context_.parameters[i].active)
      hooks_.watch(static_cast<int>(i), tensor, std::weak_ptr<GradientEvents>(weak_from_this()));
  }
}

void Gradients::leave(int parameter) {
  if (parameter >= static_cast<int>(entries_.size())) return;
  if (entries_[parameter].page.defined()) leave_to_holders(parameter);
  drop_page(parameter);
  hooks_.leave(parameter);
  store_->forget(parameter);
  entries_[parameter] = Entry{};
}

void Gradients::end_of_life() {
  over_ = true;
  // A page is of no use without us; of another type it would be in the way.
  for (std::size_t i = 0; i < entries_.size() && settings_.paged; ++i)
    if (is_ours(static_cast<int>(i), grad_of(static_cast<int>(i)))) grad_of(static_cast<int>(i)).reset();
  leave_pages();
}

void Gradients::hold_back(bool on) {
  if (shards_ != nullptr) shards_->hold_back(on);
}

bool Gradients::is_ours(int parameter, const at::Tensor& grad) const {
  return grad.defined() && parameter < static_cast<int>(entries_.size()) &&
         grad.unsafeGetTensorImpl() == entries_[parameter].page.unsafeGetTensorImpl();
}

// Is there an average that what arrives comes on top of? Not where the gradient was cleared and has come again, but was deferred: what the
// shard holds is of an earlier step.
bool Gradients::holds_average(int parameter) const {
  return is_ours(parameter, grad_of(parameter)) && (!entries_[parameter].deferred.defined() || entries_[parameter].told_onto);
}

bool Gradients::fits(int parameter, const at::Tensor& grad) const {
  const auto& p = context_.parameters[parameter];
  const int space = context_.layout.slot(parameter).space;
  const auto type = grad.scalar_type();
  return grad.layout() == at::kStrided && grad.device() == p.tensor.device() && grad.sizes() == p.tensor.sizes() &&
         (type == context_.dtype(space) || (type == p.tensor.scalar_type() && type == context_.arrives_as(space)));
}

std::string Gradients::how_to(int parameter) const {
  return "the gradient of " + context_.parameters[parameter].name +
         " is not resident: every rank keeps its part of the average. Operators gather it by themselves; for a raw pointer "
         "(data_ptr(), accessor()) call ZeroOptimizer::reduce_gradients() first, on every rank";
}

void Gradients::make_page(int parameter) {
  store_->forget(parameter);  // strides may have changed
  auto& page = entries_[parameter].page;
  if (!settings_.paged) {
    page = arena_->region(parameter);
    return;
  }
  const auto& tensor = context_.parameters[parameter].tensor;
  page = make_paged_tensor(tensor.sizes(), layout_strides(tensor), context_.dtype(context_.layout.slot(parameter).space),
                           how_to(parameter), context_.device);
  PageTable::global().add(page.storage().getWeakStorageImpl().lock(), weak_from_this(), parameter);
  const int unit = context_.layout.unit_of(parameter);
  if (pager_.resident(unit))
    place_storage(*page.storage().unsafeGetStorageImpl(), store_->memory(parameter), store_->keeper(unit));
}

void Gradients::drop_page(int parameter) {
  auto& page = entries_[parameter].page;
  if (page.defined() && settings_.paged) PageTable::global().remove(page.storage().unsafeGetStorageImpl());
  if (!settings_.paged) store_->forget(parameter);
  page.reset();
}

// Before a parameter's page shows something new. Somebody may have kept it from an earlier step, where LibTorch would have given the
// new gradient memory of its own: if its values are here, its storage (and every view of it) moves to a copy of them.
void Gradients::leave_to_holders(int parameter) {
  auto& page = entries_[parameter].page;
  if (!page.defined()) return;
  // Not paged: the arena has the same tensor.
  if (page.use_count() == (settings_.paged ? 1U : 2U) && page.storage().use_count() == 1) return;
  auto* storage = page.storage().unsafeGetStorageImpl();
  if (!is_released(*storage)) {
    detach_storage(*storage);
  } else {
    release_storage(*storage, "this gradient of " + context_.parameters[parameter].name +
                                  " belongs to an earlier backward and is not in memory any more; clone() what is to be kept");
  }
  drop_page(parameter);
}

// p.grad() is our page from now on.
void Gradients::show(int parameter) {
  auto& entry = entries_[parameter];
  if (!entry.page.defined()) make_page(parameter);
  grad_of(parameter) = entry.page;
}

// The unit's averages are going to change or to become local: nobody may look at them meanwhile.
void Gradients::retire(int unit) {
  if (!settings_.paged) return;
  if (const auto held = std::find(held_.begin(), held_.end(), unit); held != held_.end()) {
    held_.erase(held);
    pager_.unpin({unit}, {unit});
    pager_.store();
  }
  for (const int i : context_.layout.members(unit)) {
    // Pages that only somebody else still holds.
    if (entries_[i].page.defined() && !is_ours(i, grad_of(i)) && !entries_[i].onto) leave_to_holders(i);
  }
  if (pager_.resident(unit)) {
    pager_.store();
    pager_.discard(unit);
  }
  // What comes on top is not to be multiplied.
  apply_factors(unit);
}

void Gradients::expect_end() {
  if (!settings_.paged || current_backward() == seen_backward_) return;
  seen_backward_ = current_backward();
  expect_end_of_backward(std::weak_ptr<GradientEvents>(weak_from_this()));
}

void Gradients::before_accumulation(int parameter) {
  if (over_ || !has_place(parameter) || parameter >= static_cast<int>(entries_.size())) return;
  const at::NoGradGuard no_grad;
  if (settings_.paged && aborted_) {
    aborted_ = false;
    if (unfinished_) callbacks_.agree();
  }
  if (over_) return;
  expect_end();
  auto& entry = entries_[parameter];
  auto& grad = grad_of(parameter);
  // Cleared, but what had arrived may be under way: the ranks finish that first.
  if (settings_.sharded && !deferring_ && unfinished_ && entry.told_arrived && !is_ours(parameter, grad)) callbacks_.agree();
  if (over_) return;
  entry.onto = is_ours(parameter, grad);
  entry.foreign = grad.defined() && !entry.onto;
  if (!entry.onto) {
    entry.factor = 1;
    return;
  }
  apply_factor(parameter);
  // LibTorch must not add to the page: that would gather it, and count what is there once per rank.
  if (settings_.paged) grad.reset();
}

void Gradients::arrived(int parameter, const at::Tensor& tensor) {
  if (over_ || parameter >= static_cast<int>(entries_.size())) return;
  if (context_.parameters[parameter].tensor.unsafeGetTensorImpl() != tensor.unsafeGetTensorImpl()) return;
  expect_end();
  if (!has_place(parameter)) {
    all_deferred_ = all_deferred_ && deferring_;
    unfinished_ = settings_.paged;
    return;
  }
  auto& grad = grad_of(parameter);
  if (!grad.defined()) return;
  auto& entry = entries_[parameter];
  if (grad.requires_grad()) {
    ZERO_CHECK(!settings_.refuse_graphs, context_.parameters[parameter].name,
               ": backward with create_graph=true leaves a gradient with a graph, which can't be sharded. Use "
               "torch::autograd::grad(..., create_graph=true) for the penalty and an ordinary backward() for the loss");
    return;
  }
  if (is_ours(parameter, grad)) return;  // accumulated in place
  unfinished_ = settings_.paged;
  all_deferred_ = all_deferred_ && deferring_;
  if (!fits(parameter, grad)) return;
  const at::NoGradGuard no_grad;
  if (!entry.told_arrived || !entry.onto) entry.told_onto = entry.onto;
  entry.told_arrived = true;
  if (!entry.onto) entry.deferred.reset();  // cleared since
  if (deferring_ && settings_.sharded) {
    if (entry.deferred.defined()) {
      entry.deferred.add_(grad);
    } else {
      const auto type = context_.dtype(context_.layout.slot(parameter).space);
      entry.deferred = grad.scalar_type() != type ? grad.to(type) : entry.foreign ? grad.clone() : grad;
    }
    if (!entry.onto) leave_to_holders(parameter);
  } else {
    settings_.sharded ? callbacks_.counted([&] { take(parameter, grad); }) : take(parameter, grad);
  }
  entry.onto = false;
  show(parameter);
}

void Gradients::take(int parameter, at::Tensor gradient) {
  auto& entry = entries_[parameter];
  bool onto = entry.onto;
  if (entry.deferred.defined()) {
    gradient = std::move(entry.deferred).add_(gradient);
    entry.deferred.reset();
    onto = entry.told_onto;
  }
  if (!onto) leave_to_holders(parameter);
  look_at(parameter, gradient);
  store_->add(parameter, gradient, onto);
}

void Gradients::look_for_nonfinite(bool on) {
  looking_ = on, first_nonfinite_ = -1;
  first_there_.reset();
}

void Gradients::look_in_device(bool on, std::int64_t nothing) {
  looking_ = on, nothing_there_ = nothing;
  if (on) first_there_ = at::full({}, nothing, at::TensorOptions(at::kLong).device(context_.device));
}

void Gradients::look_at(int parameter, const at::Tensor& gradient) {
  if (looking_ && first_there_.defined()) {
    const auto first = first_there_.eq(nothing_there_).logical_and_(gradient.isfinite().all().logical_not());
    first_there_.masked_fill_(first, parameter);
    return;
  }
  if (looking_ && first_nonfinite_ < 0 && !gradient.isfinite().all().item<bool>()) first_nonfinite_ = parameter;
}

void Gradients::backward_ended(bool nested) {
  seen_backward_ = -1;
  // A backward within a backward (recomputation): the outer one's end will do, or the next use.
  if (over_ || nested || deferring_ || !settings_.paged) return;
  const at::NoGradGuard no_grad;
  callbacks_.ended();
}

void Gradients::apply_factor(int parameter) {
  auto& entry = entries_[parameter];
  if (entry.factor == 1) return;
  const double factor = entry.factor;
  entry.factor = 1;
  ++edits_;
  const int unit = context_.layout.unit_of(parameter);
  if (!settings_.sharded || !pager_.resident(unit)) return store_->multiply(parameter, factor);
  // What is gathered is what counts until it is stored.
  resident_values(parameter).mul_(factor);
  pager_.pin({unit});
  pager_.unpin({unit}, {unit});
}

at::Tensor Gradients::resident_values(int parameter) const {
  const auto& tensor = context_.parameters[parameter].tensor;
  return tensor_over(store_->memory(parameter), store_->keeper(context_.layout.unit_of(parameter)), tensor.sizes(),
                     layout_strides(tensor), context_.dtype(context_.layout.slot(parameter).space), context_.device);
}

void Gradients::mark() {
  marked_edits_ = edits_;
  for (std::size_t i = 0; i < entries_.size(); ++i) {
    const auto& grad = grad_of(static_cast<int>(i));
    entries_[i].marked_grad = grad.defined() ? grad.unsafeGetTensorImpl() : nullptr;
    entries_[i].marked_version = grad.defined() ? grad._version() : 0;
  }
}

bool Gradients::unchanged() const {
  if (marked_edits_ != edits_) return false;
  for (std::size_t i = 0; i < entries_.size(); ++i) {
    const auto& grad = grad_of(static_cast<int>(i));
    if ((grad.defined() ? grad.unsafeGetTensorImpl() : nullptr) != entries_[i].marked_grad) return false;
    if (grad.defined() && static_cast<std::uint32_t>(grad._version()) != entries_[i].marked_version) return false;
  }
  return true;
}

void Gradients::multiply_later(double factor) {
  if (factor == 1) return;
  const at::NoGradGuard no_grad;
  for (std::size_t k = 0; k < entries_.size(); ++k) {
    const int i = static_cast<int>(k);
    const auto& grad = grad_of(i);
    if (!grad.defined() || !has_place(i)) continue;
    if (is_ours(i, grad)) {
      entries_[k].factor *= factor;
    } else {
      grad.detach().mul_(factor);  // the user's own tensor: no hook of ours would catch up with it
      entries_[k].marked_version = static_cast<std::uint32_t>(grad._version());
    }
  }
}

void Gradients::multiply(double factor) {
  multiply_later(factor);
  if (settings_.paged) return;  // a page looks at what is pending when it is read
  const at::NoGradGuard no_grad;
  for (std::size_t i = 0; i < entries_.size(); ++i) apply_factor(static_cast<int>(i));
}

std::int64_t Gradients::bytes() const {
  std::int64_t sum = store_->gradient_bytes();
  for (std::size_t i = 0; i < context_.parameters.size(); ++i) {
    const auto& grad = grad_of(static_cast<int>(i));
    if (grad.defined() && !is_ours(static_cast<int>(i), grad)) sum += static_cast<std::int64_t>(grad.nbytes());
    if (i < entries_.size() && entries_[i].deferred.defined()) sum += static_cast<std::int64_t>(entries_[i].deferred.nbytes());
  }
  return sum;
}

}  // namespace zero
