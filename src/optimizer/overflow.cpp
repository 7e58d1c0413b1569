// Steps that are skipped because the averaged gradient isn't finite, and the loss scale that follows them.
#include <c10/util/Exception.h>

#include <cstring>
#include <string>

#include "core/check.h"
#include "optimizer/impl.h"
#include "precision/loss_scaling.h"

namespace zero {

LossScaler::LossScaler(ZeroOptimizer& optimizer, const LossScalerOptions& options)
    : state_(std::make_shared<LossScaling>(options)) {
  optimizer.impl().use_loss_scaling(state_);
}

void ZeroOptimizer::Impl::use_loss_scaling(std::shared_ptr<LossScaling> made) {
  ZERO_CHECK(scaling == nullptr, "LossScaler: this optimizer has one already; copy that one");
  scaling = std::move(made);
  scaling->multiply_gradients = [this](double factor) {
    if (!gradients) return;
    gradients->multiply(factor);
    reducer->set_kept(false);  // averages that were kept for a norm are of what was there before
  };
  scaling->in_device = [this] {
    if (!decides_on_device()) return at::Tensor();
    device_step->follow(scaling.get());
    return device_step->scale();
  };
  scaling->be_told = [this] { read_step(); };
  if (gradients) look_for_nonfinite();
}

// Where a device decides, the host may not know yet of the last step; each rank looks when it does.
bool ZeroOptimizer::Impl::suspicious() const {
  return scaling ? scaling->suspicious() : options.skip_nonfinite() && report.number > 0 && !report.applied;
}

// Says why, and on which rank: known where arriving gradients have been looked at, which is what ranks do after a skipped step.
void ZeroOptimizer::Impl::refuse_nonfinite() {
  if (suspicious()) {
    std::int32_t mine = comm.size() == 1 ? kept_nonfinite : gradients->first_nonfinite();
    const auto all =
        comm.exchange(std::string(reinterpret_cast<const char*>(&mine), sizeof mine), "where gradients overflowed");
    for (std::size_t r = 0; r < all.size() && pending.nonfinite_rank < 0; ++r) {
      std::int32_t theirs = -1;
      std::memcpy(&theirs, all[r].data(), sizeof theirs);
      if (theirs < 0) continue;
      pending.nonfinite_rank = static_cast<int>(r);
      pending.first_nonfinite = parameters[theirs].name;
    }
  }
  pending.reason = scaling ? reason_of(pending, scaling->at_minimum(), scaling->state.scale) : reason_of(pending, false, 1);
}

std::string ZeroOptimizer::Impl::reason_of(const StepReport& skipped, bool at_minimum, double scale) {
  auto reason = skipped.nonfinite_rank < 0 ? "the averaged gradient of " + skipped.first_nonfinite + " is not finite"
                                           : detail::text("the gradient of ", skipped.first_nonfinite,
                                                          " was not finite on rank ", skipped.nonfinite_rank, ", first of all");
  if (at_minimum) reason += detail::text(", and the loss scale, ", scale, ", can't become smaller");
  return reason;
}

void ZeroOptimizer::Impl::look_for_nonfinite() {
  if (decides_on_device())
    gradients->look_in_device(suspicious(), kernels::cuda::kAllFinite);
  else
    gradients->look_for_nonfinite(suspicious());
}

void ZeroOptimizer::Impl::end_loss_scaling() {
  if (scaling) {
    const bool at_minimum = scaling->at_minimum();
    if (decides_on_device()) {
      scaling->scaled = scaling->unscaled = false;
      if (scaling->pending || scaling->options.fail_at_minimum()) read_step();
      scaling->take_pending();
    } else {
      scaling->end_of_step(!report.applied);
      told_of_overflow(at_minimum);
    }
  }
  if (skips_nonfinite()) look_for_nonfinite();
}

void ZeroOptimizer::Impl::told_of_overflow(bool at_minimum) {
  if (report.applied) scaling->warned = false;
  if (report.applied || !at_minimum) return;
  if (scaling->options.fail_at_minimum()) {
    look_for_nonfinite();
    ZERO_FAIL("step ", report.number, " was skipped: ", report.reason);
  }
  if (!scaling->warned && comm.rank() == 0) {
    TORCH_WARN("step ", report.number, " was skipped: ", report.reason);
  }
  scaling->warned = true;
}

// A parameter that was replaced as a whole (to(), torch::load) brings its own values, each of them.
void ZeroOptimizer::Impl::forget_replaced_masters() {
  for (std::size_t k = 0; k < parameters.size(); ++k) {
    const int i = static_cast<int>(k);
    if (!parameters[k].active || !precision.has_master(parameters[k].tensor.scalar_type())) continue;
    const bool left = paged && !paged->manages(i);  // by unshard(): the same values
    if (!left && residents->moved(i)) masters.forget(i);
  }
}

}  // namespace zero
