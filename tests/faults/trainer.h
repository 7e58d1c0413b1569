// The small trainer in which something happens on rank 1: shared by ranks as processes (fault_worker.cpp) and as threads.
#pragma once

#include <ATen/ATen.h>
#include <torch/optim/adamw.h>

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "zero/zero.h"

namespace faults {

constexpr int kLayers = 6;
constexpr int kWidth = 32;
constexpr int kIncidentStep = 3;  // counted from 1, as in the library's messages
constexpr int kSteps = 5;

/// Where something may happen.
enum class Place { forward, backward, collective, fault, between };
inline const std::vector<std::pair<std::string, Place>>& places() {
  static const std::vector<std::pair<std::string, Place>> all{{"forward", Place::forward},
                                                              {"backward", Place::backward},
                                                              {"collective", Place::collective},
                                                              {"fault", Place::fault},
                                                              {"between", Place::between}};
  return all;
}

/// Layers whose parameters fill one bucket each: six buckets, of which stage 2 has two under way. When the hook of the middle one is
/// called, those of the layers above are.
class Trainer {
 public:
  using Happening = std::function<void(int step, Place place)>;

  Trainer(const zero::Communicator& comm, int stage, Happening happening)
      : rank_(comm.rank()), happening_(std::move(happening)), params_(make()), optimizer_(wrap(comm, stage)) {
    params_[kLayers].register_hook([this](const at::Tensor&) { happening_(step_, Place::backward); });
  }
  Trainer(const Trainer&) = delete;
  Trainer& operator=(const Trainer&) = delete;

  static std::vector<std::string> names() {
    std::vector<std::string> out;
    for (int i = 0; i < kLayers; ++i) {
      out.push_back("layer" + std::to_string(i) + ".weight");
      out.push_back("layer" + std::to_string(i) + ".bias");
    }
    return out;
  }

  void begin_step() {
    ++step_;
    optimizer_.zero_grad();
  }

  /// @param layers  how many of them the loss depends on: the others get no gradient on this rank
  void backward(int layers = kLayers) {
    auto x = at::sin(at::arange(4 * kWidth, at::kFloat) * (0.3 + 0.1 * step_) + rank_).reshape({4, kWidth});
    for (int i = 0; i < layers; ++i) {
      x = at::tanh(at::linear(x, params_[2 * i], params_[2 * i + 1]));
      if (i == kLayers / 2) happening_(step_, Place::forward);
    }
    x.square().mean().backward();
  }

  /// What a user's loop does who looks at a gradient: that of a layer whose bucket is not resident.
  void read() {
    happening_(step_, Place::fault);
    last_norm_ = params_[2].grad().norm().item<double>();
  }

  void end_step() {
    happening_(step_, Place::collective);
    optimizer_.step();
    happening_(step_, Place::between);
  }

  void step() {
    begin_step();
    backward();
    read();
    end_step();
  }

  const std::vector<at::Tensor>& params() const { return params_; }
  zero::ZeroOptimizer& optimizer() { return optimizer_; }
  int step_number() const { return step_; }
  /// For a step that is tried again.
  void back_one_step() { --step_; }

 private:
  static std::vector<at::Tensor> make() {
    std::vector<at::Tensor> out;
    for (int i = 0; i < kLayers; ++i) {
      out.push_back((at::cos(at::arange(kWidth * kWidth, at::kFloat) * (1.1 + i)) * 0.2).reshape({kWidth, kWidth}));
      out.push_back(at::cos(at::arange(kWidth, at::kFloat) * (0.7 + i)) * 0.1);
    }
    for (auto& p : out) p.requires_grad_(true);
    return out;
  }
  zero::ZeroOptimizer wrap(const zero::Communicator& comm, int stage) const {
    const auto bytes = static_cast<std::int64_t>(kWidth * (kWidth + 1) * sizeof(float));
    return zero::wrap<torch::optim::AdamW>(
        params_, torch::optim::AdamWOptions(0.01),
        zero::Options(comm).stage(static_cast<zero::Stage>(stage)).bucket_bytes(bytes).names(names()));
  }

  int rank_;
  int step_ = 0;
  double last_norm_ = 0;
  Happening happening_;
  std::vector<at::Tensor> params_;
  zero::ZeroOptimizer optimizer_;
};

inline std::string first_line(const std::string& text) { return text.substr(0, text.find('\n')); }

}  // namespace faults
