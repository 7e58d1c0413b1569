// The optimizer step on the pieces of parameters that this rank updates: our fused pass for Adam, AdamW and SGD, the wrapped
// optimizer's own step() for everything else. Both keep LibTorch's own state objects, per parameter.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <cstdint>
#include <memory>
#include <unordered_map>
#include <vector>

#include "core/parameter.h"
#include "core/wrapped.h"
#include "precision/precision.h"
#include "update/master_weights.h"
#include "update/piece.h"

namespace zero {

using StateMap = ska::flat_hash_map<void*, std::unique_ptr<torch::optim::OptimizerParamState>>;
using Groups = std::vector<torch::optim::OptimizerParamGroup>;

class DeviceStep;

class Updater {
 public:
  virtual ~Updater() = default;
  /// Updates the pieces' parameters with gradient × factor under the groups' present options.
  virtual void update(const std::vector<Piece>& pieces, const Groups& groups, StateMap& state, double factor, int threads) = 0;
  /// Must step once with all pieces (true), or may be called bucket by bucket (false).
  virtual bool wants_everything() const = 0;
};

/// What updaters of one optimizer share; outlives them.
struct UpdateContext {
  WrappedClass kind;
  const std::vector<Parameter>& parameters;
  const Precision& precision;
  MasterWeights& masters;
  DeviceStep* device_step;  ///< where the scalars of a step are; null: the CPU's pass, with the host's
};

/// True for the classes and types that the fused pass knows.
bool fused_knows(WrappedClass kind, at::ScalarType dtype);

std::unique_ptr<Updater> make_fused_updater(const UpdateContext& context);
/// The same by a device's kernels, multiplied by what DeviceStep has decided: update()'s `factor` and `threads` don't count.
std::unique_ptr<Updater> make_device_updater(const UpdateContext& context);

/// @param inner the wrapped optimizer; outlives the updater. Its groups are set to flat pieces during update().
std::unique_ptr<Updater> make_elementwise_updater(const UpdateContext& context, torch::optim::Optimizer& inner);

/// Cuts a state of the whole parameter down to a piece: each tensor becomes a copy of the piece's run.
void cut_state(WrappedClass kind, torch::optim::OptimizerParamState& state, const Parameter& parameter,
               std::int64_t in_parameter, std::int64_t numel);
/// The same of one tensor with a number per element.
at::Tensor cut(const at::Tensor& whole, const Parameter& parameter, std::int64_t in_parameter, std::int64_t numel);

}  // namespace zero
