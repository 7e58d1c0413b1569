// The optimizer step on the pieces of parameters that this rank updates: our fused pass for Adam, AdamW and SGD on float and
// double, the wrapped optimizer's own step() for everything else. Both keep LibTorch's own state objects, per parameter.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <cstdint>
#include <memory>
#include <unordered_map>
#include <vector>

#include "core/parameter.h"
#include "core/wrapped.h"
#include "layout/layout.h"

namespace zero {

using StateMap = ska::flat_hash_map<void*, std::unique_ptr<torch::optim::OptimizerParamState>>;
using Groups = std::vector<torch::optim::OptimizerParamGroup>;

/// One contiguous run of one parameter, with the averaged gradient of the same run.
struct Piece {
  int parameter = 0;
  int space = 0, bucket = 0;
  std::int64_t in_parameter = 0;  ///< first element
  std::int64_t in_held = 0;       ///< the same, from the start of what this rank updates of the bucket
  std::int64_t held = 0;          ///< elements of the bucket that this rank updates (state is allocated for them together)
  std::int64_t numel = 0;
  void* param = nullptr;
  void* grad = nullptr;  ///< may be this rank's own gradient memory: read only
};

class Updater {
 public:
  virtual ~Updater() = default;
  /// Updates the pieces' parameters with gradient × factor under the groups' present options.
  virtual void update(const std::vector<Piece>& pieces, const Groups& groups, StateMap& state, double factor, int threads) = 0;
  /// Must step once with all pieces (true), or may be called bucket by bucket (false).
  virtual bool wants_everything() const = 0;
};

/// True for the classes and types that the fused pass knows.
bool fused_knows(WrappedClass kind, at::ScalarType dtype);

std::unique_ptr<Updater> make_fused_updater(WrappedClass kind, const std::vector<Parameter>& parameters);

/// @param inner the wrapped optimizer; outlives the updater. Its groups are set to flat pieces during update().
std::unique_ptr<Updater> make_elementwise_updater(WrappedClass kind, torch::optim::Optimizer& inner,
                                                  const std::vector<Parameter>& parameters);

/// A tensor over a piece of state or parameter: in the parameter's own shape if the piece is all of it, else 1-D.
at::Tensor piece_tensor(const Piece& piece, const Parameter& parameter, void* memory, std::shared_ptr<void> keep_alive,
                        at::ScalarType dtype);

/// Cuts a state of the whole parameter down to a piece: each tensor becomes a copy of the piece's run.
void cut_state(WrappedClass kind, torch::optim::OptimizerParamState& state, const Parameter& parameter,
               std::int64_t in_parameter, std::int64_t numel);

}  // namespace zero
