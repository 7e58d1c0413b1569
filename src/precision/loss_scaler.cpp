#include "zero/loss_scaler.h"

#include <ATen/ops/mul.h>

#include <cmath>
#include <iomanip>
#include <limits>
#include <sstream>
#include <utility>

#include "core/check.h"
#include "precision/loss_scaling.h"

namespace zero {
namespace {

std::string exact(double x) {
  std::ostringstream out;
  out << std::setprecision(std::numeric_limits<double>::max_digits10) << x;
  return out.str();
}

double checked_scale(double scale, const char* what) {
  ZERO_CHECK(std::isfinite(scale) && scale > 0 && std::isfinite(static_cast<float>(scale)), what, " is ", scale,
             "; a loss scale is a positive float32 number");
  return kernels::as_float(scale);
}

}  // namespace

LossScaling::LossScaling(const LossScalerOptions& o) : options(o) {
  ZERO_CHECK(o.growth() >= 1 && std::isfinite(o.growth()), "LossScalerOptions::growth is ", o.growth(), "; it must be ≥ 1");
  ZERO_CHECK(o.backoff() > 0 && o.backoff() <= 1, "LossScalerOptions::backoff is ", o.backoff(), "; it must be in (0, 1]");
  ZERO_CHECK(o.growth_interval() >= 1, "LossScalerOptions::growth_interval is ", o.growth_interval(), "; it must be ≥ 1");
  ZERO_CHECK(o.hysteresis() >= 1, "LossScalerOptions::hysteresis is ", o.hysteresis(), "; it must be ≥ 1");
  ZERO_CHECK(o.minimum() >= 0 && o.minimum() <= o.initial(), "LossScalerOptions::minimum is ", o.minimum(),
             "; it must be between 0 and the initial scale, ", o.initial());
  rule = {o.growth(), o.backoff(), o.growth_interval(), o.minimum(), o.hysteresis()};
  state.scale = checked_scale(o.initial(), "LossScalerOptions::initial");
  state.tolerated = o.hysteresis();
}

void LossScaling::unscale() {
  if (unscaled) return;
  if (be_told) be_told();
  unscaled = true;
  multiply_gradients(1 / state.scale);
}

void LossScaling::end_of_step(bool overflow) {
  kernels::follow_step(rule, state, overflow);
  scaled = unscaled = false;
  take_pending();
}

void LossScaling::take_pending() {
  if (const auto chosen = std::exchange(pending, std::nullopt)) state.scale = *chosen;
}

void LossScaling::describe(Facts& out, bool with_state) const {
  if (with_state) {
    out.emplace_back("LossScaler: the scale", exact(state.scale));
    out.emplace_back("LossScaler: clean steps", std::to_string(state.clean));
  }
  out.emplace_back("LossScaler: the scale that was set last", said ? exact(*said) : "none was");
  out.emplace_back("LossScaler: the scale from the next step on", pending ? exact(*pending) : "as the rule says");
  out.emplace_back("LossScalerOptions::growth", exact(options.growth()));
  out.emplace_back("LossScalerOptions::backoff", exact(options.backoff()));
  out.emplace_back("LossScalerOptions::growth_interval", std::to_string(options.growth_interval()));
  out.emplace_back("LossScalerOptions::hysteresis", std::to_string(options.hysteresis()));
  out.emplace_back("LossScalerOptions::minimum", exact(options.minimum()));
  out.emplace_back("LossScalerOptions::fail_at_minimum", options.fail_at_minimum() ? "true" : "false");
}

at::Tensor LossScaler::scale(const at::Tensor& loss) const {
  ZERO_CHECK(!state_->unscaled,
             "LossScaler::scale: gradients of this step have been unscaled already; a further backward comes "
             "before unscale(), or after the step");
  state_->scaled = true;
  const bool narrow = loss.scalar_type() == at::kHalf || loss.scalar_type() == at::kBFloat16;
  const auto wide = narrow ? loss.to(at::kFloat) : loss;
  if (state_->in_device)
    if (const auto there = state_->in_device(); there.defined()) return wide.mul(there.to(wide.scalar_type()));
  return wide.mul(state_->state.scale);
}

void LossScaler::unscale() const {
  ZERO_CHECK(state_->multiply_gradients, "LossScaler::unscale: the optimizer is gone");
  state_->unscale();
}

double LossScaler::current() const {
  if (state_->be_told) state_->be_told();
  return state_->state.scale;
}
std::int64_t LossScaler::clean_steps() const {
  if (state_->be_told) state_->be_told();
  return state_->state.clean;
}
const LossScalerOptions& LossScaler::options() const { return state_->options; }

void LossScaler::set(double scale) const {
  scale = checked_scale(scale, "LossScaler::set: the scale");
  if (state_->be_told) state_->be_told();
  state_->said = scale;
  if (state_->scaled) {
    state_->pending = scale;
  } else {
    state_->state.scale = scale;
  }
}

}  // namespace zero
