// The network that both trainers train, and how good it is.
#pragma once

#include <torch/data/datasets/mnist.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/linear.h>

namespace mnist {

/// Two convolutions with batch norm, two linear layers: 28 × 28 pixels to ten log-probabilities; 0.2 M parameters.
class Net : public torch::nn::Module {
 public:
  Net();
  at::Tensor forward(at::Tensor images);

 private:
  torch::nn::Conv2d conv1_{nullptr}, conv2_{nullptr};
  torch::nn::BatchNorm2d norm1_{nullptr}, norm2_{nullptr};
  torch::nn::Linear hidden_{nullptr}, out_{nullptr};
};

/// Mean and standard deviation of Fashion-MNIST's pixels.
inline constexpr double kMean = 0.2860, kDeviation = 0.3530;

/// The part of `images` that the network, in evaluation mode, labels right.
double accuracy(Net& net, const torch::data::datasets::MNIST& images);

}  // namespace mnist
