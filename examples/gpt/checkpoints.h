// --save and --resume: checkpoints of a run, also when a scheduler ends it.
#pragma once

#include <zero/checkpoint.h>

#include <memory>

#include "model.h"
#include "settings.h"

namespace gpt {

class Checkpoints {
 public:
  /// With --save, a SIGTERM (what schedulers send before they kill) makes a checkpoint at the end of the step and ends the run.
  Checkpoints(const Settings& settings, const Model& model, zero::ZeroOptimizer& optimizer);

  /// Collective. Loads the newest checkpoint of --resume, if there is one. @returns steps that have been made
  std::int64_t resume();
  /// Collective. After a step: saves if it is time. @param more steps would follow @returns whether they do
  bool end_step(bool more);

 private:
  const Settings& settings_;
  const Model& model_;
  zero::ZeroOptimizer& optimizer_;
};

}  // namespace gpt
