#include "update/device_step.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cstddef>
#include <cstring>

#include "core/check.h"
#include "core/memory.h"
#include "update/fused_state.h"

namespace zero {

namespace cuda = kernels::cuda;
using cuda::ParameterStep;

namespace {

at::TensorOptions bytes_on(c10::Device device) { return at::TensorOptions(at::kByte).device(device); }

template <class T>
T* in(const at::Tensor& memory) {
  return memory.defined() ? static_cast<T*>(memory.data_ptr()) : nullptr;
}

// Options of a group as the deciding kernel reads them; padding is zero, since they are compared as bytes.
template <class Group>
void append(std::vector<char>& bytes, const Group& group) {
  const auto at = bytes.size();
  bytes.resize(at + sizeof group);
  std::memcpy(bytes.data() + at, &group, sizeof group);
}

bool same(const cuda::StepSettings& a, const cuda::StepSettings& b) {
  return a.clip_factor == b.clip_factor && a.max_norm == b.max_norm && a.skip_nonfinite == b.skip_nonfinite &&
         a.unscaled == b.unscaled;
}
bool same(const kernels::LossScaleState& a, const kernels::LossScaleState& b) {
  return a.scale == b.scale && a.clean == b.clean && a.tolerated == b.tolerated && a.skipped_in_a_row == b.skipped_in_a_row;
}

constexpr auto kRow = static_cast<std::int64_t>(sizeof(ParameterStep) / sizeof(std::int32_t));
constexpr auto kAbsent = static_cast<std::int64_t>(offsetof(ParameterStep, absent) / sizeof(std::int32_t));

}  // namespace

DeviceStep::DeviceStep(WrappedClass kind, MasterWeights& masters, c10::Device device, std::unique_ptr<DeviceLauncher> launcher)
    : kind_(kind),
      masters_(masters),
      device_(device),
      launcher_(std::move(launcher)),
      gradient_tables_(device),
      update_tables_(device),
      fixed_(at::zeros({sizeof(Fixed)}, bytes_on(device))),
      workspace_(at::empty({sizeof(cuda::StatisticsWorkspace)}, bytes_on(device))) {}

void DeviceStep::put(std::size_t offset, const void* values, std::size_t bytes) {
  to_device(fixed_.narrow(0, static_cast<std::int64_t>(offset), static_cast<std::int64_t>(bytes)), values, bytes);
}

at::Tensor& DeviceStep::room(at::Tensor& memory, std::size_t bytes) const {
  if (!memory.defined() || memory.numel() < static_cast<std::int64_t>(bytes))
    memory = at::zeros({static_cast<std::int64_t>(bytes)}, bytes_on(device_));
  return memory;
}

// --- what the host knows

DeviceStep::Now DeviceStep::now(const Parameter& parameter, const StateMap& states) const {
  const auto it = states.find(parameter.tensor.unsafeGetTensorImpl());
  if (it == states.end() || it->second == nullptr) return {nullptr, 0};
  return {it->second.get(), is_adam() ? steps_made(kind_, *it->second) : 0};
}

void DeviceStep::follow_groups(const Groups& groups) {
  std::vector<char> bytes;
  for (const auto& group : groups) {
    if (is_adam()) {
      const auto args = adam_args(kind_, group.options());
      cuda::AdamGroup g;
      std::memset(static_cast<void*>(&g), 0, sizeof g);
      g.lr = args.lr, g.beta1 = args.beta1, g.beta2 = args.beta2, g.eps = args.eps, g.weight_decay = args.weight_decay;
      g.decoupled = args.decoupled, g.amsgrad = amsgrad(kind_, group.options());
      append(bytes, g);
    } else {
      const auto args = sgd_args(group.options());
      cuda::SgdGroup g;
      std::memset(static_cast<void*>(&g), 0, sizeof g);
      g.lr = args.lr, g.momentum = args.momentum, g.dampening = args.dampening, g.weight_decay = args.weight_decay;
      g.nesterov = args.nesterov;
      append(bytes, g);
    }
  }
  if (bytes == groups_known_) return;
  to_device(room(groups_, bytes.size()), bytes.data(), bytes.size());
  groups_known_ = std::move(bytes);
}

void DeviceStep::write_parameters(const std::vector<Parameter>& parameters, const std::vector<char>& present,
                                  StateMap& states) {
  if (ahead_) read_counts(parameters, states);  // a state has come or gone: rare, and the others' counts are the device's
  known_.assign(parameters.size(), {});
  any_double_ = any_other_ = false;
  std::vector<ParameterStep> rows(parameters.size(), ParameterStep{});
  for (std::size_t k = 0; k < rows.size(); ++k) {
    const auto found = now(parameters[k], states);
    known_[k] = {found.state, found.steps, found.steps, false};
    rows[k].steps = found.steps;
    rows[k].group = parameters[k].group;
    rows[k].absent = present[k] == 0;
    rows[k].started = found.state != nullptr;
    (parameters[k].tensor.scalar_type() == at::kDouble ? any_double_ : any_other_) = true;
  }
  to_device(room(parameters_, rows.size() * sizeof rows[0]), rows.data(), rows.size() * sizeof rows[0]);
  present_ = present;
}

// The device alone knows the rest of the rows.
void DeviceStep::write_absent(const std::vector<char>& present) {
  std::vector<std::int32_t> absent(present.size());
  for (std::size_t k = 0; k < present.size(); ++k) absent[k] = present[k] == 0;
  const auto count = static_cast<std::int64_t>(absent.size());
  const auto there = to_device(absent.data(), absent.size() * sizeof absent[0], device_).view(at::kInt);
  const auto rows = parameters_.narrow(0, 0, count * static_cast<std::int64_t>(sizeof(ParameterStep)));
  rows.view(at::kInt).view({count, kRow}).select(1, kAbsent).copy_(there);
  present_ = present;
}

void DeviceStep::follow(const std::vector<Parameter>& parameters, const std::vector<char>& present, const Groups& groups,
                        StateMap& states) {
  follow_groups(groups);
  bool as_known = known_.size() == parameters.size();
  for (std::size_t k = 0; k < parameters.size() && as_known; ++k) {
    const auto found = now(parameters[k], states);
    as_known = found.state == known_[k].state && found.steps == known_[k].steps;
  }
  if (!as_known)
    write_parameters(parameters, present, states);
  else if (present != present_)
    write_absent(present);
}

void DeviceStep::follow(const LossScaling* scaling) {
  if (scaling == nullptr || (scale_told_ && same(scaling->state, scale_known_))) return;
  scale_known_ = scaling->state, scale_told_ = true;
  put(offsetof(Fixed, rule), &scaling->rule, sizeof scaling->rule);  // which doesn't change
  put(offsetof(Fixed, scale), &scale_known_, sizeof scale_known_);
}

at::Tensor DeviceStep::scale() const {
  return tensor_over(&fixed()->scale.scale, std::make_shared<at::Tensor>(fixed_), {}, {}, at::kDouble, device_);
}

// --- the step

void DeviceStep::clear() { launcher_->begin_step(&fixed()->record); }

void DeviceStep::add_statistics(int space, int bucket, const at::Tensor& shard, const std::vector<Segment>& segments) {
  std::vector<cuda::Segment> there;
  for (const auto& s : segments) there.push_back({s.in_shard, s.in_shard + s.numel, s.parameter, s.parameter});
  if (there.empty()) return;
  const auto table = gradient_tables_.of({space, bucket, 0}, there, shard.numel());
  launcher_->add_statistics({shard.data_ptr(), kernel_type(shard.scalar_type())}, table, steps(),
                            in<cuda::StatisticsWorkspace>(workspace_), &fixed()->record);
}

void DeviceStep::add_own(const at::Tensor& first) {
  constexpr std::int64_t kAt = offsetof(Fixed, record) + offsetof(cuda::StepRecord, first_own);
  fixed_.narrow(0, kAt, sizeof(std::int64_t)).copy_(first.view({1}).view(at::kByte));
}

void DeviceStep::combine(const Communicator& comm, const std::string& what) {
  static_assert(offsetof(cuda::StepRecord, sum_of_squares) == offsetof(cuda::Statistics, sum_of_squares) &&
                    offsetof(cuda::StepRecord, first_nonfinite) == offsetof(cuda::Statistics, first_nonfinite) &&
                    offsetof(cuda::StepRecord, first_own) == offsetof(cuda::Statistics, first_own),
                "a record begins with statistics");
  room(of_ranks_, static_cast<std::size_t>(kStatisticsBytes * comm.size()));
  const auto mine = of_ranks_.narrow(0, kStatisticsBytes * comm.rank(), kStatisticsBytes);
  mine.copy_(fixed_.narrow(0, offsetof(Fixed, record), kStatisticsBytes));
  if (comm.size() > 1) comm.all_gather(mine, of_ranks_, what);
  launcher_->combine(in<cuda::Statistics>(of_ranks_), comm.size(), &fixed()->record);
}

template <template <class> class Plan, class Group>
void DeviceStep::decide_with(bool scaled) {
  const auto count = known_.size();
  auto* plans = any_other_ ? in<Plan<float>>(room(plans_, count * sizeof(Plan<float>))) : nullptr;
  auto* plans_double = any_double_ ? in<Plan<double>>(room(plans_double_, count * sizeof(Plan<double>))) : nullptr;
  auto* f = fixed();
  const cuda::DecideTables<Group> tables{
      &f->record,         &f->settings, scaled ? &f->rule : nullptr,     scaled ? &f->scale : nullptr,
      in<Group>(groups_), steps(),      static_cast<std::int32_t>(count)};
  launcher_->decide(tables, plans, plans_double);
  ahead_ = true;
}

void DeviceStep::decide(const cuda::StepSettings& settings, bool scaled) {
  if (!same(settings, settings_known_)) {
    settings_known_ = settings;
    put(offsetof(Fixed, settings), &settings, sizeof settings);
  }
  is_adam() ? decide_with<cuda::AdamPlan, cuda::AdamGroup>(scaled) : decide_with<cuda::SgdPlan, cuda::SgdGroup>(scaled);
}

namespace {

template <template <class> class Plan>
cuda::UpdateTables<Plan> update_tables(const cuda::SegmentTable& segments, const at::Tensor& plans,
                                       const at::Tensor& plans_double, const std::int32_t* skip) {
  return {segments, in<Plan<float>>(plans), in<Plan<double>>(plans_double), skip};
}

}  // namespace

cuda::AdamTables DeviceStep::adam_tables(SegmentTables::Key key, const std::vector<cuda::Segment>& segments,
                                         std::int64_t elements) {
  return update_tables<cuda::AdamPlan>(update_tables_.of(key, segments, elements), plans_, plans_double_,
                                       &fixed()->record.skip);
}

cuda::SgdTables DeviceStep::sgd_tables(SegmentTables::Key key, const std::vector<cuda::Segment>& segments,
                                       std::int64_t elements) {
  return update_tables<cuda::SgdPlan>(update_tables_.of(key, segments, elements), plans_, plans_double_, &fixed()->record.skip);
}

void DeviceStep::made_state(int parameter, const torch::optim::OptimizerParamState& state) {
  known_[parameter].state = &state;
  known_[parameter].steps = is_adam() ? steps_made(kind_, state) : 0;
}

// --- what the device knows

DeviceStep::Found DeviceStep::read(const std::vector<Parameter>& parameters, StateMap& states) {
  const auto fixed_here = fixed_.to(at::kCPU, at::kByte, /*non_blocking=*/false, /*copy=*/true);
  const auto* f = static_cast<const Fixed*>(fixed_here.const_data_ptr());
  scale_known_ = f->scale;
  if (ahead_) read_counts(parameters, states);
  return {f->record, f->scale};
}

void DeviceStep::read_counts(const std::vector<Parameter>& parameters, StateMap& states) {
  ahead_ = false;
  const auto rows_here = parameters_.to(at::kCPU, at::kByte, /*non_blocking=*/false, /*copy=*/true);
  const auto* rows = static_cast<const ParameterStep*>(rows_here.const_data_ptr());
  for (std::size_t k = 0; k < known_.size() && k < parameters.size(); ++k) {
    const bool skipped = rows[k].steps == known_[k].counted;  // each step since then that it has taken part in
    if (known_[k].new_master && skipped) masters_.drop(static_cast<int>(k));
    known_[k].new_master = false;
    known_[k].counted = rows[k].steps;
    auto* impl = parameters[k].tensor.unsafeGetTensorImpl();
    const auto it = states.find(impl);
    const bool ours = it != states.end() && it->second.get() == known_[k].state && known_[k].state != nullptr;
    if (!ours || now(parameters[k], states).steps != known_[k].steps) continue;  // somebody has given it another state
    const bool begun = is_adam() ? rows[k].steps > 0 : rows[k].started != 0;
    if (!begun) {  // made for a step that was skipped
      states.erase(it);
      known_[k].state = nullptr, known_[k].steps = 0;
      continue;
    }
    if (!is_adam()) continue;
    set_steps_made(kind_, *it->second, rows[k].steps);
    known_[k].steps = rows[k].steps;
  }
}

}  // namespace zero
