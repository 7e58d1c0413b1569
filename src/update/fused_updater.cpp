// The fused pass: one run over parameter, gradient and state per stretch of memory whose parameters have the same step count.
#include <ATen/ops/zeros.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include <map>

#include "core/check.h"
#include "kernels/kernels.h"
#include "update/updater.h"

namespace zero {
namespace {

using kernels::DType;
using kernels::Span;

// State tensors of all pieces of a bucket lie in one allocation each, in the order of the shard, so that one pass can run over many
// small parameters.
class FlatState {
 public:
  /// The memory of `kind` (exp_avg, …) for the piece; existing values of `tensor` move there.
  void place(int kind, const Piece& piece, const Parameter& parameter, at::Tensor& tensor) {
    auto& flat = flat_[{piece.space, piece.bucket, kind}];
    const auto dtype = parameter.tensor.scalar_type();
    if (!flat.defined()) flat = at::zeros({piece.held}, at::TensorOptions().dtype(dtype));
    char* memory = static_cast<char*>(flat.data_ptr()) + piece.in_held * flat.element_size();
    if (tensor.defined() && tensor.data_ptr() == memory) return;
    auto placed = piece_tensor(piece, parameter, memory, std::make_shared<at::Tensor>(flat), dtype);
    if (tensor.defined())
      placed.copy_(tensor.reshape(placed.sizes()));
    else
      placed.zero_();  // may be memory of a state that was dropped
    tensor = std::move(placed);
  }

 private:
  std::map<std::tuple<int, int, int>, at::Tensor> flat_;
};

Span span(void* memory, DType dtype) { return {memory, dtype}; }

void* memory_of(const at::Tensor& t) { return t.defined() ? t.data_ptr() : nullptr; }

bool follows(const void* first, std::int64_t bytes, const void* next) {
  return first == nullptr ? next == nullptr : static_cast<const char*>(first) + bytes == next;
}

class FusedUpdater : public Updater {
 public:
  FusedUpdater(WrappedClass kind, const std::vector<Parameter>& parameters) : kind_(kind), parameters_(parameters) {}
  bool wants_everything() const override { return false; }

  void update(const std::vector<Piece>& pieces, const Groups& groups, StateMap& state, double factor, int threads) override {
    Run run;
    for (const auto& piece : pieces) {
      const auto& parameter = parameters_[piece.parameter];
      Run next = describe(piece, parameter, groups[parameter.group].options(), state);
      if (run.numel > 0 && run.joins(next)) {
        run.numel += next.numel;
        continue;
      }
      execute(run, factor, threads);
      run = next;
    }
    execute(run, factor, threads);
  }

 private:
  // A stretch of memory that one kernel call updates.
  struct Run {
    std::int64_t numel = 0;
    DType dtype = DType::f32;
    void *param = nullptr, *grad = nullptr, *first = nullptr, *second = nullptr, *third = nullptr;
    std::int64_t step = 0;  // Adam: the number of this step
    bool starts = false;    // SGD: the momentum buffer starts now
    const torch::optim::OptimizerOptions* options = nullptr;

    bool joins(const Run& next) const {
      const std::int64_t bytes = numel * kernels::size_of(dtype);
      return options == next.options && step == next.step && starts == next.starts && dtype == next.dtype &&
             follows(param, bytes, next.param) && follows(grad, bytes, next.grad) && follows(first, bytes, next.first) &&
             follows(second, bytes, next.second) && follows(third, bytes, next.third);
    }
  };

  template <typename State, typename Options>
  void describe_adam(Run& run, const Piece& piece, const Parameter& parameter, const Options& options, StateMap& states) {
    auto& entry = states[parameter.tensor.unsafeGetTensorImpl()];
    const bool is_new = entry == nullptr;
    if (is_new) entry = std::make_unique<State>();
    auto& s = static_cast<State&>(*entry);
    flat_.place(0, piece, parameter, s.exp_avg());
    flat_.place(1, piece, parameter, s.exp_avg_sq());
    if (options.amsgrad()) flat_.place(2, piece, parameter, s.max_exp_avg_sq());
    s.step(s.step() + 1);
    run.step = s.step();
    run.first = memory_of(s.exp_avg());
    run.second = memory_of(s.exp_avg_sq());
    run.third = options.amsgrad() ? memory_of(s.max_exp_avg_sq()) : nullptr;
  }

