// What the library knows about the optimizer class that it wraps: LibTorch's own by name, any other by the user's word.
#pragma once

#include <torch/optim/optimizer.h>

#include <functional>
#include <memory>
#include <string>

#include "core/agreement.h"

namespace zero {

enum class WrappedClass { kAdam, kAdamW, kSGD, kRMSprop, kAdagrad, kOther };

/// The exact dynamic type; a class derived from one of LibTorch's is kOther, since its step() may be its own.
WrappedClass classify(const torch::optim::Optimizer& optimizer);

/// "AdamW", or a user's class as the compiler spells it.
std::string class_name(const torch::optim::Optimizer& optimizer);

/// @throws c10::Error if the class can't run on pieces of parameters: LBFGS, or unknown without the user's word.
void check_wrappable(const torch::optim::Optimizer& optimizer, bool elementwise);

/// Option names and values, at full precision; for an unknown class, the learning rate if it has one.
Facts describe_options(WrappedClass kind, const torch::optim::OptimizerOptions& options, const std::string& group);

/// Calls f(tensor&) on every defined state tensor that has a number per element of the parameter (exp_avg, momentum_buffer, …).
/// Nothing for kOther.
void for_each_state_tensor(WrappedClass kind, torch::optim::OptimizerParamState& state,
                           const std::function<void(at::Tensor&)>& f);

/// How many such tensors a parameter has under these options. A user's own class is not known: 0.
int state_tensors_per_element(WrappedClass kind, const torch::optim::OptimizerOptions& options);

/// Has the state been made by the class's constructor, and no step yet?
bool is_initial(WrappedClass kind, torch::optim::OptimizerParamState& state);

/// The state that a class makes in its constructor rather than in its first step (Adagrad's accumulator), else null.
std::unique_ptr<torch::optim::OptimizerParamState> initial_state(WrappedClass kind,
                                                                 const torch::optim::OptimizerOptions& options,
                                                                 const at::Tensor& parameter);

}  // namespace zero
