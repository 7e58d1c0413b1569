// The state of a parameter taken apart by name, and put together again: how it is stored and moved without its class.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <torch/optim/optimizer.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "core/parameter.h"
#include "core/wrapped.h"
#include "update/updater.h"

namespace zero {

struct StateFields {
  /// A number for each element of the parameter, or of the piece that this rank has of it.
  std::vector<std::pair<std::string, at::Tensor>> tensors;
  /// Once per parameter: integers, floats, bools, strings, small tensors.
  std::vector<std::pair<std::string, c10::IValue>> values;
};

/// The tensors are the state's own, not copies, for LibTorch's classes. A user's class is asked to serialize().
/// @param numel elements of the piece
/// @throws c10::Error if the class has no serialisation
StateFields take_apart(WrappedClass kind, const torch::optim::OptimizerParamState& state, std::int64_t numel);

/// The reverse. A user's class reads an archive of this one parameter with its own load().
/// @param inner the wrapped optimizer, which is lent the groups meanwhile
std::unique_ptr<torch::optim::OptimizerParamState> put_together(WrappedClass kind, const StateFields& fields,
                                                                torch::optim::Optimizer& inner, const Groups& groups,
                                                                const Parameter& parameter);

/// The options of all groups, and whatever else the class saves of itself apart from states, as an archive of its own.
std::string archive_of_options(torch::optim::Optimizer& inner, const Groups& groups);
void options_from_archive(torch::optim::Optimizer& inner, Groups& groups, const std::string& archive);

}  // namespace zero
