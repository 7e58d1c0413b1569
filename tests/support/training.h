// A small model with every awkward shape, trained by plain torch::optim in one process (the reference) and by ZeroOptimizer on the
// ranks of a communicator. Checks throw instead of using Catch2's assertions, which aren't made for several threads.
#pragma once

#include <ATen/ATen.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include <functional>
#include <memory>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "zero/zero.h"

namespace training {

using Params = std::vector<at::Tensor>;
using Groups = std::vector<torch::optim::OptimizerParamGroup>;
using Factory = std::function<std::unique_ptr<torch::optim::Optimizer>(Params)>;

template <typename... Parts>
void expect(bool condition, const Parts&... parts) {
  if (condition) return;
  std::ostringstream out;
  (out << ... << parts);
  throw std::runtime_error(out.str());
}

/// The message of the c10::Error that `action` throws; it has to contain every part.
template <typename Action>
std::string expect_error(const std::vector<std::string>& parts, Action action) {
  std::string message;
  try {
    action();
  } catch (const c10::Error& e) {
    message = e.msg();
  }
  expect(!message.empty(), "no error, but one should have said '", parts.at(0), "'");
  for (const auto& part : parts) expect(message.find(part) != std::string::npos, "no '", part, "' in: ", message);
  return message;
}

/// Distinct, reproducible values; no two tensors and no two elements alike.
inline at::Tensor values(at::IntArrayRef sizes, double seed, at::ScalarType dtype = at::kDouble) {
  const auto n = at::empty(sizes, at::kDouble).numel();
  return (at::arange(n, at::kDouble) * 0.7391 + seed * 1.618).sin().mul(0.5).reshape(sizes).to(dtype);
}

/// y = w2·tanh(w1·x + b1)·a + b2 with prime sizes, a 0-dim parameter (a), one without elements (e) and one shared twice (b1).
struct Model {
  Params params;
  explicit Model(at::ScalarType dtype = at::kDouble, double seed = 1) {
    const std::vector<std::vector<std::int64_t>> shapes{{7, 5}, {7}, {3, 7}, {}, {0, 4}, {3}, {11, 3}};
    for (std::size_t i = 0; i < shapes.size(); ++i)
      params.push_back(values(shapes[i], seed + static_cast<double>(i), dtype).requires_grad_(true));
  }
  static std::vector<std::string> names() { return {"w1", "b1", "w2", "a", "e", "b2", "w3"}; }
  at::Tensor loss(const at::Tensor& x) const {
    const auto h = at::tanh(at::linear(x, params[0], params[1]) + params[1]);
    const auto y = at::linear(h, params[2]) * params[3] + params[5] + params[4].sum();
    const auto z = at::linear(y, params[6]);
    return (z * z).mean() + y.sum() * 0.01;
  }
};

/// Rank r's batch at step s; scaled by rank, so that a missing average shows.
inline at::Tensor batch(int step, int rank, at::ScalarType dtype = at::kDouble) {
  return values({4, 5}, 17.0 * step + 3.0 * rank + 0.5, dtype) * (1.0 + 0.7 * rank);
}

inline Params copies(const Params& params) {
  Params out;
  for (const auto& p : params) out.push_back(p.detach().clone());
  return out;
}

inline bool same_bits(const Params& a, const Params& b) {
  for (std::size_t i = 0; i < a.size(); ++i)
    if (!at::equal(a[i].detach(), b[i].detach())) return false;
  return a.size() == b.size();
}

inline double distance(const Params& a, const Params& b) {
  double most = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    if (a[i].numel() == 0) continue;
    const auto x = a[i].detach().to(at::kDouble), y = b[i].detach().to(at::kDouble);
    most = std::max(most, ((x - y).abs() / y.abs().clamp_min(1e-3)).max().item<double>());
  }
  return most;
}

/// The plain loop on the mean of the ranks' losses.
inline Params reference(const Factory& make, int ranks, int steps, at::ScalarType dtype = at::kDouble) {
  Model model(dtype);
  auto opt = make(model.params);
  for (int s = 0; s < steps; ++s) {
    opt->zero_grad();
    for (int r = 0; r < ranks; ++r) (model.loss(batch(s, r, dtype)) / ranks).backward();
    opt->step();
  }
  return copies(model.params);
}

