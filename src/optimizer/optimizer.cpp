#include "zero/optimizer.h"

#include <ATen/core/grad_mode.h>

#include <cmath>
#include <cstdlib>

#include "core/check.h"
#include "optimizer/impl.h"

namespace zero {
namespace {

std::unique_ptr<torch::optim::OptimizerOptions> defaults_of(const torch::optim::Optimizer* inner) {
  ZERO_CHECK(inner != nullptr, "zero::wrap: the optimizer to wrap is null");
  return inner->defaults().clone();
}

}  // namespace

ZeroOptimizer::ZeroOptimizer(std::unique_ptr<torch::optim::Optimizer> inner, const Options& options)
    : torch::optim::Optimizer(std::vector<torch::optim::OptimizerParamGroup>{}, defaults_of(inner.get())),
      impl_(std::make_unique<Impl>(std::move(inner), options)) {
  impl_->groups = &param_groups_, impl_->state = &state_;
  for (auto& group : impl_->inner->param_groups()) {
    param_groups_.push_back(group);
    group.params().clear();  // the wrapped object sees flat pieces from now on
  }
  if (options.comm().defined()) attach(options.comm());
}

ZeroOptimizer::~ZeroOptimizer() = default;
ZeroOptimizer::ZeroOptimizer(ZeroOptimizer&& other) noexcept
    : torch::optim::Optimizer(std::move(other)),
      impl_(std::move(other.impl_)) {  // NOLINT(bugprone-use-after-move): the base's part
  if (impl_) impl_->groups = &param_groups_, impl_->state = &state_;
}
ZeroOptimizer& ZeroOptimizer::operator=(ZeroOptimizer&& other) noexcept {
  impl_ = std::move(other.impl_);
  torch::optim::Optimizer::operator=(std::move(other));
  if (impl_) impl_->groups = &param_groups_, impl_->state = &state_;
  return *this;
}

void ZeroOptimizer::attach(const Communicator& comm) {
  ZERO_CHECK(comm.defined(), "attach: an undefined communicator");
  ZERO_CHECK(!impl_->attached(), "attach: the optimizer has a communicator already");
  impl_->comm = comm;
  try {
    impl_->set_up({});
  } catch (...) {
    if (impl_->layout == nullptr) impl_->comm = Communicator();  // nothing was made: attach() may be tried again
    throw;
  }
}

torch::Tensor ZeroOptimizer::step(LossClosure closure) {
  torch::Tensor loss;
  if (closure) {
    const at::AutoGradMode enable(true);
    loss = closure();
  }
  const at::NoGradGuard no_grad;
  impl_->step();
  return loss;
}

double ZeroOptimizer::grad_norm() {
  const at::NoGradGuard no_grad;
  return impl_->norm();
}

double clip_grad_norm_(ZeroOptimizer& optimizer, double max_norm) {
  const at::NoGradGuard no_grad;
  return optimizer.impl().clip(max_norm);
}

void ZeroOptimizer::reduce_gradients() { impl_->reduce_gradients(); }

void ZeroOptimizer::add_weight(double weight) {
  ZERO_CHECK(impl_->weighted(), "add_weight: only with Options::reduction(Reduction::kWeighted)");
  ZERO_CHECK(std::isfinite(weight) && weight >= 0, "add_weight: ", weight, " is not a finite number ≥ 0");
  impl_->weight += weight;
}

std::string ZeroOptimizer::explain() const { return impl_->explain(); }
const StepReport& ZeroOptimizer::last_step() const {
  impl_->read_step();
  return impl_->report;
}
Memory ZeroOptimizer::memory() const { return impl_->memory(); }
Memory ZeroOptimizer::memory_plan(Stage stage, int world_size) const {
  ZERO_CHECK(impl_->attached(), "memory_plan: the optimizer has no communicator yet; call attach(comm) first");
  return impl_->plan(stage, world_size);
}
Memory ZeroOptimizer::memory_plan() const { return memory_plan(impl_->options.stage(), impl_->comm.size()); }
std::int64_t ZeroOptimizer::padded_numel() const { return impl_->layout ? impl_->layout->padded_numel() : 0; }
Stage ZeroOptimizer::stage() const { return impl_->options.stage(); }
const Communicator& ZeroOptimizer::comm() const { return impl_->comm; }
const std::string& ZeroOptimizer::wrapped_name() const { return impl_->wrapped_name; }

bool Options::debug_from_environment() {
  const char* value = std::getenv("ZERO_DEBUG");
  return value != nullptr && *value != '\0' && std::string(value) != "0";
}

ZeroOptimizer wrap(std::unique_ptr<torch::optim::Optimizer> inner, const Options& options) {
  return ZeroOptimizer(std::move(inner), options);
}

namespace detail {
void refuse_together(const Options& options, const std::string& why) {
  if (options.comm().defined()) throw_together(options.comm(), why);
  ZERO_FAIL(why);
}
}  // namespace detail

}  // namespace zero
