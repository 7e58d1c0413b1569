#include "reduce/hooks.h"

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <utility>

namespace zero {

namespace autograd = torch::autograd;

namespace {

class ArrivalHook : public autograd::PostAccumulateGradHook {
 public:
  ArrivalHook(std::weak_ptr<GradientEvents> events, const Hooks* owner, int parameter,
              std::unique_ptr<PostAccumulateGradHook> earlier)
      : events_(std::move(events)), owner_(owner), parameter_(parameter), earlier_(std::move(earlier)) {}

  void operator()(const at::Tensor& tensor) override {
    if (earlier_) (*earlier_)(tensor);
    if (auto events = events_.lock()) events->arrived(parameter_, tensor);
  }
  bool belongs_to(const Hooks* owner) const { return owner_ == owner; }
  std::unique_ptr<PostAccumulateGradHook> take_earlier() { return std::move(earlier_); }

 private:
  std::weak_ptr<GradientEvents> events_;  // hooks don't keep the optimizer alive
  const Hooks* owner_;                    // only compared
  int parameter_;
  std::unique_ptr<PostAccumulateGradHook> earlier_;  // a tensor has one slot: what was there goes first
};

class AccumulationHook : public autograd::FunctionPreHook {
 public:
  AccumulationHook(std::weak_ptr<GradientEvents> events, const Hooks* owner, int parameter)
      : events_(std::move(events)), owner_(owner), parameter_(parameter) {}
  bool belongs_to(const Hooks* owner) const { return owner_ == owner; }
  autograd::variable_list operator()(const autograd::variable_list& grads) override {
    // Undefined: the engine passes the node without anything to accumulate.
    const bool something = std::any_of(grads.begin(), grads.end(), [](const at::Tensor& g) { return g.defined(); });
    if (auto events = something ? events_.lock() : nullptr) events->before_accumulation(parameter_);
    return grads;
  }

 private:
  std::weak_ptr<GradientEvents> events_;
  const Hooks* owner_;
  int parameter_;
};

// Lives in the callbacks of one backward: run at its end, or destroyed without having run.
class End {
 public:
  explicit End(std::weak_ptr<GradientEvents> events) : events_(std::move(events)) {}
  ~End() {
    if (ran_) return;
    if (auto events = events_.lock()) events->backward_aborted();
  }
  End(const End&) = delete;
  End& operator=(const End&) = delete;
  void run() {
    ran_ = true;
    // Callbacks run outside of every node of their own backward; a node means that another backward called this one.
    if (auto events = events_.lock()) events->backward_ended(autograd::get_current_node() != nullptr);
  }

 private:
  std::weak_ptr<GradientEvents> events_;
  bool ran_ = false;
};

}  // namespace

Hooks::~Hooks() {
  for (std::size_t i = 0; i < entries_.size(); ++i) leave(static_cast<int>(i));
}

void Hooks::watch(int parameter, const at::Tensor& tensor, const std::weak_ptr<GradientEvents>& events) {
  if (entries_.size() <= static_cast<std::size_t>(parameter)) entries_.resize(static_cast<std::size_t>(parameter) + 1);
  auto& entry = entries_[parameter];
  entry.tensor = tensor;
  if (tensor.requires_grad()) {  // a frozen one has no accumulator
    auto node = autograd::impl::grad_accumulator(tensor);
    if (entry.node == node) return;
    entry.node = node;
    node->add_pre_hook(std::make_unique<AccumulationHook>(events, this, parameter));
  }
  auto& slot = autograd::impl::post_acc_grad_hooks(tensor);
  auto* there = dynamic_cast<ArrivalHook*>(slot.get());
  if (there == nullptr || !there->belongs_to(this)) {
    autograd::impl::set_post_acc_grad_hooks(tensor, std::make_unique<ArrivalHook>(events, this, parameter, std::move(slot)));
  }
}

void Hooks::leave(int parameter) {
  if (parameter >= static_cast<int>(entries_.size()) || !entries_[parameter].tensor.defined()) return;
  auto& entry = entries_[parameter];
  if (entry.node) {
    auto& before = entry.node->pre_hooks();
    before.erase(std::remove_if(before.begin(), before.end(),
                                [&](const auto& hook) {
                                  auto* ours = dynamic_cast<AccumulationHook*>(hook.get());
                                  return ours != nullptr && ours->belongs_to(this);
                                }),
                 before.end());
  }
  auto& after = autograd::impl::post_acc_grad_hooks(entry.tensor);
  if (auto* ours = dynamic_cast<ArrivalHook*>(after.get()); ours != nullptr && ours->belongs_to(this)) {
    auto earlier = ours->take_earlier();
    after = std::move(earlier);
  }
  entry = Entry{};
}

void expect_end_of_backward(const std::weak_ptr<GradientEvents>& events) {
  auto end = std::make_shared<End>(events);
  autograd::Engine::get_default_engine().queue_callback([end] { end->run(); });
}

int current_backward() { return autograd::get_current_graph_task_id(); }

}  // namespace zero
