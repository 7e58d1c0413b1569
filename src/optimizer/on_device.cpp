// Steps that a device decides: the norm, clipping, overflow and the loss scale stay in its memory, and the host, which only puts work
// on the stream, is told when somebody asks (last_step(), clip_grad_norm_, LossScaler::current(), save).
#include <algorithm>
#include <cmath>

#include "core/check.h"
#include "optimizer/impl.h"

namespace zero {

using kernels::cuda::kAllFinite;

namespace {
constexpr double kUnread = 0;  // in place of a loss scale, which is positive
}

bool ZeroOptimizer::Impl::decides_on_device() const {
  if (!device_step) return false;
  for (std::size_t s = 0; s < layout->spaces().size(); ++s)
    if (!uses_fused(static_cast<int>(s))) return false;
  return true;
}

void ZeroOptimizer::Impl::norm_on_device() {
  device_step->follow(parameters, present, *groups, *state);
  device_step->follow(scaling.get());
  device_step->clear();
  for (std::size_t k = 0; k < layout->spaces().size(); ++k) {
    const int s = static_cast<int>(k), buckets = static_cast<int>(layout->spaces()[k].buckets.size());
    for (int b = 0; b < buckets; ++b)
      if (bucket_present(s, b))
        device_step->add_statistics(s, b, reducer->shard(s, b, true), layout->segments(s, b, comm.rank()));
  }
  if (const auto own = gradients->first_nonfinite_there(); own.defined()) device_step->add_own(own);
  ++norms_on_device;
  device_step->combine(comm, "step " + std::to_string(report.number + 1) + ": gradient norm");
  reducer->set_kept(true);
  gradients->mark();
}

void ZeroOptimizer::Impl::told_norm() {
  if (!decides_on_device()) return;
  read_step();  // what was decided before, while it is the last
  const auto found = device_step->read(parameters, *state);
  kept_norm = std::sqrt(found.record.sum_of_squares);
  kept_nonfinite = found.record.first_nonfinite == kAllFinite ? -1 : static_cast<int>(found.record.first_nonfinite);
  unscale = divides ? 1 / found.scale.scale : 1;
}

void ZeroOptimizer::Impl::decide_on_device() {
  kernels::cuda::StepSettings settings{};
  const bool here = decides_on_device();  // else the host has decided, and the device's kernels are told
  device_step->follow(parameters, present, *groups, *state);
  device_step->follow(scaling.get());
  if (!here || !reducer->keeps()) device_step->clear();
  settings.clip_factor = here ? clip_factor : clip_factor * unscale;
  settings.max_norm = here && reducer->keeps() ? options.max_grad_norm() : 0;
  settings.skip_nonfinite = here && reducer->keeps() && skips_nonfinite();
  settings.unscaled = !here || !divides;
  if (!here && !pending.applied) return;
  device_step->decide(settings, here && scaling != nullptr);
  if (!here) return;
  pending.applied = true;  // as far as the host's work goes
  pending.loss_scale = scaling && scaling->scaled ? kUnread : 1;
}

void ZeroOptimizer::Impl::read_step() {
  if (!unread) return;
  unread = false;
  const auto found = device_step->read(parameters, *state);
  if (!decides_on_device()) return;
  const auto& record = found.record;
  if (scaling) scaling->state = found.scale;
  report.applied = record.skip == 0;
  report.clip_factor = record.clip_factor;
  if (report.loss_scale == kUnread) report.loss_scale = record.loss_scale;
  const bool looked = skips_nonfinite() || options.record_grad_norm() || options.max_grad_norm() > 0;
  if (looked && !report.grad_norm) report.grad_norm = record.grad_norm;
  if (record.nonfinite_parameter != kAllFinite) report.first_nonfinite = parameters[record.nonfinite_parameter].name;
  const bool at_minimum = scaling && record.loss_scale <= scaling->rule.minimum;
  if (!report.applied) {
    report.nonfinite_rank = record.nonfinite_rank;
    report.reason = reason_of(report, at_minimum, record.loss_scale);
  }
  if (skips_nonfinite() && suspicious() != gradients->looking()) look_for_nonfinite();
  if (scaling) told_of_overflow(at_minimum);
}

}  // namespace zero
