// What autograd tells about parameters' gradients: before something is accumulated, after it has arrived, and that a backward is over.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <vector>

namespace torch::autograd {
struct Node;
}

namespace zero {

class GradientEvents {
 public:
  virtual ~GradientEvents() = default;
  /// LibTorch is about to accumulate into the parameter's p.grad(). Not under autograd::grad, where nothing accumulates.
  virtual void before_accumulation(int parameter) = 0;
  /// It has: once per backward and parameter, also for tied weights.
  virtual void arrived(int parameter, const at::Tensor& tensor) = 0;
  /// A backward in which something arrived has ended.
  /// @param nested inside another backward (recomputation): that one goes on
  virtual void backward_ended(bool nested) = 0;
  /// It was given up: an exception left it.
  virtual void backward_aborted() = 0;
};

/// Our hooks on the parameters of one optimizer. They hold it weakly and go with this object.
class Hooks {
 public:
  ~Hooks();
  /// Installs what is missing: a tensor that was converted by to() has a new accumulator, and has lost its hooks.
  void watch(int parameter, const at::Tensor& tensor, const std::weak_ptr<GradientEvents>& events);
  void leave(int parameter);

 private:
  struct Entry {
    at::Tensor tensor;
    std::shared_ptr<torch::autograd::Node> node;  ///< its AccumulateGrad, held: it lives only as long as somebody does
  };
  std::vector<Entry> entries_;
};

/// Within a hook: has `events` told of the end of the backward that is running. Once per backward is enough.
void expect_end_of_backward(const std::weak_ptr<GradientEvents>& events);

/// Identifies the backward that is running on this thread (one number per call of backward(), nested ones too); −1: none.
int current_backward();

}  // namespace zero
