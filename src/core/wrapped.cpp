#include "core/wrapped.h"

#include <ATen/ops/full.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/lbfgs.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include <c10/util/Type.h>

#include <iomanip>
#include <limits>
#include <sstream>
#include <typeinfo>

#include "core/check.h"

namespace zero {
namespace {

using namespace torch::optim;

template <typename T>
std::string exact(const T& value) {
  std::ostringstream out;
  out << std::boolalpha << std::setprecision(std::numeric_limits<double>::max_digits10) << value;
  return out.str();
}

template <typename O>
void describe_adam(const O& o, const std::string& group, Facts& out) {
  out.emplace_back("lr of " + group, exact(o.lr()));
  out.emplace_back("beta1 of " + group, exact(std::get<0>(o.betas())));
  out.emplace_back("beta2 of " + group, exact(std::get<1>(o.betas())));
  out.emplace_back("eps of " + group, exact(o.eps()));
  out.emplace_back("weight_decay of " + group, exact(o.weight_decay()));
  out.emplace_back("amsgrad of " + group, exact(o.amsgrad()));
}

// LibTorch's states hand out references to their tensors.
template <typename F>
void visit(at::Tensor& t, const F& f) {
  if (t.defined()) f(t);
}

}  // namespace

WrappedClass classify(const Optimizer& optimizer) {
  const auto& type = typeid(optimizer);
  if (type == typeid(Adam)) return WrappedClass::kAdam;
  if (type == typeid(AdamW)) return WrappedClass::kAdamW;
  if (type == typeid(SGD)) return WrappedClass::kSGD;
  if (type == typeid(RMSprop)) return WrappedClass::kRMSprop;
  if (type == typeid(Adagrad)) return WrappedClass::kAdagrad;
  return WrappedClass::kOther;
}

std::string class_name(const Optimizer& optimizer) {
  std::string name = c10::demangle(typeid(optimizer).name());
  const std::string ours = "torch::optim::";
  return name.rfind(ours, 0) == 0 ? name.substr(ours.size()) : name;
}

void check_wrappable(const Optimizer& optimizer, bool elementwise) {
  ZERO_CHECK(dynamic_cast<const LBFGS*>(&optimizer) == nullptr,
             "LBFGS can't be sharded: its line search takes dot products over all parameters at once. Use it unsharded, or a "
             "first-order optimizer");
  ZERO_CHECK(classify(optimizer) != WrappedClass::kOther || elementwise, "the optimizer class ", class_name(optimizer),
             " is not known to this library; if its step() treats every element of a parameter by itself (no norm or shape per "
             "tensor), say so with zero::Options::elementwise()");
}

Facts describe_options(WrappedClass kind, const OptimizerOptions& options, const std::string& group) {
  Facts out;
  switch (kind) {
    case WrappedClass::kAdam:
      describe_adam(static_cast<const AdamOptions&>(options), group, out);
      break;
    case WrappedClass::kAdamW:
      describe_adam(static_cast<const AdamWOptions&>(options), group, out);
      break;
    case WrappedClass::kSGD: {
      const auto& o = static_cast<const SGDOptions&>(options);
      out.emplace_back("lr of " + group, exact(o.lr()));
      out.emplace_back("momentum of " + group, exact(o.momentum()));
      out.emplace_back("dampening of " + group, exact(o.dampening()));
      out.emplace_back("weight_decay of " + group, exact(o.weight_decay()));
      out.emplace_back("nesterov of " + group, exact(o.nesterov()));
      break;
    }
    case WrappedClass::kRMSprop: {
      const auto& o = static_cast<const RMSpropOptions&>(options);
      out.emplace_back("lr of " + group, exact(o.lr()));
      out.emplace_back("alpha of " + group, exact(o.alpha()));
      out.emplace_back("eps of " + group, exact(o.eps()));
      out.emplace_back("weight_decay of " + group, exact(o.weight_decay()));
      out.emplace_back("momentum of " + group, exact(o.momentum()));
      out.emplace_back("centered of " + group, exact(o.centered()));
      break;
    }
    case WrappedClass::kAdagrad: {
      const auto& o = static_cast<const AdagradOptions&>(options);
      out.emplace_back("lr of " + group, exact(o.lr()));
      out.emplace_back("lr_decay of " + group, exact(o.lr_decay()));
      out.emplace_back("weight_decay of " + group, exact(o.weight_decay()));
      out.emplace_back("initial_accumulator_value of " + group, exact(o.initial_accumulator_value()));
      out.emplace_back("eps of " + group, exact(o.eps()));
      break;
    }
    case WrappedClass::kOther:
      try {
        out.emplace_back("lr of " + group, exact(options.get_lr()));
      } catch (const c10::Error&) {
        // get_lr() is optional for a user's options; without it there is nothing generic to compare.
      }
      break;
  }
  return out;
}

void for_each_state_tensor(WrappedClass kind, OptimizerParamState& state, const std::function<void(at::Tensor&)>& f) {
  auto adam = [&](auto& s) {
    visit(s.exp_avg(), f);
    visit(s.exp_avg_sq(), f);
    visit(s.max_exp_avg_sq(), f);
  };
  switch (kind) {
    case WrappedClass::kAdam:
      adam(static_cast<AdamParamState&>(state));
      break;
    case WrappedClass::kAdamW:
      adam(static_cast<AdamWParamState&>(state));
      break;
    case WrappedClass::kSGD:
      visit(static_cast<SGDParamState&>(state).momentum_buffer(), f);
      break;
    case WrappedClass::kRMSprop: {
      auto& s = static_cast<RMSpropParamState&>(state);
      visit(s.square_avg(), f);
      visit(s.momentum_buffer(), f);
      visit(s.grad_avg(), f);
      break;
    }
    case WrappedClass::kAdagrad:
      visit(static_cast<AdagradParamState&>(state).sum(), f);
      break;
    case WrappedClass::kOther:
      break;
  }
}

int state_tensors_per_element(WrappedClass kind, const OptimizerOptions& options) {
  switch (kind) {
    case WrappedClass::kAdam:
      return static_cast<const AdamOptions&>(options).amsgrad() ? 3 : 2;
    case WrappedClass::kAdamW:
      return static_cast<const AdamWOptions&>(options).amsgrad() ? 3 : 2;
    case WrappedClass::kSGD:
      return static_cast<const SGDOptions&>(options).momentum() != 0 ? 1 : 0;
    case WrappedClass::kRMSprop: {
      const auto& o = static_cast<const RMSpropOptions&>(options);
      return 1 + (o.momentum() > 0 ? 1 : 0) + (o.centered() ? 1 : 0);
    }
    case WrappedClass::kAdagrad:
      return 1;
    case WrappedClass::kOther:
      break;
  }
  return 0;
}

bool is_initial(WrappedClass kind, OptimizerParamState& state) {
  return kind == WrappedClass::kAdagrad && static_cast<AdagradParamState&>(state).step() == 0;
}

std::unique_ptr<OptimizerParamState> initial_state(WrappedClass kind, const OptimizerOptions& options,
                                                   const at::Tensor& parameter) {
  if (kind != WrappedClass::kAdagrad) return nullptr;
  auto fresh = std::make_unique<AdagradParamState>();
  fresh->sum(at::full(parameter.sizes(), static_cast<const AdagradOptions&>(options).initial_accumulator_value(),
                      parameter.options().requires_grad(false)));
  return fresh;
}

}  // namespace zero
