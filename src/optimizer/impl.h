// The parts of a ZeroOptimizer and the order in which they act. One file per concern: setup.cpp (who takes part, layout,
// agreement), step.cpp (one step), on_device.cpp (the same where a GPU decides), archive.cpp (save and load), memory.cpp (what is kept), optimizer.cpp (the public face).
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <shared_mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "core/parameter.h"
#include "core/wrapped.h"
#include "layout/layout.h"
#include "optimizer/meeting.h"
#include "precision/precision.h"
#include "reduce/gradients.h"
#include "reduce/reducer.h"
#include "residency/paged_parameters.h"
#include "residency/parameter_store.h"
#include "update/device_step.h"
#include "update/master_weights.h"
#include "update/updater.h"
#include "zero/optimizer.h"

namespace zero {

struct LossScaling;
struct Consolidated;   // src/checkpoint/consolidate.cpp
class BackgroundSave;  // src/checkpoint/background_save.h

struct ZeroOptimizer::Impl {
  Impl(std::unique_ptr<torch::optim::Optimizer> inner, const Options& options);
  ~Impl();

  // --- setup.cpp
  /// Collective. First or renewed: lists the parameters of the groups, checks that ranks agree, and makes everything that depends on it.
  void set_up(const std::vector<char>& with_gradient);
  /// Is anything of the groups not as it was set up, on this rank, so that set_up() has to follow? @throws where it can't
  bool needs_set_up() const;

  /// Takes what the wrapped object's state has for our parameters, and keeps this rank's part.
  void take_state();

  // --- archive.cpp
  void save_extras(torch::serialize::OutputArchive& archive) const;
  void load_extras(torch::serialize::InputArchive& archive);

  // --- step.cpp
  void step();
  double norm();
  double clip(double max_norm);

  // --- overflow.cpp
  void use_loss_scaling(std::shared_ptr<LossScaling> made);
  void forget_replaced_masters();

  // --- on_device.cpp
  /// Where a device has decided the last step: the host waits for it, and is told.
  void read_step();

  // --- backward.cpp
  /// Collective. Every p.grad() becomes an ordinary, resident tensor until the end of the step.
  void reduce_gradients();
  /// Collective. What backward has brought is averaged as far as the stage does that, and all ranks see the same gradients.
  void agree_on_gradients();

  // --- join.cpp
  /// Collective. Takes part in what the other ranks do, without gradients of its own, until all have joined.
  void shadow();

  // --- gather.cpp
  /// Collective. Everybody gets rank `root`'s values of whole parameters.
  void broadcast_whole(const std::vector<int>& parameters, int root);
  std::vector<LocalShard> local_shards() const;

  // --- src/checkpoint/consolidate.cpp
  /// Collective. The whole state of every parameter, kept where `keep`.
  void consolidate(bool keep);
  /// Lends the whole state to `body`: this rank's own where it has all of it. @throws where it hasn't.
  void with_whole_state(const std::function<void(StateMap& state)>& body);
  /// A parameter's master, whole; null if there is none.
  const at::Tensor* whole_master(int parameter) const;

  // --- src/checkpoint/background_save.cpp
  /// What has become of a save in the background, once: words for an error, or empty.
  std::string take_background_problem();

  // --- explain.cpp
  std::string explain() const;

  // --- memory.cpp
  Memory memory() const;
  Memory plan(Stage stage, int world_size) const;

  bool attached() const { return comm.defined(); }
  /// Does every rank update everything (stage 0, or a world of one)?
  bool replicated() const { return options.stage() == Stage::kReplicated || comm.size() == 1; }
  double divisor() const;
  bool weighted() const { return options.reduction() == Reduction::kWeighted && options.divisor() == 0; }
  /// Is the averaged gradient anything else than the local one?
  bool averages() const { return comm.size() > 1 || divisor() != 1 || weighted(); }
  /// Collective: the start of a call that needs no gradients.
  void meet_for(Call call, const std::string& problem);
  /// The same, and what has changed since the last step is followed: groups, parameters that were replaced.
  void meet_between_steps(Call call, const std::string& problem);
  /// Waits until no reader looks at parameters; readers wait meanwhile.
  std::unique_lock<std::shared_timed_mutex> lock_out_readers();
  /// What a rank updates of a bucket, and the elements that makes.
  std::vector<Segment> held(int space, int bucket) const;
  /// The run of a parameter's elements whose state this rank keeps; numel 0 if none.
  Segment held_of(int parameter) const;

  const Options options;      ///< its module() is not looked at after construction
  Groups* groups = nullptr;   ///< of the ZeroOptimizer, wherever it has moved to
  StateMap* state = nullptr;  ///< the same
  Communicator comm;
  c10::Device device{c10::kCPU};                   ///< of all parameters
  std::unique_ptr<torch::optim::Optimizer> inner;  ///< the user's object: its class, and its state until set_up() takes it
  WrappedClass kind;
  std::string wrapped_name;
  std::unordered_map<const void*, std::string> names;  ///< by TensorImpl, from Options::module
  std::vector<at::Tensor> module_buffers;