  Run describe(const Piece& piece, const Parameter& parameter, const torch::optim::OptimizerOptions& options,
               StateMap& states) {
    Run run;
    run.numel = piece.numel;
    run.dtype = parameter.tensor.scalar_type() == at::kDouble ? DType::f64 : DType::f32;
    run.param = piece.param;
    run.grad = piece.grad;
    run.options = &options;
    switch (kind_) {
      case WrappedClass::kAdam:
        describe_adam<torch::optim::AdamParamState>(run, piece, parameter,
                                                    static_cast<const torch::optim::AdamOptions&>(options), states);
        break;
      case WrappedClass::kAdamW:
        describe_adam<torch::optim::AdamWParamState>(run, piece, parameter,
                                                     static_cast<const torch::optim::AdamWOptions&>(options), states);
        break;
      case WrappedClass::kSGD: {
        if (static_cast<const torch::optim::SGDOptions&>(options).momentum() == 0) break;
        auto& entry = states[parameter.tensor.unsafeGetTensorImpl()];
        run.starts = entry == nullptr;
        if (run.starts) entry = std::make_unique<torch::optim::SGDParamState>();
        auto& s = static_cast<torch::optim::SGDParamState&>(*entry);
        flat_.place(0, piece, parameter, s.momentum_buffer());
        run.first = memory_of(s.momentum_buffer());
        break;
      }
      default:
        ZERO_FAIL("the fused update doesn't know this class");
    }
    return run;
  }

  void execute(const Run& run, double factor, int threads) {
    if (run.numel == 0) return;
    switch (kind_) {
      case WrappedClass::kAdam:
        adam(run, static_cast<const torch::optim::AdamOptions&>(*run.options), false, factor, threads);
        break;
      case WrappedClass::kAdamW:
        adam(run, static_cast<const torch::optim::AdamWOptions&>(*run.options), true, factor, threads);
        break;
      default: {
        const auto& o = static_cast<const torch::optim::SGDOptions&>(*run.options);
        kernels::SgdArgs args;
        args.lr = o.lr(), args.momentum = o.momentum(), args.dampening = o.dampening(), args.weight_decay = o.weight_decay();
        args.nesterov = o.nesterov(), args.first = run.starts, args.grad_scale = factor;
        kernels::sgd({span(run.param, run.dtype), span(run.grad, run.dtype), span(run.first, run.dtype)}, run.numel, args,
                     threads);
      }
    }
  }

  template <typename Options>
  static void adam(const Run& run, const Options& o, bool decoupled, double factor, int threads) {
    kernels::AdamArgs args;
    args.lr = o.lr(), args.beta1 = std::get<0>(o.betas()), args.beta2 = std::get<1>(o.betas());
    args.eps = o.eps(), args.weight_decay = o.weight_decay(), args.decoupled = decoupled;
    args.step = run.step, args.grad_scale = factor;
    kernels::adam({span(run.param, run.dtype), span(run.grad, run.dtype), span(run.first, run.dtype),
                   span(run.second, run.dtype), span(run.third, run.dtype)},
                  run.numel, args, threads);
  }

  WrappedClass kind_;
  const std::vector<Parameter>& parameters_;
  FlatState flat_;
};

}  // namespace

bool fused_knows(WrappedClass kind, at::ScalarType dtype) {
  return (kind == WrappedClass::kAdam || kind == WrappedClass::kAdamW || kind == WrappedClass::kSGD) &&
         (dtype == at::kFloat || dtype == at::kDouble);
}

std::unique_ptr<Updater> make_fused_updater(WrappedClass kind, const std::vector<Parameter>& parameters) {
  return std::make_unique<FusedUpdater>(kind, parameters);
}

}  // namespace zero
