#include "reduce/gradients.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <cstring>

#include "core/check.h"

namespace zero {

namespace autograd = torch::autograd;

/// After each accumulation into p.grad(): once per backward and parameter, also for tied weights.
class ArrivalHook : public autograd::PostAccumulateGradHook {
 public:
  ArrivalHook(std::weak_ptr<Gradients> owner, int parameter, std::unique_ptr<PostAccumulateGradHook> earlier)
      : owner_(std::move(owner)), address_(owner_.lock().get()), parameter_(parameter), earlier_(std::move(earlier)) {}

  void operator()(const at::Tensor& tensor) override {
    if (earlier_) (*earlier_)(tensor);
    if (auto owner = owner_.lock()) owner->arrived(parameter_, tensor);
  }

  bool belongs_to(const Gradients* owner) const { return address_ == owner; }
  std::unique_ptr<PostAccumulateGradHook> take_earlier() { return std::move(earlier_); }

 private:
  std::weak_ptr<Gradients> owner_;  // hooks don't keep the optimizer alive
  const Gradients* address_;        // only compared, also while the owner is being destroyed
  int parameter_;
  std::unique_ptr<PostAccumulateGradHook> earlier_;  // a tensor has one slot: what was there goes first
};

/// Before each accumulation. (A hook on the tensor would fire under autograd::grad too, where nothing accumulates.)
class AccumulationHook : public autograd::FunctionPreHook {
 public:
  AccumulationHook(std::weak_ptr<Gradients> owner, int parameter)
      : owner_(std::move(owner)), address_(owner_.lock().get()), parameter_(parameter) {}
  bool belongs_to(const Gradients* owner) const { return address_ == owner; }
  autograd::variable_list operator()(const autograd::variable_list& grads) override {
    if (auto owner = owner_.lock()) owner->apply_factor(parameter_);
    return grads;
  }

 private:
  std::weak_ptr<Gradients> owner_;
  const Gradients* address_;
  int parameter_;
};

Gradients::Gradients(Communicator comm, const std::vector<Parameter>& parameters, const Layout& layout, bool refuse_graphs)
    : comm_(std::move(comm)), parameters_(parameters), layout_(layout), refuse_graphs_(refuse_graphs) {}

Gradients::~Gradients() {
  for (std::size_t i = 0; i < entries_.size(); ++i) forget(static_cast<int>(i));
}

void Gradients::allocate() {
  for (std::size_t s = arenas_.size(); s < layout_.spaces().size(); ++s) {
    const auto& space = layout_.spaces()[s];
    arenas_.push_back(
        comm_.allocate(space.size * space.itemsize, "gradients of parameter group " + std::to_string(space.group)));
  }
}

void Gradients::watch() {
  entries_.resize(parameters_.size());
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    const auto& tensor = parameters_[i].tensor;
    if (layout_.slot(static_cast<int>(i)).space < 0 || !tensor.requires_grad()) continue;
    auto& entry = entries_[i];
    // A conversion by to() gives the tensor a new accumulator; the old one's hooks are lost.
    auto node = autograd::impl::grad_accumulator(tensor);
    if (entry.node == node) continue;
    entry.node = node;
    node->add_pre_hook(std::make_unique<AccumulationHook>(weak_from_this(), static_cast<int>(i)));
    auto& slot = autograd::impl::post_acc_grad_hooks(tensor);
    auto* there = dynamic_cast<ArrivalHook*>(slot.get());
    if (there == nullptr || !there->belongs_to(this)) {
      auto hook = std::make_unique<ArrivalHook>(weak_from_this(), static_cast<int>(i), std::move(slot));
      autograd::impl::set_post_acc_grad_hooks(tensor, std::move(hook));
    }
  }
}

void Gradients::leave(int parameter) {
  if (parameter >= static_cast<int>(entries_.size())) return;
  if (entries_[parameter].view.defined()) leave_to_holders(parameter);
  forget(parameter);
}

void Gradients::forget(int parameter) {
  if (parameter >= static_cast<int>(entries_.size())) return;
  auto& entry = entries_[parameter];
  if (entry.node) {
    auto& before = entry.node->pre_hooks();
    before.erase(std::remove_if(before.begin(), before.end(),
                                [&](const auto& hook) {
                                  auto* ours = dynamic_cast<AccumulationHook*>(hook.get());
                                  return ours != nullptr && ours->belongs_to(this);
                                }),
                 before.end());
    auto& after = autograd::impl::post_acc_grad_hooks(parameters_[parameter].tensor);
    if (auto* ours = dynamic_cast<ArrivalHook*>(after.get()); ours != nullptr && ours->belongs_to(this)) {
      auto earlier = ours->take_earlier();
      after = std::move(earlier);
    }
  }
  entry = Entry{};
}

bool Gradients::is_ours(int parameter, const at::Tensor& grad) const {
  return parameter < static_cast<int>(entries_.size()) &&
         grad.unsafeGetTensorImpl() == entries_[parameter].view.unsafeGetTensorImpl();
}

bool Gradients::fits(int parameter, const at::Tensor& grad) const {
  const auto& p = parameters_[parameter];
  return grad.layout() == at::kStrided && grad.device() == p.tensor.device() && grad.sizes() == p.tensor.sizes() &&
         static_cast<int>(grad.scalar_type()) == layout_.spaces()[layout_.slot(parameter).space].dtype;
}

void Gradients::make_view(int parameter) {
  const auto& slot = layout_.slot(parameter);
  const auto& space = layout_.spaces()[slot.space];
  const auto& tensor = parameters_[parameter].tensor;
  const auto& arena = arenas_[slot.space];
  // The parameter's own order of elements, so that shards of both belong together; row-major where it has gaps.
  const auto strides = layout_strides(tensor);
  entries_[parameter].view = tensor_over(static_cast<char*>(arena.data()) + slot.offset * space.itemsize, arena.impl(),
                                         tensor.sizes(), strides, static_cast<at::ScalarType>(space.dtype));
}

