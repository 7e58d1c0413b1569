// What a run says: progress while it trains, and measurements as a table and as JSON.
#pragma once

#include <zero/report.h>

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

namespace gpt {

/// What train() measures. Bytes are the largest of all ranks.
struct Measurements {
  std::string model, optimizer, dtype;
  int stage = 0;  ///< -1: without zero
  int world_size = 1;
  std::int64_t parameter_count = 0, padded_count = 0;
  std::int64_t tokens_per_step = 0;      ///< of all ranks together
  std::vector<double> losses;            ///< mean over ranks and micro-batches, before the update
  std::int64_t skipped_steps = 0;        ///< that overflowed
  double loss_scale = 1;                 ///< of the last step
  std::vector<double> seconds;           ///< per step, the slowest rank
  std::int64_t bytes_sent_per_step = 0;  ///< by one rank, in the last step
  zero::StepReport paging;               ///< stage 3, of the last step; the peak is of all
  zero::Memory kept;                     ///< between backward and step, as the optimizer says
  zero::Memory plan;                     ///< what it should be, by formula
  std::int64_t counted_bytes = 0;  ///< the same moment: growth of tensors' memory and of shared memory, counted from outside
  std::int64_t peak_resident_bytes = 0, peak_rss_growth_bytes = 0, pss_growth_bytes = 0;
  std::string text_sha256;
  std::int64_t text_bytes = 0;

  double tokens_per_second() const;  ///< by the median step, the first two left out
};

std::string mebibytes(double bytes);     ///< "12.7"
std::string with_commas(double number);  ///< "12,345"

/// A line that redraws itself on a terminal, and a line now and then elsewhere.
class Progress {
 public:
  /// Shows the state of a run of `steps` steps, or of `seconds` if that isn't 0. Silent unless `on`.
  Progress(bool on, std::int64_t steps, double seconds);
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;
  void show(std::int64_t step, double loss, double tokens_per_second, std::int64_t resident_bytes);

 private:
  double elapsed() const;

  bool on_, redraw_;
  std::int64_t steps_;
  double seconds_;
  std::chrono::steady_clock::time_point start_;
  double next_ = 0;  ///< seconds after the start at which to print again
};

/// JSON of one run, with other runs (of other stages) under "stages" if there are any. @throws c10::Error if it can't be written
void write_json(const std::string& path, const Measurements& run, const std::vector<Measurements>& stages = {});

/// A few lines about one run.
void print_summary(const Measurements& run);
/// Memory and traffic of the same model at several stages, measured beside the formulas.
void print_stage_table(const std::vector<Measurements>& stages);

}  // namespace gpt
