// Trains a chain of large layers, built in files, for a few steps: what tests/memory_cap/run.sh puts under a memory limit.
#include <ATen/Parallel.h>
#include <torch/optim/sgd.h>
#include <zero/zero.h>

#include <cstdio>
#include <cstdlib>
#include <optional>
#include <vector>

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fprintf(stderr, "usage: cap_worker STAGE\n");
    return 2;
  }
  constexpr std::int64_t kWidth = 2048, kLayers = 20, kBytes = kWidth * kWidth * 4;  // 16 MiB each
  try {
    at::set_num_threads(1);
    const auto comm = zero::make_communicator();
    std::optional<zero::DeferredInit> deferred(std::in_place);
    at::manual_seed(1);
    std::vector<at::Tensor> layers;
    for (std::int64_t i = 0; i < kLayers; ++i)
      layers.push_back(at::randn({kWidth, kWidth}).mul_(0.7 / 45.25).requires_grad_(true));
    auto opt = zero::wrap<torch::optim::SGD>(
        layers, torch::optim::SGDOptions(0.5),
        zero::Options(comm).stage(static_cast<zero::Stage>(std::atoi(argv[1]))).bucket_bytes(kBytes).memory_budget(2 * kBytes));
    deferred.reset();
    for (int step = 0; step < 3; ++step) {
      opt.zero_grad();
      auto x = at::sin(at::arange(8 * kWidth, at::kFloat).reshape({8, kWidth}) * (1 + comm.rank()));
      for (const auto& w : layers) x = at::tanh(at::matmul(x, w)) + x;
      const auto loss = x.square().mean();
      loss.backward();
      opt.step();
      if (comm.rank() == 0) std::printf("step %d loss %.9g\n", step + 1, loss.item<double>());
    }
    return 0;
  } catch (const std::exception& e) {
    std::fprintf(stderr, "cap_worker: %s\n", e.what());
    return 1;
  }
}
