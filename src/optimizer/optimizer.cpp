#include "zero/optimizer.h"

#include <ATen/core/grad_mode.h>

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
  for (auto& group : impl_->inner->param_groups()) {
    param_groups_.push_back(group);
    group.params().clear();  // the wrapped object sees flat pieces from now on
  }
  if (options.comm().defined()) attach(options.comm());
}

ZeroOptimizer::~ZeroOptimizer() = default;
ZeroOptimizer::ZeroOptimizer(ZeroOptimizer&&) noexcept = default;
ZeroOptimizer& ZeroOptimizer::operator=(ZeroOptimizer&&) noexcept = default;

void ZeroOptimizer::attach(const Communicator& comm) {
  ZERO_CHECK(comm.defined(), "attach: an undefined communicator");
  ZERO_CHECK(!impl_->attached(), "attach: the optimizer has a communicator already");
  impl_->comm = comm;
  try {
    impl_->set_up(param_groups_, state_, {});
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
  impl_->step(param_groups_, state_);
  return loss;
}

double ZeroOptimizer::grad_norm() {
  const at::NoGradGuard no_grad;
  return impl_->norm(param_groups_, state_);
}

double clip_grad_norm_(ZeroOptimizer& optimizer, double max_norm) {
  const at::NoGradGuard no_grad;
  return optimizer.impl().clip(max_norm, optimizer.param_groups(), optimizer.state());
}

const StepReport& ZeroOptimizer::last_step() const { return impl_->report; }
Memory ZeroOptimizer::memory() const { return impl_->memory(state_); }
Memory ZeroOptimizer::memory_plan(Stage stage, int world_size) const {
  ZERO_CHECK(impl_->attached(), "memory_plan: the optimizer has no communicator yet; call attach(comm) first");
  return impl_->plan(param_groups_, stage, world_size);
}
Memory ZeroOptimizer::memory_plan() const { return memory_plan(impl_->options.stage(), impl_->comm.size()); }
std::int64_t ZeroOptimizer::padded_numel() const { return impl_->layout ? impl_->layout->padded_numel() : 0; }
Stage ZeroOptimizer::stage() const { return impl_->options.stage(); }
const Communicator& ZeroOptimizer::comm() const { return impl_->comm; }
const std::string& ZeroOptimizer::wrapped_name() const { return impl_->wrapped_name; }

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
