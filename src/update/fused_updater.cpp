// The fused pass on the CPU: one run over parameter, gradient and state per stretch of memory whose parameters have the same step count.
#include "kernels/kernels.h"
#include "update/fused_state.h"
#include "update/updater.h"

namespace zero {
namespace {

using kernels::Span;

class FusedUpdater final : public Updater {
 public:
  explicit FusedUpdater(const UpdateContext& context) : context_(context), state_(context) {}
  bool wants_everything() const override { return false; }

  void update(const std::vector<Piece>& pieces, const Groups& groups, StateMap& states, double factor, int threads) override {
    Run run;
    for (const auto& piece : pieces) {
      const auto& options = groups[context_.parameters[piece.parameter].group].options();
      Run next{state_.of(piece, options, states), 0, &options};
      if (is_adam(context_.kind)) {
        next.step = steps_made(context_.kind, *next.spans.state) + 1;
        set_steps_made(context_.kind, *next.spans.state, next.step);
      }
      if (run.spans.numel > 0 && run.joins(next)) {
        run.spans.numel += next.spans.numel;
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
    FusedPiece spans;
    std::int64_t step = 0;  // Adam: the number of this step
    const torch::optim::OptimizerOptions* options = nullptr;

    bool follows(Span mine, Span next) const {
      if (mine.data == nullptr || mine.dtype != next.dtype) return mine.data == next.data;
      return static_cast<const char*>(mine.data) + spans.numel * kernels::size_of(mine.dtype) == next.data;
    }
    bool joins(const Run& next) const {
      const auto &a = spans, &b = next.spans;
      return options == next.options && step == next.step && a.is_new == b.is_new && follows(a.param, b.param) &&
             follows(a.grad, b.grad) && follows(a.first, b.first) && follows(a.second, b.second) && follows(a.third, b.third) &&
             follows(a.master, b.master);
    }
  };

  void execute(const Run& run, double factor, int threads) {
    const auto& s = run.spans;
    if (s.numel == 0) return;
    if (is_adam(context_.kind)) {
      auto args = adam_args(context_.kind, *run.options);
      args.step = run.step, args.grad_scale = factor;
      kernels::adam({s.param, s.grad, s.first, s.second, s.third, s.master}, s.numel, args, threads);
      return;
    }
    auto args = sgd_args(*run.options);
    args.first = s.is_new, args.grad_scale = factor;  // the momentum buffer starts
    kernels::sgd({s.param, s.grad, s.first, s.master}, s.numel, args, threads);
  }

  UpdateContext context_;
  FusedState state_;
};

}  // namespace

std::unique_ptr<Updater> make_fused_updater(const UpdateContext& context) {
  return context.device_step != nullptr ? make_device_updater(context) : std::make_unique<FusedUpdater>(context);
}

}  // namespace zero
