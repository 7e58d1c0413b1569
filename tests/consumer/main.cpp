// Fits a line with the installed library, in a world of one. Light LibTorch headers: this is compiled in every test run.
#include <ATen/ATen.h>
#include <torch/optim/adamw.h>

#include <cstdio>

#include "zero/zero.h"

int main() {
  at::manual_seed(1);
  const at::Tensor x = at::randn({64, 3});
  const at::Tensor y = x.matmul(at::tensor({1.0F, -2.0F, 0.5F}).unsqueeze(1));
  at::Tensor weight = at::zeros({3, 1}).requires_grad_(true);

  auto optimizer = zero::wrap<torch::optim::AdamW>(std::vector<at::Tensor>{weight}, torch::optim::AdamWOptions(0.1),
                                                   zero::Options(zero::make_communicator()));
  double first = 0, last = 0;
  for (int step = 0; step < 50; ++step) {
    optimizer.zero_grad();
    const at::Tensor loss = (x.matmul(weight) - y).pow(2).mean();
    loss.backward();
    zero::clip_grad_norm_(optimizer, 10.0);
    optimizer.step();
    last = loss.item<double>();
    if (step == 0) first = last;
  }
  const bool learned = last < 0.05 * first && optimizer.last_step().applied && optimizer.comm().size() == 1;
  std::printf("loss %g -> %g: %s\n", first, last, learned ? "ok" : "FAILED");
  return learned ? 0 : 1;
}
