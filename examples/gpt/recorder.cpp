// Measurements of a run, see recorder.h.
#include "recorder.h"

#include <ATen/ops/zeros.h>

#include <algorithm>

#include "memory.h"
#include "model.h"
#include "ranks.h"

namespace gpt {
namespace {

/// Library code that a training step touches becomes resident at the first use: used once here, it isn't taken for the model's.
void touch_library_code() {
  Model model(size_named("tiny"));
  const auto tokens = at::zeros({1, 8}, at::kLong);
  model.forward(tokens, tokens).backward();
}

}  // namespace

Recorder::Recorder(const Settings& settings, const zero::Communicator& comm)
    : settings_(settings), comm_(comm), progress_(!settings.quiet && comm.rank() == 0, settings.steps, settings.seconds) {
  touch_library_code();
  m_.model = settings.model;
  m_.optimizer = settings.optimizer;
  m_.dtype = settings.dtype;
  m_.stage = settings.plain ? -1 : settings.stage;
  m_.world_size = comm.size();
  m_.tokens_per_step = settings.micro_batch * settings.accumulate * size_named(settings.model).context * comm.size();
  reset_peaks();
  live_before_ = live_tensor_bytes();
  shared_before_ = shared_bytes_per_rank(comm.local_size());
  resident_before_ = resident_set();
  proportional_before_ = proportional_set();
  start_ = Clock::now();
}

void Recorder::begin_step() { step_start_ = Clock::now(); }

void Recorder::before_update(const zero::Memory& kept) {
  m_.kept = kept;
  // Reading /proc takes a millisecond: when everything is there for the first time, and at the end.
  if (step_ - first_step_ > 1 && step_ + 1 != settings_.steps) return;
  m_.counted_bytes = live_tensor_bytes() - live_before_ + shared_bytes_per_rank(comm_.local_size()) - shared_before_;
  m_.pss_growth_bytes = proportional_set() - proportional_before_;
}

bool Recorder::end_step(double loss, const zero::StepReport& report) {
  const auto now = Clock::now();
  m_.seconds.push_back(std::chrono::duration<double>(now - step_start_).count());
  m_.bytes_sent_per_step = report.bytes_sent;
  m_.skipped_steps += report.number > 0 && !report.applied ? 1 : 0;
  m_.loss_scale = report.loss_scale;
  m_.paging.faults = report.faults;
  m_.paging.prefetch_hits = report.prefetch_hits;
  m_.paging.late_prefetch_seconds = report.late_prefetch_seconds;
  m_.paging.evictions = report.evictions;
  m_.paging.bytes_gathered = report.bytes_gathered;
  m_.paging.predicted_bytes = report.predicted_bytes;
  m_.paging.peak_resident_parameter_bytes =
      std::max(m_.paging.peak_resident_parameter_bytes, report.peak_resident_parameter_bytes);
  // The ranks' mean time decides when to stop: the same on all of them.
  const auto mean = mean_over_ranks(comm_, {loss, std::chrono::duration<double>(now - start_).count()}, "loss of a step");
  m_.losses.push_back(mean[0]);
  ++step_;
  progress_.show(step_, mean[0], static_cast<double>(m_.tokens_per_step) / m_.seconds.back(), m_.kept.total());
  return settings_.seconds > 0 ? mean[1] < settings_.seconds : step_ < settings_.steps;
}

Measurements Recorder::finish(std::int64_t parameter_count, std::int64_t padded_count, const zero::Memory& plan) {
  m_.parameter_count = parameter_count;
  m_.padded_count = padded_count;
  m_.seconds = max_over_ranks(comm_, m_.seconds, "seconds of all steps");
  m_.peak_resident_bytes = peak_resident_set();
  m_.peak_rss_growth_bytes = m_.peak_resident_bytes - resident_before_;

  std::vector<std::int64_t*> bytes = {&m_.bytes_sent_per_step, &m_.counted_bytes, &m_.peak_resident_bytes,
                                      &m_.peak_rss_growth_bytes, &m_.pss_growth_bytes};
  m_.plan = plan;
  for (zero::Memory* memory : {&m_.kept, &m_.plan})
    bytes.insert(bytes.end(), {&memory->parameters, &memory->gradients, &memory->optimizer_state, &memory->buffers});
  std::vector<double> mine;
  for (const auto* value : bytes) mine.push_back(static_cast<double>(*value));
  const auto max = max_over_ranks(comm_, mine, "bytes of a run");
  for (std::size_t i = 0; i < bytes.size(); ++i) *bytes[i] = static_cast<std::int64_t>(max[i]);
  return m_;
}

}  // namespace gpt
