// The fused pass: one run over parameter, gradient and state per stretch of memory whose parameters have the same step count.
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include <optional>

#include "core/check.h"
#include "kernels/kernels.h"
#include "update/device_pass.h"
#include "update/updater.h"

namespace zero {
namespace {

using kernels::DType;
using kernels::Span;

DType kernel_type(at::ScalarType type) {
  switch (type) {
    case at::kDouble:
      return DType::f64;
    case at::kHalf:
      return DType::f16;
    case at::kBFloat16:
      return DType::bf16;
    default:
      return DType::f32;
  }
}

class FusedUpdater : public Updater {
 public:
  explicit FusedUpdater(const UpdateContext& context) : context_(context) {
    if (!context.device.is_cpu()) device_.emplace(context.device, make_cuda_launcher(context.device));
  }
  bool wants_everything() const override { return false; }

  void update(const std::vector<Piece>& pieces, const Groups& groups, StateMap& state, double factor, int threads) override {
    Run run;
    for (const auto& piece : pieces) {
      const auto& parameter = context_.parameters[piece.parameter];
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
    Span param, grad, first, second, third, master;
    std::int64_t step = 0;  // Adam: the number of this step
    bool starts = false;    // SGD: the momentum buffer starts now
    const torch::optim::OptimizerOptions* options = nullptr;

    bool follows(Span mine, Span next) const {
      if (mine.data == nullptr || mine.dtype != next.dtype) return mine.data == next.data;
      return static_cast<const char*>(mine.data) + numel * kernels::size_of(mine.dtype) == next.data;
    }
    bool joins(const Run& next) const {
      return options == next.options && step == next.step && starts == next.starts && follows(param, next.param) &&
             follows(grad, next.grad) && follows(first, next.first) && follows(second, next.second) &&
             follows(third, next.third) && follows(master, next.master);
    }
  };

  Span placed(int kind, const Piece& piece, const Parameter& parameter, at::Tensor& tensor) {
    const auto type = context_.precision.state(parameter.tensor.scalar_type());
    flat_.place(kind, piece, parameter, tensor, type);
    return {tensor.data_ptr(), kernel_type(type)};
  }

  template <typename State, typename Options>
  void describe_adam(Run& run, const Piece& piece, const Parameter& parameter, const Options& options, StateMap& states) {
    auto& entry = states[parameter.tensor.unsafeGetTensorImpl()];
    const bool is_new = entry == nullptr;
    if (is_new) entry = std::make_unique<State>();
    auto& s = static_cast<State&>(*entry);
    run.first = placed(0, piece, parameter, s.exp_avg());
    run.second = placed(1, piece, parameter, s.exp_avg_sq());
    if (options.amsgrad()) run.third = placed(2, piece, parameter, s.max_exp_avg_sq());
    s.step(s.step() + 1);
    run.step = s.step();
  }

  Run describe(const Piece& piece, const Parameter& parameter, const torch::optim::OptimizerOptions& options,
               StateMap& states) {
    Run run;
    run.numel = piece.numel;
    const auto type = parameter.tensor.scalar_type();
    run.param = {piece.param, kernel_type(type)};
    run.grad = {piece.grad, kernel_type(piece.grad_type)};
    if (context_.precision.has_master(type)) run.master = {context_.masters.of(piece, parameter).data_ptr(), DType::f32};
    run.options = &options;
    switch (context_.kind) {
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
        run.first = placed(0, piece, parameter, s.momentum_buffer());
        break;
      }
      default:
        ZERO_FAIL("the fused update doesn't know this class");
    }
    return run;
  }

  void execute(const Run& run, double factor, int threads) {
    if (run.numel == 0) return;
    switch (context_.kind) {
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
        const kernels::SgdSpans spans{run.param, run.grad, run.first, run.master};
        device_ ? device_->sgd(spans, run.numel, args) : kernels::sgd(spans, run.numel, args, threads);
      }
    }
  }

  template <typename Options>
  void adam(const Run& run, const Options& o, bool decoupled, double factor, int threads) {
    kernels::AdamArgs args;
    args.lr = o.lr(), args.beta1 = std::get<0>(o.betas()), args.beta2 = std::get<1>(o.betas());
    args.eps = o.eps(), args.weight_decay = o.weight_decay(), args.decoupled = decoupled;
    args.step = run.step, args.grad_scale = factor;
    const kernels::AdamSpans spans{run.param, run.grad, run.first, run.second, run.third, run.master};
    device_ ? device_->adam(spans, run.numel, args) : kernels::adam(spans, run.numel, args, threads);
  }

  UpdateContext context_;
  FlatState flat_;
  std::optional<DevicePass> device_;  ///< where parameters are on a GPU
};

}  // namespace

bool fused_knows(WrappedClass kind, at::ScalarType dtype) {
  return (kind == WrappedClass::kAdam || kind == WrappedClass::kAdamW || kind == WrappedClass::kSGD) &&
         (dtype == at::kFloat || dtype == at::kDouble || is_16_bit(dtype));
}

std::unique_ptr<Updater> make_fused_updater(const UpdateContext& context) { return std::make_unique<FusedUpdater>(context); }

}  // namespace zero
