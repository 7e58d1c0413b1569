// A TorchScript module shows parameters and nothing else: no class of its own, no hooks, its own interpreter and optimiser of graphs.
#include <torch/csrc/jit/api/module.h>

#include "support/contract.h"

using namespace contract;

namespace {

torch::jit::Module scripted() {
  torch::jit::Module module("scripted");
  module.register_parameter("weight", values({6, 4}, 1), false);
  module.register_parameter("bias", values({6}, 2), false);
  module.register_parameter("scale", values({}, 3) + 1.5, false);
  module.register_parameter("unused", values({3}, 4), false);
  module.define(R"(
    def forward(self, x, deep: bool):
        y = torch.tanh(torch.matmul(x, self.weight.t()) + self.bias)
        if deep:
            y = y * self.scale + torch.relu(y)
        return y.square().mean()
  )");
  for (const auto& p : module.parameters()) at::Tensor(p).requires_grad_(true);
  return module;
}

Params parameters_of(const torch::jit::Module& module) {
  Params out;
  for (const auto& p : module.parameters()) out.push_back(p);
  return out;
}

}  // namespace

TEST_CASE("D14 the parameters of a TorchScript module train as with torch::optim") {
  everywhere([](const Communicator& comm, Options options) {
    auto plain_module = scripted(), module = scripted();
    const auto plain_params = parameters_of(plain_module), params = parameters_of(module);
    auto plain = adamw(plain_params);
    auto opt = zero::wrap(adamw(params), options);
    const auto loss = [](torch::jit::Module& m, int s, int rank) {
      return m.forward({values({5, 4}, 3.0 * s + rank), s % 3 != 1}).toTensor();
    };
    for (int s = 0; s < 6; ++s) {  // more than the profiling executor needs before it optimises
      plain->zero_grad(), opt.zero_grad();
      for (int r = 0; r < comm.size(); ++r) (loss(plain_module, s, r) / comm.size()).backward();
      loss(module, s, comm.rank()).backward();
      torch::nn::utils::clip_grad_norm_(plain_params, 0.1), torch::nn::utils::clip_grad_norm_(params, 0.1);
      plain->step(), opt.step();
    }
    expect_close(params, plain_params, "TorchScript");
    expect_equal_on_ranks(comm, params);
  });
}
