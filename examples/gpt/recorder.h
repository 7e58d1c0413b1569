// Takes the measurements of a run: the training loop tells it where it is.
#pragma once

#include <zero/communicator.h>

#include <chrono>
#include <cstdint>

#include "report.h"
#include "settings.h"

namespace gpt {

class Recorder {
 public:
  /// Just before the model is made: everything is measured as growth from here. Collective.
  Recorder(const Settings& settings, const zero::Communicator& comm);

  /// A run that was resumed: so many steps have been made.
  void start_at(std::int64_t step) { step_ = first_step_ = step; }
  void begin_step();
  /// Between backward and step: what is kept now. Gradients are there; from the second step on, optimizer state is, too.
  void before_update(const zero::Memory& kept);
  /// Collective. Ends a step of this rank's mean loss. False: that was the last one.
  bool end_step(double loss, const zero::StepReport& report);
  /// Collective. Maxima over ranks.
  Measurements finish(std::int64_t parameter_count, std::int64_t padded_count, const zero::Memory& plan);

  std::int64_t step() const { return step_; }

 private:
  using Clock = std::chrono::steady_clock;

  const Settings& settings_;
  zero::Communicator comm_;
  Progress progress_;
  Measurements m_;
  std::int64_t step_ = 0, first_step_ = 0;
  std::int64_t live_before_, shared_before_, resident_before_, proportional_before_;
  Clock::time_point start_, step_start_;
};

}  // namespace gpt
