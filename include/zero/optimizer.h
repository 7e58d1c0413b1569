// ZeroOptimizer: a torch::optim::Optimizer whose work and state are partitioned over data-parallel ranks.
//
//   auto opt = zero::wrap<torch::optim::AdamW>(model->parameters(), torch::optim::AdamWOptions(3e-4),
//                                              zero::Options(zero::make_communicator()));
//
// The training loop stays as it is: backward, clip, step, zero_grad.
#pragma once

#include <torch/optim/optimizer.h>

#include <functional>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "zero/export.h"
#include "zero/options.h"
#include "zero/report.h"

namespace zero {

/// What this rank updates of one parameter.
struct ZERO_API LocalShard {
  std::string name;        ///< the parameter's, as in errors
  at::Tensor parameter;    ///< the user's own
  int group = 0;           ///< of options
  std::int64_t begin = 0;  ///< the first of its elements here, in the order in which they lie in memory
  at::Tensor values;       ///< 1-D, over the memory where this rank keeps them
  at::Tensor master;  ///< the float32 values that `values` are the roundings of (to read), from the first step on; or undefined
};

/// Partitions a torch::optim optimizer over the ranks of a communicator.
///
/// Every stage sends 2Ψ(N−1)/N elements per rank and step for Ψ (padded) parameters: gradients are reduce-scattered, then either
/// the averages (stage 0) or the updated parameters (stages 1 and 2) are all-gathered. With one backward per step all give the same
/// bits; with several, stages 0 and 1 do, and stage 2, which averages each backward, agrees to rounding.
///
/// Gradients. Between backward() and step(), p.grad() is the average over ranks at every stage, for whoever looks: an operator that
/// reads it gathers its bucket (which sends Ψ(N−1)/N elements once for all gradients, and nothing if nobody looks), in-place edits
/// count, and torch::nn::utils::clip_grad_norm_ is right as it stands. Such reads are collective: every rank makes the same ones. A raw
/// pointer (data_ptr(), accessor()) is refused until reduce_gradients(). A gradient that the user assigns is this rank's own, and
/// step() averages it. The end of a backward is collective too, unless zero::NoSync defers it. With one rank and divisor 1,
/// p.grad() is an ordinary tensor.
///
/// Memory: at stages 0 and 1 gradients live in buffers that this object owns (one copy). At stage 2 each rank keeps its shard, two
/// buckets that are on their way, and while backward runs one gradient. At stages ≥ 1 a parameter that owns its whole storage is
/// moved, storage and all, into memory that peers can read: tensors that share the storage stay right, raw pointers taken before
/// the first step (or attach) don't.
///
/// Threads: construction, backward(), reads of gradients and step() are collective; call them from one thread, in the same order
/// on every rank. Another thread that uses the model meanwhile takes a zero::ReadGuard.
class ZERO_API ZeroOptimizer : public torch::optim::Optimizer {
 public:
  /// Use zero::wrap. Takes over `inner`: its class, groups, options and state.
  /// Collective if options.comm() is defined. @throws c10::Error on every rank if ranks or arguments don't fit.
  ZeroOptimizer(std::unique_ptr<torch::optim::Optimizer> inner, const Options& options);
  ~ZeroOptimizer() override;  ///< never communicates; parameters, and gradients that are there, stay usable
  ZeroOptimizer(ZeroOptimizer&&) noexcept;
  ZeroOptimizer& operator=(ZeroOptimizer&&) noexcept;

  /// Collective. Gives an optimizer that was built without a communicator its ranks: checks that they agree, and broadcasts
  /// parameters as Options say.
  void attach(const Communicator& comm);

  /// Collective. One optimizer step on the average of the ranks' gradients. With a closure: evaluates it once, gradients enabled,
  /// first; returns its (local) loss.
  torch::Tensor step(LossClosure closure = nullptr) override;

  /// Collective. 2-norm over all parameters of the average of the ranks' gradients; the same on every rank.
  double grad_norm();

  /// Collective. Every p.grad() holds the average from now until the end of the step, as an ordinary tensor: for raw pointers and
  /// custom kernels. What they write counts (the same on every rank). Costs Ψ elements at stage 2, nothing at stages 0 and 1.
  void reduce_gradients();

  /// With Reduction::kWeighted: this rank's backwards since the last step sum over so many more samples (or tokens, or any weight).
  /// Call it before backward() or before step(); does not communicate.
  void add_weight(double weight);

  /// What this rank updates: all parameters at stage 0, its slices at the others. For elementwise work that needs no whole
  /// parameters (a moving average, statistics); nothing is sent. Valid until parameters are added, converted or unsharded. To be read
  /// between steps; edit_local_shards() is for writing.
  std::vector<LocalShard> local_shards() const;
  /// Collective. Calls `edit` with each of local_shards(), which may write their values; afterwards every rank sees them. Sends as much
  /// as the part of a step that follows the update. What `edit` throws on one rank is thrown on all.
  void edit_local_shards(const std::function<void(LocalShard&)>& edit);