/// The same loop on this rank's share.
inline Params wrapped(const zero::Communicator& comm, const Factory& make, int steps, zero::Options options,
                      at::ScalarType dtype = at::kDouble, double max_norm = 0) {
  Model model(dtype);
  options.names(Model::names());
  auto opt = zero::wrap(make(model.params), options);
  for (int s = 0; s < steps; ++s) {
    opt.zero_grad();
    model.loss(batch(s, comm.rank(), dtype)).backward();
    if (max_norm > 0) zero::clip_grad_norm_(opt, max_norm);
    opt.step();
  }
  return copies(model.params);
}

/// Every rank's copy is the same, bit for bit.
inline void expect_equal_on_ranks(const zero::Communicator& comm, const Params& params) {
  std::string bytes;
  for (const auto& p : params) {
    const auto c = p.detach().clone(at::MemoryFormat::Contiguous);  // at stage 3 there is no pointer to the parameter itself
    bytes.append(static_cast<const char*>(c.data_ptr()), c.nbytes());
  }
  for (const auto& theirs : comm.exchange(bytes, "comparing parameters"))
    expect(theirs == bytes, "ranks have different parameters");
}

/// A user's own class, elementwise, with state and a step count of its own: sign descent with momentum.
class SignDescent : public torch::optim::Optimizer {
 public:
  struct Options : torch::optim::OptimizerCloneableOptions<Options> {
    double rate = 0.01;
    double get_lr() const override { return rate; }
    void set_lr(double lr) override { rate = lr; }
  };
  struct State : torch::optim::OptimizerCloneableParamState<State> {
    at::Tensor mean;
  };
  explicit SignDescent(Params params)
      : Optimizer({torch::optim::OptimizerParamGroup(std::move(params))}, std::make_unique<Options>()) {}
  at::Tensor step(LossClosure = nullptr) override {
    ++calls;
    for (auto& group : param_groups_) {
      for (auto& p : group.params()) {
        if (!p.grad().defined()) continue;
        auto& entry = state_[p.unsafeGetTensorImpl()];
        if (!entry) {
          auto fresh = std::make_unique<State>();
          fresh->mean = at::zeros_like(p);
          entry = std::move(fresh);
        }
        auto& mean = static_cast<State&>(*entry).mean;
        mean.mul_(0.9).add_(p.grad(), 0.1 / (1 + 0.1 * static_cast<double>(calls)));
        p.data().sub_(static_cast<Options&>(group.options()).rate * mean / (mean.abs() + 1e-3));
      }
    }
    return {};
  }
  int calls = 0;
};

/// Every optimizer class and variant that the library promises, by name.
inline std::vector<std::pair<std::string, Factory>> optimizers() {
  using namespace torch::optim;
  std::vector<std::pair<std::string, Factory>> out;
  auto add = [&](const std::string& name, auto options, auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    out.emplace_back(name, [options](Params p) { return std::make_unique<T>(std::move(p), options); });
  };
  add("Adam", AdamOptions(0.01), static_cast<Adam*>(nullptr));
  add("Adam decay amsgrad", AdamOptions(0.01).weight_decay(0.1).amsgrad(true).betas({0.8, 0.9}), static_cast<Adam*>(nullptr));
  add("AdamW", AdamWOptions(0.01).weight_decay(0.1).betas({0.9, 0.95}), static_cast<AdamW*>(nullptr));
  add("AdamW amsgrad", AdamWOptions(0.02).amsgrad(true), static_cast<AdamW*>(nullptr));
  add("SGD", SGDOptions(0.05), static_cast<SGD*>(nullptr));
  add("SGD momentum", SGDOptions(0.05).momentum(0.9).weight_decay(0.01), static_cast<SGD*>(nullptr));
  add("SGD dampening", SGDOptions(0.05).momentum(0.8).dampening(0.3), static_cast<SGD*>(nullptr));
  add("SGD Nesterov", SGDOptions(0.05).momentum(0.9).nesterov(true).weight_decay(0.02), static_cast<SGD*>(nullptr));
  add("RMSprop", RMSpropOptions(0.003).centered(true).momentum(0.5).weight_decay(0.01), static_cast<RMSprop*>(nullptr));
  add("Adagrad", AdagradOptions(0.03).lr_decay(0.01).initial_accumulator_value(0.1).weight_decay(0.01),
      static_cast<Adagrad*>(nullptr));
  out.emplace_back("a user's class", [](Params p) { return std::make_unique<SignDescent>(std::move(p)); });
  return out;
}

}  // namespace training
