// Stage 3 on LibTorch's own layers, unchanged: the bits of stage 0, with any budget and a user's own class. Run on threads, under
// mpirun, and on two hosts.
#pragma once

#include "support/contract.h"
#include "support/zoo.h"

namespace zoo {

using namespace contract;

struct Result {
  Params params;
  std::vector<float> losses;
  Params buffers;
};

inline Result train(const Communicator& comm, int stage, int optimizer, std::int64_t budget, bool prefetch = true) {
  Zoo model;
  const auto params = model.trained();
  auto options = suite::options_for(comm, stage, 700).memory_budget(budget).prefetch(prefetch).exceed_budget();
  std::unique_ptr<torch::optim::Optimizer> inner;
  if (optimizer == 0) inner = adamw(params);
  if (optimizer == 1) inner = momentum(params);
  if (optimizer == 2) inner = std::make_unique<SignDescent>(params);
  auto opt = zero::wrap(std::move(inner), options);
  Result out;
  for (int s = 0; s < 4; ++s) {
    opt.zero_grad();
    const auto loss = model.loss(s, comm.rank());
    loss.backward();
    if (optimizer == 0) torch::nn::utils::clip_grad_norm_(params, 0.3);
    opt.step();
    out.losses.push_back(loss.item<float>());
  }
  model.eval();
  {
    const at::NoGradGuard no_grad;
    out.losses.push_back(model.loss(9, comm.rank()).item<float>());
  }
  {
    const c10::InferenceMode inference;
    out.losses.push_back(model.loss(10, comm.rank()).item<float>());
  }
  out.params = copies(params);
  out.buffers = copies(model.buffers());
  return out;
}

inline void has_the_same_bits_everywhere(const Communicator& comm) {
  for (int optimizer : {0, 1, 2}) {
    const auto expected = train(comm, 0, optimizer, 0);
    const auto check = [&](const Result& got, const char* what) {
      expect(got.losses == expected.losses, what, ": other losses, optimizer ", optimizer);
      expect(same_bits(got.params, expected.params), what, ": other parameters, optimizer ", optimizer, ", by ",
             distance(got.params, expected.params));
      expect(same_bits(got.buffers, expected.buffers), what, ": other buffers, optimizer ", optimizer);
      expect_equal_on_ranks(comm, got.params);
    };
    check(train(comm, 2, optimizer, 0), "stage 2");
    check(train(comm, 3, optimizer, 1), "stage 3, least budget");
    check(train(comm, 3, optimizer, 0), "stage 3, default budget");
    check(train(comm, 3, optimizer, 1 << 20), "stage 3, ample budget");
    check(train(comm, 3, optimizer, 2000, false), "stage 3, nothing fetched ahead");
  }
}

}  // namespace zoo