void Gradients::leave_to_holders(int parameter) {
  auto& view = entries_[parameter].view;
  if (!view.defined()) return make_view(parameter);
  if (view.use_count() == 1 && view.storage().use_count() == 1) return;
  // Somebody kept the gradient of an earlier step, where LibTorch would have given the new one memory of its own. Their
  // storage, and every view of it, moves to a copy.
  auto* storage = view.storage().unsafeGetStorageImpl();
  if (storage->nbytes() > 0) {
    auto copy = c10::GetAllocator(c10::kCPU)->allocate(storage->nbytes());
    std::memcpy(copy.get(), storage->data(), storage->nbytes());
    storage->set_data_ptr_noswap(std::move(copy));
  }
  make_view(parameter);
}

void Gradients::arrived(int parameter, const at::Tensor& tensor) {
  if (layout_.slot(parameter).space >= static_cast<int>(arenas_.size())) return;
  if (parameters_[parameter].tensor.unsafeGetTensorImpl() != tensor.unsafeGetTensorImpl()) return;
  auto& grad = const_cast<at::Tensor&>(tensor).mutable_grad();
  if (!grad.defined()) return;
  if (grad.requires_grad()) {
    ZERO_CHECK(!refuse_graphs_, parameters_[parameter].name,
               ": backward with create_graph=true leaves a gradient with a graph, which can't be sharded. Use "
               "torch::autograd::grad(..., create_graph=true) for the penalty and an ordinary backward() for the loss");
    return;
  }
  if (is_ours(parameter, grad) || !fits(parameter, grad)) return;
  const at::NoGradGuard no_grad;
  leave_to_holders(parameter);
  entries_[parameter].view.copy_(grad);
  entries_[parameter].factor = 1;
  grad = entries_[parameter].view;
}

void Gradients::apply_factor(int parameter) {
  auto& entry = entries_[parameter];
  if (entry.factor == 1) return;
  const auto& grad = parameters_[parameter].tensor.grad();
  if (grad.defined() && is_ours(parameter, grad)) {
    const at::NoGradGuard no_grad;
    entry.view.mul_(entry.factor);
  }
  entry.factor = 1;
}

std::string Gradients::problem() const {
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    if (!parameters_[i].tensor.grad().defined() || layout_.slot(static_cast<int>(i)).space < 0) continue;
    const auto& p = parameters_[i];
    const auto& grad = p.tensor.grad();
    if (grad.layout() != at::kStrided)
      return p.name + " has a sparse gradient, which can't be sharded; build the layer with sparse(false)";
    if (!fits(static_cast<int>(i), grad))
      return detail::text(p.name, " has a gradient of shape ", grad.sizes(), " and type ", grad.scalar_type(),
                          ", but the parameter was registered with shape ", p.sizes(), " and type ",
                          static_cast<at::ScalarType>(layout_.spaces()[layout_.slot(static_cast<int>(i)).space].dtype));
  }
  return {};
}

void Gradients::collect(const std::vector<char>& anywhere) {
  const at::NoGradGuard no_grad;
  for (std::size_t k = 0; k < parameters_.size(); ++k) {
    const int i = static_cast<int>(k);
    if (!anywhere[k] || layout_.slot(i).space < 0) continue;
    const auto& grad = parameters_[k].tensor.grad();
    if (grad.defined() && is_ours(i, grad)) {
      apply_factor(i);
      continue;
    }
    leave_to_holders(i);
    if (grad.defined())
      entries_[k].view.copy_(grad.detach());
    else
      entries_[k].view.zero_();
  }
}

void Gradients::mark() {
  for (std::size_t i = 0; i < entries_.size(); ++i) {
    const auto& grad = parameters_[i].tensor.grad();
    entries_[i].marked_grad = grad.defined() ? grad.unsafeGetTensorImpl() : nullptr;
    entries_[i].marked_version = grad.defined() ? grad._version() : 0;
  }
}

bool Gradients::unchanged() const {
  for (std::size_t i = 0; i < entries_.size(); ++i) {
    const auto& grad = parameters_[i].tensor.grad();
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
    const auto& grad = parameters_[k].tensor.grad();
    if (!grad.defined()) continue;
    if (is_ours(i, grad)) {
      entries_[k].factor *= factor;
    } else {
      grad.detach().mul_(factor);  // the user's own tensor: no hook of ours would catch up with it
      entries_[k].marked_version = static_cast<std::uint32_t>(grad._version());
    }
  }
}

at::Tensor Gradients::bucket(int space, int bucket) const {
  const auto& s = layout_.spaces()[space];
  const auto& b = s.buckets[bucket];
  return tensor_over(static_cast<char*>(arenas_[space].data()) + b.begin * s.itemsize, arenas_[space].impl(),
                     {b.shard * layout_.ranks()}, {1}, static_cast<at::ScalarType>(s.dtype));
}

at::Tensor Gradients::scratch(std::size_t first_space) const {
  if (arenas_.size() <= first_space) return at::empty({0}, at::kByte);
  return tensor_over(arenas_.back().data(), arenas_.back().impl(), {arenas_.back().bytes()}, {1}, at::kByte);
}

std::int64_t Gradients::bytes() const {
  std::int64_t sum = 0;
  for (const auto& arena : arenas_) sum += arena.bytes();
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    const auto& grad = parameters_[i].tensor.grad();
    if (grad.defined() && !is_ours(static_cast<int>(i), grad)) sum += static_cast<std::int64_t>(grad.nbytes());
  }
  return sum;
}

}  // namespace zero
