// The parts of a ZeroOptimizer and the order in which they act. One file per concern: setup.cpp (who takes part, layout,
// agreement), step.cpp (one step), archive.cpp (save and load), memory.cpp (what is kept), optimizer.cpp (the public face).
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "core/parameter.h"
#include "core/wrapped.h"
#include "layout/layout.h"
#include "reduce/gradients.h"
#include "reduce/reducer.h"
#include "residency/resident_parameters.h"
#include "update/updater.h"
#include "zero/optimizer.h"

namespace zero {

struct ZeroOptimizer::Impl {
  Impl(std::unique_ptr<torch::optim::Optimizer> inner, const Options& options);

  // --- setup.cpp
  /// Collective. First or renewed: lists the parameters of `groups`, checks that ranks agree, and makes everything that depends on it.
  void set_up(const Groups& groups, StateMap& state, const std::vector<char>& with_gradient);
  /// What of `groups` is not as it was set up, on this rank: nothing, something that set_up() can follow, or (thrown) an error.
  bool needs_set_up(const Groups& groups) const;

  /// Takes what the wrapped object's state has for our parameters, and keeps this rank's part.
  void take_state(StateMap& state);

  // --- step.cpp
  void step(Groups& groups, StateMap& state);
  double norm(Groups& groups, StateMap& state);
  double clip(double max_norm, Groups& groups, StateMap& state);

  // --- memory.cpp
  Memory memory(const StateMap& state) const;
  Memory plan(const Groups& groups, Stage stage, int world_size) const;

  bool attached() const { return comm.defined(); }
  /// Does every rank update everything (stage 0, or a world of one)?
  bool replicated() const { return options.stage() == Stage::kReplicated || comm.size() == 1; }
  double divisor() const;
  /// What a rank updates of a bucket, and the elements that makes.
  std::vector<Segment> held(int space, int bucket) const;
  /// The run of a parameter's elements whose state this rank keeps; numel 0 if none.
  Segment held_of(int parameter) const;

  const Options options;  ///< its module() is not looked at after construction
  Communicator comm;
  std::unique_ptr<torch::optim::Optimizer> inner;  ///< the user's object: its class, and its state until set_up() takes it
  WrappedClass kind;
  std::string wrapped_name;
  std::unordered_map<const void*, std::string> names;  ///< by TensorImpl, from Options::module
  std::vector<at::Tensor> module_buffers;

  std::vector<Parameter> parameters;  ///< indices never change
  std::unique_ptr<Layout> layout;     ///< null: not attached yet
  std::shared_ptr<Gradients> gradients;
  std::unique_ptr<Reducer> reducer;
  std::unique_ptr<ResidentParameters> residents;
  std::unique_ptr<Updater> fused, elementwise;

  StepReport report;   ///< of the last step
  StepReport pending;  ///< of the step that is being made: what clip_grad_norm_ has done already
  double clip_factor = 1;
  double kept_norm = 0;  ///< of the kept averages, before clip_factor
  int kept_nonfinite = -1;

 private:
  // --- setup.cpp
  Facts facts(const Groups& groups) const;
  void follow(const Groups& groups);
  void place(const std::vector<char>& with_gradient);
  /// Rank 0's values of the parameters from `first_parameter` on, through an arena of the spaces from `first_space` on.
  void broadcast(std::size_t first_parameter, std::size_t first_space);
  bool was_set_up = false;  ///< once; after a conversion that ranks disagree on, there is no layout but this stays

  // --- step.cpp
  void enter(const char* call, Groups& groups, StateMap& state);
  void reduce_for_norm();
  bool bucket_present(int space, int bucket) const;
  std::vector<Piece> pieces(int space, int bucket, const at::Tensor& average) const;
  void update_bucketwise(const Groups& groups, StateMap& state);
  void update_at_once(const Groups& groups, StateMap& state);
  void finish_bucket(int space, int bucket);
  int threads() const;
  bool uses_fused(int space) const;

  std::vector<char> present;  ///< per parameter: some rank has a gradient, in the call that is being made
};

/// src/optimizer/module_names.cpp: the one translation unit that needs torch/nn/module.h.
void read_module(const torch::nn::Module& module, std::unordered_map<const void*, std::string>& names,
                 std::vector<at::Tensor>& buffers);

}  // namespace zero
