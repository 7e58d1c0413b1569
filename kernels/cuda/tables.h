// What the launches of a step are told of, all in device memory: see step.h and segments.h for what is in it.
#pragma once

#include "segments.h"
#include "step.h"

namespace zero::kernels::cuda {

/// Blocks of the first pass over gradients, at most; each leaves one partial result.
constexpr int kStatisticsBlocks = 1024;

/// Where add_statistics() leaves the blocks' results until they are added up. One per stream that uses it.
struct StatisticsWorkspace {
  Statistics partial[kStatisticsBlocks];
};

template <class Group>
struct DecideTables {
  StepRecord* record;
  const StepSettings* settings;
  const LossScaleRule* rule;  ///< null, with `scale`: no loss scaling
  LossScaleState* scale;
  const Group* groups;
  ParameterStep* parameters;
  std::int32_t count;  ///< of parameters
};
using AdamDecision = DecideTables<AdamGroup>;
using SgdDecision = DecideTables<SgdGroup>;

/// What an update is about, besides memory.
template <template <class> class Plan>
struct UpdateTables {
  SegmentTable segments;
  const Plan<float>* plans;          ///< for parameters that are not f64,
  const Plan<double>* plans_double;  ///< and for those that are
  const std::int32_t* skip;          ///< &record->skip; null: never
};
using AdamTables = UpdateTables<AdamPlan>;
using SgdTables = UpdateTables<SgdPlan>;

}  // namespace zero::kernels::cuda
