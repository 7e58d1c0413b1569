#include "update/state_fields.h"

#include <ATen/ops/scalar_tensor.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>
#include <torch/serialize/archive.h>

#include <sstream>

#include "core/check.h"

namespace zero {
namespace {

using torch::optim::OptimizerParamState;
using torch::serialize::InputArchive;
using torch::serialize::OutputArchive;

// Visits the fields of LibTorch's classes: f(name, tensor) or f(name, step).
template <typename State, typename Visit>
void visit_adam(State& s, Visit visit) {
  visit("step", s.step());
  visit("exp_avg", s.exp_avg());
  visit("exp_avg_sq", s.exp_avg_sq());
  visit("max_exp_avg_sq", s.max_exp_avg_sq());
}

template <typename Visit>
void visit_fields(WrappedClass kind, OptimizerParamState& state, Visit visit) {
  switch (kind) {
    case WrappedClass::kAdam:
      visit_adam(static_cast<torch::optim::AdamParamState&>(state), visit);
      break;
    case WrappedClass::kAdamW:
      visit_adam(static_cast<torch::optim::AdamWParamState&>(state), visit);
      break;
    case WrappedClass::kSGD:
      visit("momentum_buffer", static_cast<torch::optim::SGDParamState&>(state).momentum_buffer());
      break;
    case WrappedClass::kRMSprop: {
      auto& s = static_cast<torch::optim::RMSpropParamState&>(state);
      visit("step", s.step());
      visit("square_avg", s.square_avg());
      visit("momentum_buffer", s.momentum_buffer());
      visit("grad_avg", s.grad_avg());
      break;
    }
    case WrappedClass::kAdagrad: {
      auto& s = static_cast<torch::optim::AdagradParamState&>(state);
      visit("step", s.step());
      visit("sum", s.sum());
      break;
    }
    case WrappedClass::kOther:
      break;
  }
}

std::unique_ptr<OptimizerParamState> make_state(WrappedClass kind) {
  switch (kind) {
    case WrappedClass::kAdam:
      return std::make_unique<torch::optim::AdamParamState>();
    case WrappedClass::kAdamW:
      return std::make_unique<torch::optim::AdamWParamState>();
    case WrappedClass::kSGD:
      return std::make_unique<torch::optim::SGDParamState>();
    case WrappedClass::kRMSprop:
      return std::make_unique<torch::optim::RMSpropParamState>();
    case WrappedClass::kAdagrad:
      return std::make_unique<torch::optim::AdagradParamState>();
    case WrappedClass::kOther:
      break;
  }
  ZERO_FAIL("no state of an unknown class");
}

std::string bytes_of(OutputArchive& archive) {
  std::string out;
  archive.save_to([&out](const void* data, std::size_t bytes) {
    out.append(static_cast<const char*>(data), bytes);
    return bytes;
  });
  return out;
}

void read_archive(InputArchive& archive, const std::string& bytes) { archive.load_from(bytes.data(), bytes.size()); }

// Lends groups to the wrapped object while it saves or loads.
class LentGroups {
 public:
  explicit LentGroups(torch::optim::Optimizer& inner) : inner_(inner) {
    inner_.param_groups().clear();
    std::swap(state_, inner_.state());
  }
  ~LentGroups() {
    for (auto& group : inner_.param_groups()) group.params().clear();
    std::swap(state_, inner_.state());
  }
  LentGroups(const LentGroups&) = delete;
  LentGroups& operator=(const LentGroups&) = delete;
  /// A group of these options, and of one parameter or none.
  void add(const torch::optim::OptimizerParamGroup& like, const at::Tensor& parameter = {}) {
    std::vector<at::Tensor> parameters;
    if (parameter.defined()) parameters.push_back(parameter);
    inner_.param_groups().emplace_back(std::move(parameters), like.options().clone());
  }

