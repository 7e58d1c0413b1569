#include "model.h"

#include <ATen/ops/log_softmax.h>
#include <ATen/ops/relu.h>
#include <c10/core/InferenceMode.h>

namespace mnist {

Net::Net() {
  namespace nn = torch::nn;
  conv1_ = register_module("conv1", nn::Conv2d(nn::Conv2dOptions(1, 16, 5).stride(2).padding(2).bias(false)));
  norm1_ = register_module("norm1", nn::BatchNorm2d(16));
  conv2_ = register_module("conv2", nn::Conv2d(nn::Conv2dOptions(16, 32, 3).stride(2).padding(1).bias(false)));
  norm2_ = register_module("norm2", nn::BatchNorm2d(32));
  hidden_ = register_module("hidden", nn::Linear(32 * 7 * 7, 128));
  out_ = register_module("out", nn::Linear(128, 10));
}

at::Tensor Net::forward(at::Tensor images) {
  auto x = at::relu(norm1_(conv1_(std::move(images))));
  x = at::relu(norm2_(conv2_(x)));
  x = at::relu(hidden_(x.flatten(1)));
  return at::log_softmax(out_(x), 1);
}

double accuracy(Net& net, const torch::data::datasets::MNIST& images) {
  constexpr std::int64_t kBatch = 500;
  const c10::InferenceMode no_gradients;
  const bool was_training = net.is_training();
  net.eval();
  std::int64_t right = 0;
  const std::int64_t count = images.images().size(0);
  for (std::int64_t first = 0; first < count; first += kBatch) {
    const std::int64_t last = std::min(first + kBatch, count);
    const auto answers = net.forward((images.images().slice(0, first, last) - kMean) / kDeviation).argmax(1);
    right += answers.eq(images.targets().slice(0, first, last)).sum().item<std::int64_t>();
  }
  net.train(was_training);
  return static_cast<double>(right) / static_cast<double>(count);
}

}  // namespace mnist
