// Steps that are skipped because the averaged gradient isn't finite, and the loss scale that follows them.
#include <c10/util/Exception.h>

#include <cstring>
#include <string>

#include "core/check.h"
#include "optimizer/impl.h"
#include "precision/loss_scaling.h"

namespace zero {

void ZeroOptimizer::Impl::use_loss_scaling(std::shared_ptr<LossScaling> made) {
  ZERO_CHECK(scaling == nullptr, "LossScaler: this optimizer has one already; copy that one");
  scaling = std::move(made);
  scaling->multiply_gradients = [this](double factor) {
    if (!gradients) return;
    gradients->multiply(factor);
    reducer->set_kept(false);  // averages that were kept for a norm are of what was there before
  };
  if (gradients) gradients->look_for_nonfinite(suspicious());
}

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
  pending.reason = pending.nonfinite_rank < 0
                       ? "the averaged gradient of " + pending.first_nonfinite + " is not finite"
                       : detail::text("the gradient of ", pending.first_nonfinite, " was not finite on rank ",
                                      pending.nonfinite_rank, ", first of all");
  if (scaling && scaling->at_minimum())
    pending.reason += detail::text(", and the loss scale, ", scaling->state.scale, ", can't become smaller");
}

void ZeroOptimizer::Impl::end_loss_scaling() {
  if (scaling) {
    const bool at_minimum = scaling->at_minimum(), overflow = !report.applied;
    scaling->end_of_step(overflow);
    if (!overflow) scaling->warned = false;
    if (overflow && at_minimum) {
      if (scaling->options.fail_at_minimum()) {
        gradients->look_for_nonfinite(suspicious());
        ZERO_FAIL("step ", report.number, " was skipped: ", report.reason);
      }
      if (!scaling->warned && comm.rank() == 0) {
        TORCH_WARN("step ", report.number, " was skipped: ", report.reason);
      }
      scaling->warned = true;
    }
  }
  if (skips_nonfinite()) gradients->look_for_nonfinite(suspicious());
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
