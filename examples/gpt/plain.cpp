// The trainer as it is without zero: compare train() in gpt.cpp with this.
#include <torch/nn/utils/clip_grad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include "memory.h"
#include "model.h"
#include "recorder.h"
#include "text.h"
#include "train.h"

namespace gpt {

std::unique_ptr<torch::optim::Optimizer> make_optimizer(const Settings& s, std::vector<at::Tensor> parameters) {
  namespace optim = torch::optim;
  if (s.optimizer == "sgd") return std::make_unique<optim::SGD>(std::move(parameters), optim::SGDOptions(s.lr).momentum(0.9));
  if (s.optimizer == "adam")
    return std::make_unique<optim::Adam>(std::move(parameters), optim::AdamOptions(s.lr).betas({0.9, 0.95}).eps(1e-8));
  return std::make_unique<optim::AdamW>(std::move(parameters),
                                        optim::AdamWOptions(s.lr).betas({0.9, 0.95}).eps(1e-8).weight_decay(0.1));
}

Run train_plain(const Settings& settings, const std::string& text) {
  Recorder recorder(settings, zero::make_self_communicator());
  const Size& size = size_named(settings.model);
  auto model = std::make_shared<Model>(size);
  model->to(type_named(settings.dtype));
  const Batches batches(text, size.context, settings.seed);
  auto optimizer = make_optimizer(settings, model->parameters());

  zero::Memory kept;
  kept.parameters = kept.gradients =
      static_cast<std::int64_t>(c10::elementSize(type_named(settings.dtype))) * model->parameter_count();
  double loss = 0;
  do {
    recorder.begin_step();
    optimizer->zero_grad();
    loss = 0;
    for (std::int64_t micro = 0; micro < settings.accumulate; ++micro) {
      const auto [inputs, targets] = batches.get({recorder.step(), micro, settings.accumulate, 0, 1}, settings.micro_batch);
      const auto micro_loss = model->forward(inputs, targets) / static_cast<double>(settings.accumulate);
      micro_loss.backward();
      loss += micro_loss.item<double>();
    }
    if (settings.clip > 0) torch::nn::utils::clip_grad_norm_(model->parameters(), settings.clip);
    recorder.before_update(kept);
    const std::int64_t live = live_tensor_bytes();
    optimizer->step();
    if (recorder.step() == 0) kept.optimizer_state = live_tensor_bytes() - live;  // the first step makes it
  } while (recorder.end_step(loss, /*report=*/{}));

  return {recorder.finish(model->parameter_count(), model->parameter_count(), kept), model};
}

}  // namespace gpt
