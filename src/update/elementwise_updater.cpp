// The wrapped optimizer's own step() on flat pieces: for classes and types that the fused pass doesn't know.
#include <ATen/ops/empty_strided.h>

#include <unordered_map>

#include "core/check.h"
#include "update/updater.h"

namespace zero {
namespace {

class ElementwiseUpdater : public Updater {
 public:
  ElementwiseUpdater(const UpdateContext& context, torch::optim::Optimizer& inner) : context_(context), inner_(inner) {}

  // One call is one step of the user's class, which may count its own.
  bool wants_everything() const override { return true; }

  void update(const std::vector<Piece>& pieces, const Groups& groups, StateMap& state, double factor,
              int /*threads*/) override {
    auto& inner_groups = inner_.param_groups();
    while (inner_groups.size() < groups.size()) inner_groups.emplace_back(std::vector<at::Tensor>{});
    for (std::size_t g = 0; g < groups.size(); ++g) {
      inner_groups[g].params().clear();
      inner_groups[g].set_options(groups[g].options().clone());
    }
    std::vector<std::pair<void*, void*>> moved;  // our key, inner's key
    for (const auto& piece : pieces) {
      const auto& parameter = context_.parameters[piece.parameter];
      auto& stand_in = stand_in_for(piece, parameter);
      auto gradient = piece_tensor(piece, parameter, piece.grad, nullptr, piece.grad_type).to(stand_in.scalar_type());
      if (factor != 1) gradient = gradient.mul(factor);  // never in place: it may be the rank's own gradient
      stand_in.mutable_grad() = std::move(gradient);
      inner_groups[parameter.group].params().push_back(stand_in);
      void* ours = parameter.tensor.unsafeGetTensorImpl();
      void* theirs = stand_in.unsafeGetTensorImpl();
      if (auto it = state.find(ours); it != state.end()) {
        if (it->second)  // made or loaded in the parameter's type
          for_each_state_tensor(context_.kind, *it->second, [&](at::Tensor& s) { s = s.to(stand_in.scalar_type()); });
        inner_.state()[theirs] = std::move(it->second);
      } else if (auto fresh = initial_state(context_.kind, groups[parameter.group].options(), stand_in)) {
        inner_.state()[theirs] = std::move(fresh);
      }
      moved.emplace_back(ours, theirs);
    }
    // The state goes back to its parameters whatever step() does.
    struct Restore {
      const std::vector<std::pair<void*, void*>>& moved;
      StateMap& from;
      StateMap& to;
      std::unordered_map<int, at::Tensor>& stand_ins;
      ~Restore() {
        for (const auto& [ours, theirs] : moved) {
          if (auto it = from.find(theirs); it != from.end()) {
            if (it->second) to[ours] = std::move(it->second);
            from.erase(it);
          }
        }
        for (auto& [parameter, stand_in] : stand_ins) stand_in.mutable_grad().reset();
      }
    } restore{moved, inner_.state(), state, stand_ins_};
    inner_.step();
    for (const auto& piece : pieces) {
      const auto& parameter = context_.parameters[piece.parameter];
      if (context_.precision.has_master(parameter.tensor.scalar_type()))
        parameter_piece(piece, parameter).copy_(context_.masters.of(piece, parameter));
    }
  }

 private:
  static at::Tensor parameter_piece(const Piece& piece, const Parameter& parameter) {
    return piece_tensor(piece, parameter, piece.param, nullptr, parameter.tensor.scalar_type());
  }

  // What the wrapped optimizer updates: the master where there is one.
  at::Tensor updated(const Piece& piece, const Parameter& parameter) {
    if (!context_.precision.has_master(parameter.tensor.scalar_type())) return parameter_piece(piece, parameter);
    const auto& master = context_.masters.of(piece, parameter);
    MasterWeights::take_edits(master, parameter_piece(piece, parameter));
    return master;
  }

  // The tensor that stands for the piece in the wrapped optimizer. Kept from step to step: a user's class may key maps of its own
  // on it.
  at::Tensor& stand_in_for(const Piece& piece, const Parameter& parameter) {
    auto& t = stand_ins_[piece.parameter];
    const auto now = updated(piece, parameter);
    if (!t.defined() || t.data_ptr() != now.data_ptr() || t.numel() != now.numel() || t.scalar_type() != now.scalar_type()) {
      t = tensor_over(now.data_ptr(), nullptr, now.sizes(), now.strides(), now.scalar_type(), now.device());
      t.requires_grad_(true);
    }
    return t;
  }

  UpdateContext context_;
  torch::optim::Optimizer& inner_;
  std::unordered_map<int, at::Tensor> stand_ins_;
};

}  // namespace

std::unique_ptr<Updater> make_elementwise_updater(const UpdateContext& context, torch::optim::Optimizer& inner) {
  return std::make_unique<ElementwiseUpdater>(context, inner);
}

at::Tensor cut(const at::Tensor& whole, const Parameter& parameter, std::int64_t in_parameter, std::int64_t numel) {
  const auto& t = parameter.tensor;
  if (numel == t.numel()) return whole;
  // In the parameter's own order of elements, in which pieces are counted.
  auto ordered = at::empty_strided(t.sizes(), layout_strides(t), whole.options());
  ordered.copy_(whole.reshape(t.sizes()));
  return storage_order(ordered).narrow(0, in_parameter, numel).clone();
}

void cut_state(WrappedClass kind, torch::optim::OptimizerParamState& state, const Parameter& parameter,
               std::int64_t in_parameter, std::int64_t numel) {
  for_each_state_tensor(kind, state, [&](at::Tensor& s) { s = cut(s, parameter, in_parameter, numel); });
}

}  // namespace zero
