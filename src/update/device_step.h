// The scalars of a step in a device's memory: the gradients' norm, the clip factor, whether the step is skipped, the loss scale, step
// counts and learning rates. The host puts launches on the current stream and waits for nothing; it reads what was decided when somebody
// asks (read()).
//
// A step, in order: follow(), clear(), [add_statistics() per shard, combine()], decide(), updates with adam_tables() or sgd_tables(). What the host knows and
// the device needs goes over only where it has changed.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "kernels/cuda/tables.h"
#include "precision/loss_scaling.h"
#include "update/device_launcher.h"
#include "update/segment_tables.h"
#include "update/updater.h"
#include "zero/communicator.h"

namespace zero {

class DeviceStep {
 public:
  /// @param kind Adam, AdamW or SGD
  /// @param masters outlives this
  DeviceStep(WrappedClass kind, MasterWeights& masters, c10::Device device, std::unique_ptr<DeviceLauncher> launcher);

  /// What the host knows before a step.
  /// @param present   per parameter: has a gradient
  void follow(const std::vector<Parameter>& parameters, const std::vector<char>& present, const Groups& groups,
              StateMap& states);
  /// The loss scale, where the host has changed it; null: none.
  void follow(const LossScaling* scaling);
  /// The scale in force, float64 without dimensions, over the device's own memory.
  at::Tensor scale() const;

  /// No statistics yet.
  void clear();
  /// Of one shard of averaged gradients: `segments` in places of the shard.
  void add_statistics(int space, int bucket, const at::Tensor& shard, const std::vector<Segment>& segments);
  /// Which parameter's own gradient wasn't finite, first of all on this rank: an int64 in the device's memory, or kAllFinite.
  void add_own(const at::Tensor& first);
  /// Collective. From this rank's statistics those of all. Sends 24 bytes to every rank.
  void combine(const Communicator& comm, const std::string& what);

  /// Decides, and makes each parameter's scalars for the update.
  /// @param scaled  the loss scale takes part: it unscales, and follows an overflow
  void decide(const kernels::cuda::StepSettings& settings, bool scaled);

  /// What the update of a stretch of parameters is told of.
  kernels::cuda::AdamTables adam_tables(SegmentTables::Key key, const std::vector<kernels::cuda::Segment>& segments,
                                        std::int64_t elements);
  kernels::cuda::SgdTables sgd_tables(SegmentTables::Key key, const std::vector<kernels::cuda::Segment>& segments,
                                      std::int64_t elements);
  DeviceLauncher& launcher() { return *launcher_; }
  /// What was made for this step. Should the step be skipped, read() drops it.
  void made_state(int parameter, const torch::optim::OptimizerParamState& state);
  void made_master(int parameter) { known_[parameter].new_master = true; }

  static constexpr std::int64_t kStatisticsBytes = sizeof(kernels::cuda::Statistics);

  /// What the device has by now. Waits for it.
  struct Found {
    kernels::cuda::StepRecord record;  ///< decisions of the last decide(), statistics of what came after
    kernels::LossScaleState scale;
  };
  /// @param states their step counts become what the device has counted
  Found read(const std::vector<Parameter>& parameters, StateMap& states);

 private:
  struct Fixed {
    kernels::cuda::StepRecord record;
    kernels::cuda::StepSettings settings;
    kernels::LossScaleRule rule;
    kernels::LossScaleState scale;
  };
  // What the host has last seen or said of a parameter.
  struct Known {
    const void* state = nullptr;
    std::int64_t steps = 0;    // as LibTorch's object says
    std::int64_t counted = 0;  // by the device, when it was asked last
    bool new_master = false;
  };
  struct Now {
    const torch::optim::OptimizerParamState* state;
    std::int64_t steps;
  };

  Now now(const Parameter& parameter, const StateMap& states) const;
  bool is_adam() const { return kind_ != WrappedClass::kSGD; }
  void follow_groups(const Groups& groups);
  void write_parameters(const std::vector<Parameter>& parameters, const std::vector<char>& present, StateMap& states);
  void read_counts(const std::vector<Parameter>& parameters, StateMap& states);
  void write_absent(const std::vector<char>& present);
  Fixed* fixed() const { return static_cast<Fixed*>(fixed_.data_ptr()); }
  kernels::cuda::ParameterStep* steps() const { return static_cast<kernels::cuda::ParameterStep*>(parameters_.data_ptr()); }
  void put(std::size_t offset, const void* values, std::size_t bytes);
  at::Tensor& room(at::Tensor& memory, std::size_t bytes) const;
  template <template <class> class Plan, class Group>
  void decide_with(bool scaled);

  WrappedClass kind_;
  MasterWeights& masters_;
  c10::Device device_;
  std::unique_ptr<DeviceLauncher> launcher_;
  SegmentTables gradient_tables_, update_tables_;

  // In the device's memory, as bytes.
  at::Tensor fixed_, parameters_, groups_, plans_, plans_double_, workspace_, of_ranks_;

  // The host's idea of it.
  std::vector<Known> known_;
  std::vector<char> present_;
  std::vector<char> groups_known_;
  kernels::cuda::StepSettings settings_known_{};
  kernels::LossScaleState scale_known_{};
  bool scale_told_ = false;
  bool ahead_ = false;  ///< the device has counted steps that the host doesn't know of
  bool any_double_ = false, any_other_ = false;
};

}  // namespace zero
