// What a user can choose when wrapping an optimizer. Every setter returns *this, as LibTorch's option classes do.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "zero/communicator.h"
#include "zero/export.h"

namespace torch::nn {
class Module;
}

namespace zero {

/// Which of the three tensor families every rank keeps only its 1/N of (ZeRO, Rajbhandari et al. 2020).
enum class Stage : int {
  kReplicated = 0,      ///< nothing: every rank keeps all and repeats the same update
  kOptimizerState = 1,  ///< optimizer state
  kGradients = 2,       ///< and gradients: a bucket is averaged while backward runs, and each rank keeps its shard
  kParameters = 3,      ///< and parameters: a bucket is whole only while operators use it, within Options::memory_budget
};

/// How the ranks' gradients become one.
enum class Reduction {
  kMean,  ///< sum / world size: the gradient of the mean of the ranks' losses (default)
  kSum,   ///< the sum
  /// Sum / sum of the ranks' weights (ZeroOptimizer::add_weight): the loss is a sum over samples, and ranks or micro-batches may have
  /// unequal numbers of them. With no weight at all the gradient is zero.
  kWeighted,
};

class ZERO_API Options {
 public:
  /// Not attached to a communicator: nothing communicates before ZeroOptimizer::attach().
  Options() = default;
  /// Attached at construction. Not `explicit`: a communicator is the one thing that most programs choose.
  Options(Communicator comm) : comm_(std::move(comm)) {}  // NOLINT(google-explicit-constructor)

  /// Default: Stage::kOptimizerState.
  Options& stage(Stage s) {
    stage_ = s;
    return *this;
  }
  /// Float16 and bfloat16 parameters have float32 masters, which this rank's part of the optimizer updates; the parameter is the
  /// master's rounding. Default: they have. Without masters an update smaller than half a unit in the parameter's last place is
  /// lost, which for float16 with Adam is refused unless `force`. Others have none in any case.
  Options& master_weights(bool on, bool force = false) {
    master_weights_ = on;
    force_masters_off_ = !on && force;
    return *this;
  }
  /// In which type the gradients of 16-bit parameters are kept, accumulated and sent: at::kFloat, or their own (default; sums
  /// over ranks are made in float32 in any case, and rounded once). p.grad() is of this type.
  Options& reduce_dtype(at::ScalarType type) {
    reduce_dtype_ = type;
    return *this;
  }
  /// Type of the optimizer's state in the fused classes (Adam, AdamW, SGD): at::kFloat (default) or at::kBFloat16, which
  /// halves it. Bfloat16 has 8 bits: exp_avg_sq stops following where a step changes it by less than 1/256, with beta2 = 0.999 nearly
  /// everywhere; choose beta2 ≤ 0.95. Double parameters have double state.
  Options& state_dtype(at::ScalarType type) {
    state_dtype_ = type;
    return *this;
  }
  /// Bytes of gradients (in the parameters' own type) that are reduced and updated together; a larger parameter has a bucket of
  /// its own. Default 25 MiB.
  Options& bucket_bytes(std::int64_t bytes) {
    bucket_bytes_ = bytes;
    return *this;
  }
  /// Mean (default), sum or weighted mean over ranks.
  Options& reduction(Reduction r) {
    reduction_ = r;
    return *this;
  }
  /// Divides the sum over ranks by this number instead of the world size (overrides reduction()).
  Options& divisor(double d) {
    divisor_ = d;
    return *this;
  }
  /// Stage 2: of gradients that somebody reads, as many bytes stay gathered at a time (what one operator needs may exceed it).
  /// Default 50 MiB: two buckets, enough for any loop over all gradients, once.
  Options& gathered_gradient_bytes(std::int64_t bytes) {
    gathered_gradient_bytes_ = bytes;
    return *this;
  }
  /// Stage 3: so many bytes of parameters are whole at a time. Where everything fits, a bucket is gathered once per step, otherwise
  /// once for forward and once for backward; what goes is decided by the order of the step before. What one operator needs beyond
  /// it is an error that says how much would do. Buckets that were edited between steps come on top of it, at most as
  /// much again, until the next step. Default 0: four of the largest buckets, and more where an operator needs it.
  Options& memory_budget(std::int64_t bytes) {
    memory_budget_ = bytes;
    return *this;
  }
  /// Stage 3: an operator that needs more than memory_budget gets it, with a warning, once. Default false.
  Options& exceed_budget(bool on = true) {
    exceed_budget_ = on;
    return *this;
  }
  /// Stage 3: a thread gathers buckets ahead of their use, in the order of the step before (not between nodes, and not where most of the
  /// bytes are mapped). Default true.
  Options& prefetch(bool on) {
    prefetch_ = on;
    return *this;
  }
  /// Stage 3 inside a node: a bucket of at least so many bytes per rank is read where it lies, in the ranks' shards, which each
  /// rank maps side by side; smaller ones are copied. Its shards are padded to whole pages (at all stages: it is one layout).
  /// 0: all are copied. Default 256 KiB.
  Options& mapped_shard_bytes(std::int64_t bytes) {
    mapped_shard_bytes_ = bytes;
    return *this;
  }
  /// Stage 3: at each step the ranks compare in which order they have touched buckets, and what they have written to edited parameters,
  /// and warn where that differs (the first is allowed, of the second each element is its owner's); every fault is logged to stderr
  /// with the operator and the parameters; memory that is released is filled with NaN. Default: whether ZERO_DEBUG is set, and not 0.
  Options& debug(bool on) {
    debug_ = on;
    return *this;
  }
  /// Names for errors and the agreement check. The module's buffers are broadcast once; then each rank keeps its own.
  /// The module must outlive construction (or attach()) only.
  Options& module(const torch::nn::Module& m) {
    module_ = &m;
    return *this;
  }
  /// Names in the order of all groups' parameters, for programs without an nn::Module.
  Options& names(std::vector<std::string> n) {
    names_ = std::move(n);
    return *this;
  }
  /// Everybody starts from rank 0's parameters (and buffers, with module()). Default true.
  Options& broadcast_parameters(bool on) {
    broadcast_parameters_ = on;
    return *this;
  }
  /// The wrapped class, unknown to this library, treats every element by itself: it may run on flat pieces of parameters.
  /// (Not so for LAMB, Muon or anything with a norm per tensor.)
  Options& elementwise(bool on = true) {
    elementwise_ = on;
    return *this;
  }
  /// A step whose averaged gradient holds an inf or NaN is skipped on all ranks, and last_step() names the first parameter.
  /// Default false: such a step does what torch::optim does.
  Options& skip_nonfinite(bool on) {
    skip_nonfinite_ = on;
    return *this;
  }
  /// Every step clips by the global 2-norm, as clip_grad_norm_(optimizer, max_norm) before it, and without the host's waiting for the
  /// norm on a GPU. p.grad() is left as it is. Not above 0 (default): no clipping. The norm: StepReport::grad_norm.
  Options& max_grad_norm(double max_norm) {
    max_grad_norm_ = max_norm;
    return *this;
  }
  /// Each step computes the norm of the averaged gradient for last_step(). Default false (clipping computes it anyway).
  Options& record_grad_norm(bool on) {
    record_grad_norm_ = on;
    return *this;
  }
  /// Threads of the fused update; 0 (default): as many as LibTorch's at::get_num_threads().
  Options& update_threads(int n) {
    update_threads_ = n;
    return *this;
  }

