// One training run, with zero and without.
#pragma once

#include <zero/communicator.h>

#include <memory>
#include <string>
#include <vector>

#include "report.h"
#include "settings.h"

namespace at {
class Tensor;
}
namespace torch::optim {
class Optimizer;
}

namespace gpt {

class Model;

struct Run {
  Measurements measured;
  std::shared_ptr<Model> model;
};

/// Collective. Trains on the ranks of `comm` (gpt.cpp).
Run train(const Settings& settings, const std::string& text, const zero::Communicator& comm);

/// The same without zero: an ordinary LibTorch trainer in one process (plain.cpp).
Run train_plain(const Settings& settings, const std::string& text);

/// Collective. Runs a few steps at every stage, then trains; prints what `--quickstart` promises (quickstart.cpp).
void quickstart(const Settings& settings, const std::string& text, const zero::Communicator& comm);

/// The torch::optim optimizer that the settings name (plain.cpp).
std::unique_ptr<torch::optim::Optimizer> make_optimizer(const Settings& settings, std::vector<at::Tensor> parameters);

}  // namespace gpt
