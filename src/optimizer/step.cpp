// One step: agree, reduce, (norm, decision), update, gather. Nothing is written before all ranks know that all can.
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/variable.h>

#include <ATen/Parallel.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <utility>

#include "core/check.h"
#include "kernels/kernels.h"
#include "optimizer/impl.h"
#include "precision/loss_scaling.h"

namespace zero {
namespace {

// Adds the seconds of a scope to a report's field.
class Timed {
 public:
  explicit Timed(double& seconds) : seconds_(seconds), start_(std::chrono::steady_clock::now()) {}
  // NOLINTNEXTLINE(modernize-use-equals-default): it writes through a reference
  ~Timed() { seconds_ += std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count(); }
  Timed(const Timed&) = delete;
  Timed& operator=(const Timed&) = delete;

 private:
  double& seconds_;
  std::chrono::steady_clock::time_point start_;
};

kernels::Span span_of(const at::Tensor& shard, std::int64_t offset, std::int64_t& numel) {
  auto* memory = static_cast<char*>(shard.data_ptr()) + offset * shard.element_size();
  switch (shard.scalar_type()) {
    case at::kFloat:
      return {memory, kernels::DType::f32};
    case at::kDouble:
      return {memory, kernels::DType::f64};
    case at::kHalf:
      return {memory, kernels::DType::f16};
    case at::kBFloat16:
      return {memory, kernels::DType::bf16};
    case at::kComplexFloat:
      numel *= 2;
      return {memory, kernels::DType::f32};
    case at::kComplexDouble:
      numel *= 2;
      return {memory, kernels::DType::f64};
    default:
      ZERO_FAIL("no norm for gradients of type ", shard.scalar_type());
  }
}

kernels::NormResult norm_of(const at::Tensor& shard, const Segment& segment, int threads) {
  if (!shard.device().is_cpu()) {  // by LibTorch's operators; waits for the device
    const auto part = shard.narrow(0, segment.in_shard, segment.numel);
    kernels::NormResult result;
    result.sum_of_squares = part.to(part.is_complex() ? at::kComplexDouble : at::kDouble).abs().square().sum().item<double>();
    if (!std::isfinite(result.sum_of_squares) && !part.isfinite().all().item<bool>()) result.first_nonfinite = 0;
    return result;
  }
  std::int64_t n = segment.numel;
  const auto span = span_of(shard, segment.in_shard, n);
  return kernels::squared_norm(span, n, threads);
}

}  // namespace

int ZeroOptimizer::Impl::threads() const {
  return options.update_threads() > 0 ? options.update_threads() : at::get_num_threads();
}

bool ZeroOptimizer::Impl::uses_fused(int space) const {
  return fused_knows(kind, static_cast<at::ScalarType>(layout->spaces()[space].dtype));
}

bool ZeroOptimizer::Impl::bucket_present(int space, int bucket) const {
  const auto& members = layout->spaces()[space].buckets[bucket].parameters;
  return std::any_of(members.begin(), members.end(), [&](int i) { return present[i] && parameters[i].tensor.numel() > 0; });
}

void ZeroOptimizer::Impl::reduce_for_norm() {
  if (reducer->keeps()) return;
  if (decides_on_device()) return norm_on_device();
  // Partial sums are cut alike at every stage: each rank's shards, in order.
  double sum = 0;
  std::int32_t nonfinite = -1;
  for (std::size_t s = 0; s < layout->spaces().size(); ++s) {
    for (std::size_t b = 0; b < layout->spaces()[s].buckets.size(); ++b) {
      if (!bucket_present(s, b)) continue;
      const auto shard = reducer->shard(s, b, true);
      for (const auto& segment : layout->segments(s, b, comm.rank())) {
        if (!present[segment.parameter]) continue;
        const auto found = norm_of(shard, segment, threads());
        sum += found.sum_of_squares;
        if (found.first_nonfinite >= 0 && (nonfinite < 0 || segment.parameter < nonfinite)) nonfinite = segment.parameter;
      }
    }
  }
  // The ranks' sums, in order: the same bits everywhere.
  struct Partial {
    double sum;
    std::int32_t nonfinite;
    std::int32_t unused;
  } mine{sum, nonfinite, 0};
  double total = 0;
  kept_nonfinite = -1;
  for (const auto& packed : comm.exchange(std::string(reinterpret_cast<const char*>(&mine), sizeof mine), "gradient norm")) {
    Partial theirs{};
    std::memcpy(&theirs, packed.data(), sizeof theirs);
    total += theirs.sum;
    if (theirs.nonfinite >= 0 && (kept_nonfinite < 0 || theirs.nonfinite < kept_nonfinite)) kept_nonfinite = theirs.nonfinite;
  }
  kept_norm = std::sqrt(total);
  reducer->set_kept(true);
  gradients->mark();
}

double ZeroOptimizer::Impl::norm() {
  const Counted counted(comm, pending);
  enter(call_of(Call::kNorm));
  const Timed timed(pending.seconds_reduce);
  reduce_for_norm();
  told_norm();
  return kept_norm * clip_factor * unscale;
}

double ZeroOptimizer::Impl::clip(double max_norm) {
  const Counted counted(comm, pending);
  auto header = call_of(Call::kClip);
  header.value = max_norm;
  enter(header);
  return clip_entered(max_norm);
}

double ZeroOptimizer::Impl::clip_entered(double max_norm) {
  const Timed timed(pending.seconds_reduce);
  reduce_for_norm();
  told_norm();
  const double before = kept_norm * clip_factor * unscale;
  gradients->multiply_later(clip_by(max_norm));
  return before;
}

// From the kept norm: the factor that every gradient is multiplied by.
double ZeroOptimizer::Impl::clip_by(double max_norm) {
  const double before = kept_norm * clip_factor * unscale;
  if (!pending.grad_norm) pending.grad_norm = before;  // the norm before the first of several clips
  // As LibTorch: a NaN norm makes every gradient NaN, an infinite one zero (and the infinite elements NaN).
  double factor = max_norm / (before + 1e-6);
  if (factor > 1) factor = 1;
  clip_factor *= factor;
  return factor;
}

std::vector<Piece> ZeroOptimizer::Impl::pieces(int space, int bucket, const at::Tensor& average) const {
  std::vector<Piece> out;
  const auto& s = layout->spaces()[space];
  const auto grad_bytes = static_cast<std::int64_t>(average.element_size());
  for (const auto& segment : held(space, bucket)) {
    if (!present[segment.parameter]) continue;
    Piece piece;
    piece.parameter = segment.parameter;
    piece.space = space, piece.bucket = bucket;
    piece.in_parameter = segment.in_parameter;
    piece.in_held = segment.in_shard;
    piece.held = s.buckets[bucket].shard * (replicated() ? layout->ranks() : 1);
    piece.numel = segment.numel;
    piece.param = residents->memory(space, bucket, segment);
    piece.grad = static_cast<char*>(average.data_ptr()) + segment.in_shard * grad_bytes;
    piece.grad_type = average.scalar_type();
    out.push_back(piece);
  }
  return out;
}

void ZeroOptimizer::Impl::finish_bucket(int space, int bucket) {
  const Timed timed(pending.seconds_gather);
  residents->after_update(space, bucket, context->label("gathering parameters,", layout->unit(space, bucket)));
  // A graph that saved the old values must not be differentiated with the new ones.
  for (const int i : layout->spaces()[space].buckets[bucket].parameters)
    if (present[i]) torch::autograd::impl::bump_version(parameters[i].tensor);
}

void ZeroOptimizer::Impl::update_bucketwise() {
  for (std::size_t s = 0; s < layout->spaces().size(); ++s) {
    if (!uses_fused(s)) continue;
    for (std::size_t b = 0; b < layout->spaces()[s].buckets.size(); ++b) {
      if (!bucket_present(s, b)) continue;
      at::Tensor average;
      {
        const Timed timed(pending.seconds_reduce);
        average = reducer->shard(s, b, reducer->keeps());
        if (replicated()) average = reducer->whole(s, b, average);
      }
      {
        const Timed timed(pending.seconds_update);
        residents->before_update(s, b);
        fused->update(pieces(s, b, average), *groups, *state, clip_factor * unscale, threads());
      }
      finish_bucket(s, b);
    }
  }
}

void ZeroOptimizer::Impl::update_at_once() {
  std::vector<Piece> everything;
  std::vector<at::Tensor> averages;
  std::vector<std::pair<int, int>> buckets;
  for (std::size_t s = 0; s < layout->spaces().size(); ++s) {
    if (uses_fused(s)) continue;
    for (std::size_t b = 0; b < layout->spaces()[s].buckets.size(); ++b) {
      if (!bucket_present(s, b)) continue;
      const Timed timed(pending.seconds_reduce);
      auto average = reducer->shard(s, b, true);
      // A copy, since the next bucket reuses the scratch: a user's step() runs once, over everything.
      if (replicated() && comm.size() > 1) average = reducer->whole(s, b, average).clone();
      averages.push_back(average);
      residents->before_update(s, b);
      for (auto& piece : pieces(s, b, average)) everything.push_back(piece);
      buckets.emplace_back(s, b);
    }
  }
  if (buckets.empty()) return;
  {
    const Timed timed(pending.seconds_update);
    elementwise->update(everything, *groups, *state, clip_factor * unscale, threads());
  }
  for (const auto& [s, b] : buckets) finish_bucket(s, b);
}

void ZeroOptimizer::Impl::step() {
  {
    const Counted counted(comm, pending);
    enter(call_of(Call::kStep));
  }
  step_entered();
}

// Applied or not, and what gradients are multiplied by: by the host, from the norm that all ranks have.
void ZeroOptimizer::Impl::decide() {
  if (reducer->keeps()) {
    if (options.max_grad_norm() > 0) clip_by(options.max_grad_norm());
    if (!pending.grad_norm) pending.grad_norm = kept_norm * clip_factor * unscale;
    if (kept_nonfinite >= 0) pending.first_nonfinite = parameters[kept_nonfinite].name;
  }
  pending.clip_factor = clip_factor;
  pending.loss_scale = scaling && scaling->scaled ? scaling->state.scale : 1;
  pending.applied = !(skips_nonfinite() && kept_nonfinite >= 0 && reducer->keeps());
}

void ZeroOptimizer::Impl::step_entered() {
  // To the end: readers look at the report too, when they have something to say.
  const std::unique_lock<std::shared_timed_mutex> writing = lock_out_readers();
  {
    const Counted counted(comm, pending);
    const auto step = "step " + std::to_string(report.number + 1);
    if (skips_nonfinite() || options.record_grad_norm() || options.max_grad_norm() > 0) {
      const Timed timed(pending.seconds_reduce);
      reduce_for_norm();
    }
    if (!decides_on_device()) decide();
    if (device_step) decide_on_device();
    forget_replaced_masters();
    residents->begin_update(step);
    if (pending.applied) {
      update_bucketwise();
      update_at_once();
    } else {
      refuse_nonfinite();
    }
    residents->end_update(step, pending);
    reducer->set_kept(false);
    clip_factor = 1;
    gradients->release();
  }
  pending.bytes_sent += pending.bytes_gathered;  // without a call of the communicator inside a node
  const auto norms = std::exchange(norms_on_device, 0) * DeviceStep::kStatisticsBytes * (comm.size() - 1);
  pending.bytes_sent -= norms, pending.control_bytes += norms;  // tensors to the communicator, a norm to whoever reads
  weight = 0;
  backwards = 0;
  pending.number = report.number + 1;
  report = pending;
  unread = device_step != nullptr;
  pending = StepReport{};
  consolidated.reset();  // of the step before
  end_loss_scaling();
}

}  // namespace zero