  const Communicator& comm() const { return comm_; }
  Stage stage() const { return stage_; }
  std::int64_t bucket_bytes() const { return bucket_bytes_; }
  Reduction reduction() const { return reduction_; }
  double divisor() const { return divisor_; }
  std::optional<bool> master_weights() const { return master_weights_; }
  bool force_masters_off() const { return force_masters_off_; }
  std::optional<at::ScalarType> reduce_dtype() const { return reduce_dtype_; }
  at::ScalarType state_dtype() const { return state_dtype_; }
  std::int64_t gathered_gradient_bytes() const { return gathered_gradient_bytes_; }
  std::int64_t memory_budget() const { return memory_budget_; }
  bool exceed_budget() const { return exceed_budget_; }
  bool prefetch() const { return prefetch_; }
  std::int64_t mapped_shard_bytes() const { return mapped_shard_bytes_; }
  bool debug() const { return debug_.value_or(debug_from_environment()); }
  const torch::nn::Module* module() const { return module_; }
  const std::vector<std::string>& names() const { return names_; }
  bool broadcast_parameters() const { return broadcast_parameters_; }
  bool elementwise() const { return elementwise_; }
  bool skip_nonfinite() const { return skip_nonfinite_; }
  double max_grad_norm() const { return max_grad_norm_; }
  bool record_grad_norm() const { return record_grad_norm_; }
  int update_threads() const { return update_threads_; }

 private:
  static bool debug_from_environment();
  Communicator comm_;
  Stage stage_ = Stage::kOptimizerState;
  std::int64_t bucket_bytes_ = std::int64_t{25} << 20;
  Reduction reduction_ = Reduction::kMean;
  double divisor_ = 0;
  std::optional<bool> master_weights_;
  bool force_masters_off_ = false;
  std::optional<at::ScalarType> reduce_dtype_;
  at::ScalarType state_dtype_ = at::kFloat;
  std::int64_t gathered_gradient_bytes_ = std::int64_t{50} << 20;
  std::int64_t memory_budget_ = 0;
  bool exceed_budget_ = false;
  bool prefetch_ = true;
  std::int64_t mapped_shard_bytes_ = std::int64_t{256} << 10;
  std::optional<bool> debug_;
  const torch::nn::Module* module_ = nullptr;
  std::vector<std::string> names_;
  bool broadcast_parameters_ = true;
  bool elementwise_ = false;
  bool skip_nonfinite_ = false;
  double max_grad_norm_ = 0;
  bool record_grad_norm_ = false;
  int update_threads_ = 0;
};

}  // namespace zero