  /// Collective. Stage 3: every parameter is whole and ordinary on every rank from now on, as without this library: for the end of
  /// training, or before the optimizer is destroyed (a destructor doesn't communicate). A later step() shards again. At other stages it
  /// does nothing. Sends Ψ(N−1)/N elements.
  void unshard();

  /// What a step sends and, at stage 3, which buckets it gathers when and what is whole at most: by formula, and from what the steps
  /// before have taught. For people; doesn't communicate.
  std::string explain() const;

  /// What the last step did. For parameters on a GPU it waits until that is over; nothing else of a step does.
  const StepReport& last_step() const;

  /// Bytes this rank keeps now, from the tensors themselves.
  Memory memory() const;
  /// The same by formula, for a model of these groups at `stage` over `world_size` ranks after the first step.
  Memory memory_plan(Stage stage, int world_size) const;
  Memory memory_plan() const;  ///< for this optimizer as it is

  /// Padded number of elements that one reduction moves (Ψ′): what the bytes-sent formula is about.
  std::int64_t padded_numel() const;

  Stage stage() const;
  const Communicator& comm() const;

  /// The wrapped class's name, e.g. "AdamW".
  const std::string& wrapped_name() const;

  /// Collective. Makes the whole state on this rank, for save(), until the next step or load. At stage 0 and in a world of one it is
  /// there anyway and nothing happens. Sends the state once more, 8Ψ(N−1)/N bytes for Adam in float32, and keeps 8Ψ bytes where
  /// `keep`: the ranks that are going to call save(). For anything large, zero::save() (zero/checkpoint.h) writes shards instead.
  void consolidate_state(bool keep = true);

  /// Archives have the wrapped class's own layout: plain torch::optim reads them. Doesn't communicate: one rank may call it alone.
  /// @throws c10::Error where this rank has only a part of the state: call consolidate_state() before, on every rank.
  void save(torch::serialize::OutputArchive& archive) const override;
  /// Reads an archive of the wrapped class, at any stage and world size; every rank reads the whole archive and keeps its part.
  void load(torch::serialize::InputArchive& archive) override;

  struct Impl;  ///< src/optimizer/impl.h
  Impl& impl() { return *impl_; }

 private:
  std::unique_ptr<Impl> impl_;
};

/// Collective. As torch::nn::utils::clip_grad_norm_ with the 2-norm over all parameters of `optimizer`, on the average of the
/// ranks' gradients. The factor min(1, max_norm / (norm + 1e-6)) takes effect inside the next step(), in the pass that
/// reads the gradients. Returns the norm before clipping, the same on every rank.
ZERO_API double clip_grad_norm_(ZeroOptimizer& optimizer, double max_norm);

/// Type-erased: for programs with an optimizer factory.
ZERO_API ZeroOptimizer wrap(std::unique_ptr<torch::optim::Optimizer> inner, const Options& options);

namespace detail {

/// Collective with the other ranks' construction: all throw `why`.
[[noreturn]] ZERO_API void refuse_together(const Options& options, const std::string& why);

template <typename T, typename... Args>
ZeroOptimizer build(const Options& options, Args&&... args) {
  std::unique_ptr<torch::optim::Optimizer> inner;
  try {
    inner = std::make_unique<T>(std::forward<Args>(args)...);
  } catch (const c10::Error& e) {  // LibTorch refused on this rank; nobody else may wait for it
    refuse_together(options, e.what_without_backtrace());
  }
  return wrap(std::move(inner), options);
}

}  // namespace detail

/// Builds a `T` from its own arguments and wraps it: parameters or groups, then T's options or a learning rate, then ours.
/// Without ours: a world of one, or all ranks of the MPI job (make_communicator()), at stage 1.
template <typename T, typename Params, typename TOptions,
          typename = std::enable_if_t<!std::is_convertible_v<std::decay_t<TOptions>, Options>>>
ZeroOptimizer wrap(Params&& params, TOptions&& torch_options, const Options& options = Options(make_communicator())) {
  return detail::build<T>(options, std::forward<Params>(params), std::forward<TOptions>(torch_options));
}
template <typename T, typename Params>
ZeroOptimizer wrap(Params&& params, const Options& options = Options(make_communicator())) {
  return detail::build<T>(options, std::forward<Params>(params));
}
/// A braced list of tensors: wrap<torch::optim::SGD>({w, b}, 0.1, options).
template <typename T, typename TOptions>
ZeroOptimizer wrap(std::initializer_list<at::Tensor> params, TOptions&& torch_options,
                   const Options& options = Options(make_communicator())) {
  return detail::build<T>(options, std::vector<at::Tensor>(params), std::forward<TOptions>(torch_options));
}

}  // namespace zero
