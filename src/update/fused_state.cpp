#include "update/fused_state.h"

#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include "core/check.h"

namespace zero {

using kernels::Span;
using torch::optim::AdamOptions;
using torch::optim::AdamParamState;
using torch::optim::AdamWOptions;
using torch::optim::AdamWParamState;
using torch::optim::OptimizerOptions;
using torch::optim::OptimizerParamState;
using torch::optim::SGDOptions;
using torch::optim::SGDParamState;

Span FusedState::placed(int kind, const Piece& piece, const Parameter& parameter, at::Tensor& tensor) {
  const auto type = context_.precision.state(parameter.tensor.scalar_type());
  flat_.place(kind, piece, parameter, tensor, type);
  return {tensor.data_ptr(), kernel_type(type)};
}

template <typename State, typename Options>
void FusedState::place_adam(FusedPiece& out, const Piece& piece, const Parameter& parameter, const Options& options) {
  auto& s = static_cast<State&>(*out.state);
  out.first = placed(0, piece, parameter, s.exp_avg());
  out.second = placed(1, piece, parameter, s.exp_avg_sq());
  if (options.amsgrad()) out.third = placed(2, piece, parameter, s.max_exp_avg_sq());
}

FusedPiece FusedState::of(const Piece& piece, const OptimizerOptions& options, StateMap& states) {
  const auto& parameter = context_.parameters[piece.parameter];
  const auto type = parameter.tensor.scalar_type();
  FusedPiece out;
  out.numel = piece.numel;
  out.param = {piece.param, kernel_type(type)};
  out.grad = {piece.grad, kernel_type(piece.grad_type)};
  if (context_.precision.has_master(type)) {
    out.new_master = context_.masters.find(piece.parameter) == nullptr;
    out.master = {context_.masters.of(piece, parameter).data_ptr(), kernels::DType::f32};
  }

  const auto entry = [&](const auto& fresh) {
    auto& kept = states[parameter.tensor.unsafeGetTensorImpl()];
    out.is_new = kept == nullptr;
    if (out.is_new) kept = std::make_unique<std::decay_t<decltype(fresh)>>();
    out.state = kept.get();
  };
  switch (context_.kind) {
    case WrappedClass::kAdam:
      entry(AdamParamState());
      place_adam<AdamParamState>(out, piece, parameter, static_cast<const AdamOptions&>(options));
      break;
    case WrappedClass::kAdamW:
      entry(AdamWParamState());
      place_adam<AdamWParamState>(out, piece, parameter, static_cast<const AdamWOptions&>(options));
      break;
    case WrappedClass::kSGD:
      if (static_cast<const SGDOptions&>(options).momentum() == 0) break;
      entry(SGDParamState());
      out.first = placed(0, piece, parameter, static_cast<SGDParamState&>(*out.state).momentum_buffer());
      break;
    default:
      ZERO_FAIL("the fused update doesn't know this class");
  }
  return out;
}

std::int64_t steps_made(WrappedClass kind, const OptimizerParamState& state) {
  return kind == WrappedClass::kAdam ? static_cast<const AdamParamState&>(state).step()
                                     : static_cast<const AdamWParamState&>(state).step();
}

void set_steps_made(WrappedClass kind, OptimizerParamState& state, std::int64_t steps) {
  if (kind == WrappedClass::kAdam)
    static_cast<AdamParamState&>(state).step(steps);
  else
    static_cast<AdamWParamState&>(state).step(steps);
}

namespace {

template <typename Options>
kernels::AdamArgs args_of(const Options& o, bool decoupled) {
  kernels::AdamArgs args;
  args.lr = o.lr(), args.beta1 = std::get<0>(o.betas()), args.beta2 = std::get<1>(o.betas());
  args.eps = o.eps(), args.weight_decay = o.weight_decay(), args.decoupled = decoupled;
  return args;
}

}  // namespace

kernels::AdamArgs adam_args(WrappedClass kind, const OptimizerOptions& options) {
  return kind == WrappedClass::kAdam ? args_of(static_cast<const AdamOptions&>(options), false)
                                     : args_of(static_cast<const AdamWOptions&>(options), true);
}

bool amsgrad(WrappedClass kind, const OptimizerOptions& options) {
  return kind == WrappedClass::kAdam ? static_cast<const AdamOptions&>(options).amsgrad()
                                     : static_cast<const AdamWOptions&>(options).amsgrad();
}

kernels::SgdArgs sgd_args(const OptimizerOptions& options) {
  const auto& o = static_cast<const SGDOptions&>(options);
  kernels::SgdArgs args;
  args.lr = o.lr(), args.momentum = o.momentum(), args.dampening = o.dampening(), args.weight_decay = o.weight_decay();
  args.nesterov = o.nesterov();
  return args;
}

bool fused_knows(WrappedClass kind, at::ScalarType dtype) {
  return (is_adam(kind) || kind == WrappedClass::kSGD) && (dtype == at::kFloat || dtype == at::kDouble || is_16_bit(dtype));
}

kernels::DType kernel_type(at::ScalarType type) {
  switch (type) {
    case at::kDouble:
      return kernels::DType::f64;
    case at::kHalf:
      return kernels::DType::f16;
    case at::kBFloat16:
      return kernels::DType::bf16;
    default:
      return kernels::DType::f32;
  }
}

}  // namespace zero
