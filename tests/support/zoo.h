// A model of everything: layers of LibTorch that keep their weights in different ways, a tied weight, buffers, and a part in TorchScript.
#pragma once

#include <torch/csrc/jit/api/module.h>
#include <torch/nn/functional/loss.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/rnn.h>
#include <torch/nn/modules/transformerlayer.h>

#include <algorithm>

#include "support/training.h"

namespace zoo {

using training::Params;

struct Zoo : torch::nn::Module {
  static constexpr int kTokens = 13, kWidth = 6, kLength = 5;
  torch::nn::Embedding embedding{torch::nn::EmbeddingOptions(kTokens, kWidth)};
  torch::nn::Conv1d conv{torch::nn::Conv1dOptions(kWidth, kWidth, 3).padding(1)};
  torch::nn::BatchNorm1d norm{torch::nn::BatchNorm1dOptions(kWidth)};
  torch::nn::LSTM lstm{torch::nn::LSTMOptions(kWidth, kWidth).num_layers(2).batch_first(true)};
  torch::nn::GRU gru{torch::nn::GRUOptions(kWidth, kWidth).batch_first(true)};
  torch::nn::TransformerEncoderLayer encoder{
      torch::nn::TransformerEncoderLayerOptions(kWidth, 2).dim_feedforward(8).dropout(0.0)};
  torch::nn::Linear middle{torch::nn::LinearOptions(kWidth, kWidth)};
  torch::nn::Linear head{torch::nn::LinearOptions(kWidth, kTokens)};
  torch::jit::Module script{"script"};

  explicit Zoo(double seed = 1, at::ScalarType dtype = at::kFloat) {
    register_module("embedding", embedding);
    register_module("conv", conv);
    register_module("norm", norm);
    register_module("lstm", lstm);
    register_module("gru", gru);
    register_module("encoder", encoder);
    register_module("middle", middle);
    register_module("head", head);
    to(dtype);
    head->weight = embedding->weight;  // tied: one tensor, two uses. The registry keeps the weight that was replaced
    script.register_parameter("weight", training::values({kWidth, kWidth}, 1, dtype).requires_grad_(true), false);
    script.register_parameter("scale", training::values({}, 2, dtype).requires_grad_(true), false);
    script.define(R"(
      def forward(self, x):
          return torch.tanh(torch.matmul(x, self.weight.t())) * self.scale + x
    )");
    const at::NoGradGuard no_grad;
    for (auto& p : trained()) p.copy_(training::values(p.sizes(), seed += 1, dtype) * 0.5);
  }

  /// Once each, without the weight that nobody uses.
  Params trained() const {
    Params out;
    const auto add = [&](const at::Tensor& p) {
      if (std::none_of(out.begin(), out.end(), [&](const at::Tensor& q) { return q.is_same(p); })) out.push_back(p);
    };
    add(embedding->weight);
    for (const auto& p : parameters())
      if (p.sizes() != head->weight.sizes()) add(p);
    for (const auto& p : script.parameters()) add(p);
    return out;
  }

  at::Tensor loss(int step, int rank) {
    const auto tokens = (at::arange(4 * kLength) * (step + 3) + 7 * rank).remainder(kTokens).reshape({4, kLength});
    auto x = embedding->forward(tokens);
    x = conv->forward(x.transpose(1, 2));
    x = norm->forward(x).transpose(1, 2);
    x = std::get<0>(lstm->forward(x)) + x;
    x = std::get<0>(gru->forward(x)) + x;
    x = encoder->forward(x.transpose(0, 1).contiguous()).transpose(0, 1);
    x = script.forward({middle->forward(x)}).toTensor();
    const auto y = head->forward(at::relu(x));
    return torch::nn::functional::cross_entropy(y.reshape({-1, kTokens}), tokens.reshape({-1})) * (1 + 0.5 * rank);
  }
};

}  // namespace zoo
