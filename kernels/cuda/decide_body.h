// The decision of a step, on the device: from the statistics of all ranks to the factor of the gradients, whether the step is skipped,
// the next loss scale, and each parameter's scalars. The same formulas in double as the CPU step's.
#pragma once

#include "place.h"
#include "statistics_body.h"
#include "step.h"

namespace zero::kernels::cuda {

/// The ranks' statistics become the step's: added in the order of ranks, so that all have the same bits.
ZERO_HOST_DEVICE void combine(const Statistics* of_ranks, int ranks, StepRecord& record) {
  Statistics all;
  int first = -1;
  std::int64_t own = kAllFinite;
  for (int r = 0; r < ranks; ++r) {
    all = both(all, of_ranks[r]);
    if (first < 0 && of_ranks[r].first_own != kAllFinite) first = r, own = of_ranks[r].first_own;
  }
  record.sum_of_squares = all.sum_of_squares;
  record.first_nonfinite = all.first_nonfinite;
  record.first_own = own;
  record.rank_of_own = first;
}

ZERO_HOST_DEVICE void decide(const StepSettings& settings, const LossScaleState* scale, StepRecord& record) {
  record.loss_scale = scale == nullptr ? 1 : scale->scale;
  const double unscale = settings.unscaled != 0 ? 1 : 1 / record.loss_scale;
  double clip = settings.clip_factor;
  record.grad_norm = square_root(record.sum_of_squares) * clip * unscale;
  if (settings.max_norm > 0) {
    // As LibTorch: a NaN norm makes every gradient NaN, an infinite one zero (and the infinite elements NaN).
    double factor = settings.max_norm / (record.grad_norm + 1e-6);
    if (factor > 1) factor = 1;
    clip *= factor;
  }
  record.clip_factor = clip;
  record.grad_factor = clip * unscale;
  record.nonfinite_rank = record.rank_of_own;
  record.nonfinite_parameter = record.rank_of_own < 0 ? record.first_nonfinite : record.first_own;
  record.overflow = record.first_nonfinite != kAllFinite;
  record.skip = record.overflow != 0 && settings.skip_nonfinite != 0;
}

/// The plan of a parameter that is updated, from what the CPU's kernels are called with.
template <class T>
ZERO_HOST_DEVICE AdamPlan<T> plan_of(const AdamArgs& a, bool amsgrad, T /*arithmetic*/) {
  AdamPlan<T> plan{};
  plan.scalars = make_adam_scalars<T>(a);
  plan.decay = decay_of(a);
  plan.amsgrad = amsgrad;
  plan.active = 1;
  return plan;
}
template <class T>
ZERO_HOST_DEVICE SgdPlan<T> plan_of(const SgdArgs& a, T /*arithmetic*/) {
  SgdPlan<T> plan{};
  plan.scalars = make_sgd_scalars<T>(a);
  plan.momentum = momentum_of(a);
  plan.decay = a.weight_decay != 0;
  plan.active = 1;
  return plan;
}

template <class T>
ZERO_HOST_DEVICE AdamPlan<T> plan_of(const AdamGroup& o, const ParameterStep& p, double grad_factor, T arithmetic) {
  AdamArgs a;
  a.lr = o.lr;
  a.beta1 = o.beta1;
  a.beta2 = o.beta2;
  a.eps = o.eps;
  a.weight_decay = o.weight_decay;
  a.decoupled = o.decoupled != 0;
  a.step = p.steps + 1;
  a.grad_scale = grad_factor;
  AdamPlan<T> plan = plan_of(a, o.amsgrad != 0, arithmetic);
  plan.active = p.absent == 0;
  return plan;
}

template <class T>
ZERO_HOST_DEVICE SgdPlan<T> plan_of(const SgdGroup& o, const ParameterStep& p, double grad_factor, T arithmetic) {
  SgdArgs a;
  a.lr = o.lr;
  a.momentum = o.momentum;
  a.dampening = o.dampening;
  a.weight_decay = o.weight_decay;
  a.nesterov = o.nesterov != 0;
  a.first = p.started == 0;
  a.grad_scale = grad_factor;
  SgdPlan<T> plan = plan_of(a, arithmetic);
  plan.active = p.absent == 0;
  return plan;
}

ZERO_HOST_DEVICE void advance(const AdamGroup& /*options*/, ParameterStep& p) { ++p.steps; }
ZERO_HOST_DEVICE void advance(const SgdGroup& options, ParameterStep& p) {
  ++p.steps;
  if (options.momentum != 0) p.started = 1;
}

/// One block. Every thread makes the decision for itself, from what no thread writes before all have read it; the parameters are
/// dealt out. After a barrier one thread writes the record and follows the loss scale.
template <template <class> class Plan, class Group>
struct DecideBody {
  DecideTables<Group> tables;
  Plan<float>* plans;          ///< or null
  Plan<double>* plans_double;  ///< or null

  ZERO_HOST_DEVICE StepRecord operator()(Place at) const {
    StepRecord record = *tables.record;
    decide(*tables.settings, tables.scale, record);
    if (record.skip != 0) return record;
    for (int k = at.thread; k < tables.count; k += kThreads) {
      ParameterStep& p = tables.parameters[k];
      const Group& options = tables.groups[p.group];
      if (plans != nullptr) plans[k] = plan_of(options, p, record.grad_factor, 0.0f);
      if (plans_double != nullptr) plans_double[k] = plan_of(options, p, record.grad_factor, 0.0);
      if (p.absent == 0) advance(options, p);
    }
    return record;
  }

  /// For one thread, when all are done.
  ZERO_HOST_DEVICE void finish(const StepRecord& record) const {
    *tables.record = record;
    if (tables.scale != nullptr) follow_step(*tables.rule, *tables.scale, record.overflow != 0);
  }
};

}  // namespace zero::kernels::cuda
