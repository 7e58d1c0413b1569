// What the fused pass works on: the memory of parameter, gradient, state and master of one piece. State that isn't there yet is made.
#pragma once

#include "kernels/kernels.h"
#include "update/flat_state.h"
#include "update/updater.h"

namespace zero {

struct FusedPiece {
  std::int64_t numel = 0;
  kernels::Span param, grad, first, second, third, master;  ///< those that aren't there have no memory
  torch::optim::OptimizerParamState* state = nullptr;       ///< LibTorch's own object; null where the class keeps none
  bool is_new = false;                                      ///< the state was made now,
  bool new_master = false;                                  ///< and the master
};

class FusedState {
 public:
  explicit FusedState(const UpdateContext& context) : context_(context) {}
  FusedPiece of(const Piece& piece, const torch::optim::OptimizerOptions& options, StateMap& states);

 private:
  kernels::Span placed(int kind, const Piece& piece, const Parameter& parameter, at::Tensor& tensor);
  template <typename State, typename Options>
  void place_adam(FusedPiece& out, const Piece& piece, const Parameter& parameter, const Options& options);

  UpdateContext context_;
  FlatState flat_;
};

/// Adam's and AdamW's count of steps.
std::int64_t steps_made(WrappedClass kind, const torch::optim::OptimizerParamState& state);
void set_steps_made(WrappedClass kind, torch::optim::OptimizerParamState& state, std::int64_t steps);

/// The name that kernels have for a real float type.
kernels::DType kernel_type(at::ScalarType type);

kernels::AdamArgs adam_args(WrappedClass kind, const torch::optim::OptimizerOptions& options);
bool amsgrad(WrappedClass kind, const torch::optim::OptimizerOptions& options);
kernels::SgdArgs sgd_args(const torch::optim::OptimizerOptions& options);
inline bool is_adam(WrappedClass kind) { return kind == WrappedClass::kAdam || kind == WrappedClass::kAdamW; }

}  // namespace zero