 private:
  torch::optim::Optimizer& inner_;
  StateMap state_;
};

}  // namespace

StateFields take_apart(WrappedClass kind, const OptimizerParamState& state, std::int64_t numel) {
  StateFields out;
  struct Visitor {
    StateFields& fields;
    void operator()(const char* name, const at::Tensor& t) const {
      if (t.defined()) fields.tensors.emplace_back(name, t);
    }
    void operator()(const char* name, std::int64_t step) const { fields.values.emplace_back(name, step); }
  };
  visit_fields(kind, const_cast<OptimizerParamState&>(state), Visitor{out});
  if (kind != WrappedClass::kOther) return out;

  OutputArchive archive;
  state.serialize(archive);
  const auto bytes = bytes_of(archive);
  InputArchive read;
  read_archive(read, bytes);
  for (const auto& name : read.keys()) {
    c10::IValue value;
    read.read(name, value);
    // A number per element, unless it has no dimensions: then there is nothing to cut.
    if (value.isTensor() && value.toTensor().dim() > 0 && value.toTensor().numel() == numel) {
      out.tensors.emplace_back(name, value.toTensor());
    } else if (!value.isNone()) {
      out.values.emplace_back(name, value);
    }
  }
  return out;
}

std::unique_ptr<OptimizerParamState> put_together(WrappedClass kind, const StateFields& fields, torch::optim::Optimizer& inner,
                                                  const Groups& groups, const Parameter& parameter) {
  if (kind != WrappedClass::kOther) {
    auto state = make_state(kind);
    struct Visitor {
      const StateFields& fields;
      void operator()(const char* name, at::Tensor& t) const {
        for (const auto& [field, tensor] : fields.tensors)
          if (field == name) t = tensor;
      }
      void operator()(const char* name, std::int64_t& step) const {
        for (const auto& [field, value] : fields.values)
          if (field == name) step = value.toInt();
      }
    };
    visit_fields(kind, *state, Visitor{fields});
    return state;
  }

  // In the layout of torch::optim::serialize, whose keys are addresses of tensors as text.
  OutputArchive root;
  const auto child = [&root] { return OutputArchive(root.compilation_unit()); };
  const auto key = std::to_string(reinterpret_cast<std::size_t>(parameter.tensor.unsafeGetTensorImpl()));
  const auto count = [](std::size_t n) { return at::scalar_tensor(static_cast<std::int64_t>(n), at::kLong); };
  auto state = child(), states = child(), all = child();
  for (const auto& [name, tensor] : fields.tensors) state.write(name, c10::IValue(tensor));
  for (const auto& [name, value] : fields.values) state.write(name, value);
  states.write(key, state);
  all.write("param_groups/size", count(groups.size()));
  LentGroups lent(inner);
  for (std::size_t g = 0; g < groups.size(); ++g) {
    const bool here = static_cast<int>(g) == parameter.group;
    auto group = child(), options = child();
    group.write("params/size", count(here ? 1 : 0));
    if (here) group.write("params/0", c10::IValue(key));
    groups[g].options().serialize(options);
    group.write("options", options);
    all.write("param_groups/" + std::to_string(g), group);
    lent.add(groups[g], here ? parameter.tensor : at::Tensor());
  }
  root.write("pytorch_version", c10::IValue("1.5.0"));
  root.write("state", states);
  root.write("param_groups", all);
  const auto bytes = bytes_of(root);
  InputArchive archive;
  read_archive(archive, bytes);
  inner.load(archive);
  auto found = inner.state().find(parameter.tensor.unsafeGetTensorImpl());
  ZERO_CHECK(found != inner.state().end() && found->second, "the wrapped class's load() has brought no state for ",
             parameter.name);
  return std::move(found->second);
}

std::string archive_of_options(torch::optim::Optimizer& inner, const Groups& groups) {
  LentGroups lent(inner);
  for (const auto& group : groups) lent.add(group);
  OutputArchive archive;
  inner.save(archive);
  auto bytes = bytes_of(archive);
  InputArchive read;
  read_archive(read, bytes);
  c10::IValue groups_value;
  ZERO_CHECK(
      read.try_read("param_groups", groups_value),
      "the wrapped class has no save() of its own (torch::optim's classes show how), so its options and state can't be kept");
  return bytes;
}

void options_from_archive(torch::optim::Optimizer& inner, Groups& groups, const std::string& archive) {
  LentGroups lent(inner);
  for (const auto& group : groups) lent.add(group);
  InputArchive read;
  read_archive(read, archive);
  inner.load(read);
  for (std::size_t g = 0; g < groups.size(); ++g) groups[g].set_options(inner.param_groups()[g].options().clone());
}

}  // namespace zero
