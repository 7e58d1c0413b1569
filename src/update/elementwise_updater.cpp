// The wrapped optimizer's own step() on flat pieces: for classes and types that the fused pass doesn't know.
#include <ATen/ops/empty_strided.h>

#include <unordered_map>

#include "core/check.h"
#include "update/updater.h"

namespace zero {
namespace {

class ElementwiseUpdater : public Updater {
 public:
  ElementwiseUpdater(WrappedClass kind, torch::optim::Optimizer& inner, const std::vector<Parameter>& parameters)
      : kind_(kind), inner_(inner), parameters_(parameters) {}

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
      const auto& parameter = parameters_[piece.parameter];
      auto& stand_in = stand_in_for(piece, parameter);
      stand_in.mutable_grad() = piece_tensor(piece, parameter, piece.grad, nullptr, parameter.tensor.scalar_type());
      if (factor != 1)
        stand_in.mutable_grad() = stand_in.grad().mul(factor);  // never in place: it may be the rank's own gradient
      inner_groups[parameter.group].params().push_back(stand_in);
      void* ours = parameter.tensor.unsafeGetTensorImpl();
      void* theirs = stand_in.unsafeGetTensorImpl();
      if (auto it = state.find(ours); it != state.end()) {
        inner_.state()[theirs] = std::move(it->second);
      } else if (auto fresh = initial_state(kind_, groups[parameter.group].options(), stand_in)) {
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
  }

 private:
  // The tensor that stands for the piece in the wrapped optimizer. Kept from step to step: a user's class may key maps of its own
  // on it.
  at::Tensor& stand_in_for(const Piece& piece, const Parameter& parameter) {
    auto& t = stand_ins_[piece.parameter];
    if (!t.defined() || t.data_ptr() != piece.param || t.numel() != piece.numel ||
        t.scalar_type() != parameter.tensor.scalar_type()) {
      t = piece_tensor(piece, parameter, piece.param, nullptr, parameter.tensor.scalar_type());
      t.requires_grad_(true);
    }
    return t;
  }

  WrappedClass kind_;
  torch::optim::Optimizer& inner_;
  const std::vector<Parameter>& parameters_;
  std::unordered_map<int, at::Tensor> stand_ins_;
};

}  // namespace

std::unique_ptr<Updater> make_elementwise_updater(WrappedClass kind, torch::optim::Optimizer& inner,
                                                  const std::vector<Parameter>& parameters) {
  return std::make_unique<ElementwiseUpdater>(kind, inner, parameters);
}

at::Tensor piece_tensor(const Piece& piece, const Parameter& parameter, void* memory, std::shared_ptr<void> keep_alive,
                        at::ScalarType dtype) {
  const auto& t = parameter.tensor;
  const bool all = piece.numel == t.numel();
  const auto strides = layout_strides(t);
  return all ? tensor_over(memory, std::move(keep_alive), t.sizes(), strides, dtype)
             : tensor_over(memory, std::move(keep_alive), {piece.numel}, {1}, dtype);
}

void cut_state(WrappedClass kind, torch::optim::OptimizerParamState& state, const Parameter& parameter,
               std::int64_t in_parameter, std::int64_t numel) {
  const auto& t = parameter.tensor;
  if (numel == t.numel()) return;
  for_each_state_tensor(kind, state, [&](at::Tensor& s) {
    // In the parameter's own order of elements, in which pieces are counted.
    const auto strides = layout_strides(t);
    auto whole = at::empty_strided(t.sizes(), strides, s.options());
    whole.copy_(s.reshape(t.sizes()));
    s = storage_order(whole).narrow(0, in_parameter, numel).clone();
  });
}

}  // namespace zero