  std::vector<Parameter> parameters;        ///< indices never change
  std::unique_ptr<Layout> layout;           ///< null: not attached yet
  std::unique_ptr<Layout> gradient_layout;  ///< the same places, in the types of gradients
  Division division;                        ///< of sums over ranks
  std::unique_ptr<GradientContext> context;
  std::shared_ptr<Gradients> gradients;
  std::unique_ptr<Reducer> reducer;
  std::shared_ptr<ParameterStore> residents;
  std::shared_ptr<PagedParameters> paged;  ///< the same at stage 3, null otherwise
  const Precision precision;
  MasterWeights masters;
  std::unique_ptr<DeviceStep>
      device_step;  ///< where the scalars of a step are in a device's memory; null: parameters on the CPU
  std::unique_ptr<Updater> fused, elementwise;
  std::shared_ptr<LossScaling> scaling;        ///< null: losses aren't scaled
  std::shared_ptr<Consolidated> consolidated;  ///< null: not asked for since the last step
  std::shared_ptr<BackgroundSave> saving;      ///< the last one, until it has been asked for

  StepReport report;   ///< of the last step; see unread
  StepReport pending;  ///< of the step that is being made: what clip_grad_norm_ has done already
  double clip_factor = 1;
  int norms_on_device = 0;  ///< since the last step
  bool unread = false;      ///< the device knows more of the last step than the report says
  bool divides = false;     ///< gradients are to be divided by the loss scale, in the call that is being made
  double unscale = 1;    ///< by which gradients have to be multiplied, in the call that is being made, since losses were scaled
  double kept_norm = 0;  ///< of the kept averages, before clip_factor
  int kept_nonfinite = -1;
  double weight = 0;     ///< since the last step, see add_weight()
  int backwards = 0;     ///< since the last step
  bool joined = false;   ///< out of data, see Join
  bool joining = false;  ///< others may be
  std::shared_timed_mutex readers;

 private:
  // --- setup.cpp
  Facts facts() const;
  void start_over();
  /// Collective: is it so on any rank?
  bool anywhere(bool here) const;
  void make_parts();
  void check_not_paged() const;
  void check_device();
  void follow();
  void place(const std::vector<char>& with_gradient);
  /// Rank 0's values of the parameters from `first_parameter` on, through an arena of the spaces from `first_space` on.
  /// @param sent is called after each of them
  void broadcast(std::size_t first_parameter, std::size_t first_space, const std::function<void(int parameter)>& sent);
  bool was_set_up = false;  ///< once; after a conversion that ranks disagree on, there is no layout but this stays

  // --- meeting.cpp
  /// What this rank tells the others, apart from the call.
  Header call_of(Call call) const;
  /// Collective. Tells, hears, and throws on every rank what is wrong on any or doesn't fit.
  std::vector<Message> meet(const Message& mine);
  /// Throws what is wrong on any rank, or doesn't fit.
  void check(const std::vector<Message>& all) const;
  GradientAgreement agreement(const std::vector<Message>& all);
  Message gradient_message(Call call);
  /// Collective: the start of every call that needs gradients, with whatever set-up has become necessary.
  void enter(const Header& call);
  Message entry_message(const Header& call, Facts& options_now);
  /// What follows from everybody's message; false: meet again.
  bool entered(const std::vector<Message>& all, const Facts& options_now);
  std::string where(const Header& header) const;

  // --- backward.cpp
  void connect();
  void disconnect();
  void end_of_backward();
  void announce(int unit);
  void write_back();
  void follow_changes(const std::vector<Message>& all);
  void agreed(const std::vector<Message>& all);

  // --- step.cpp
  double clip_entered(double max_norm);
  double clip_by(double max_norm);
  void step_entered();
  void decide();
  void reduce_for_norm();
  bool bucket_present(int space, int bucket) const;
  std::vector<Piece> pieces(int space, int bucket, const at::Tensor& average) const;
  void update_bucketwise();
  void update_at_once();
  void finish_bucket(int space, int bucket);
  int threads() const;
  bool uses_fused(int space) const;

  // --- on_device.cpp
  /// Does the device decide steps, so that the host needn't wait? If it can update all there is.
  bool decides_on_device() const;
  void norm_on_device();
  /// The host waits for the norm: somebody wants it.
  void told_norm();
  void decide_on_device();

  // --- overflow.cpp
  bool skips_nonfinite() const { return options.skip_nonfinite() || scaling; }
  /// Do ranks look at their own gradients as they arrive? The same on all.
  bool suspicious() const;
  /// Collective where suspicious(). The step is skipped: says why, and on which rank if that is known.
  void refuse_nonfinite();
  void look_for_nonfinite();
  static std::string reason_of(const StepReport& skipped, bool at_minimum, double scale);
  void end_loss_scaling();
  void told_of_overflow(bool at_minimum);

  std::vector<char> present;  ///< per parameter: some rank has a gradient, in the call that is being made
};

/// src/optimizer/module_names.cpp: the one translation unit that needs torch/nn/module.h.
void read_module(const torch::nn::Module& module, std::unordered_map<const void*, std::string>& names,
                 std::vector<at::Tensor>& buffers);

}  // namespace zero
