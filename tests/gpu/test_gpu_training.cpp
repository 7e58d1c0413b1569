// Training on a GPU: ranks are threads that share it, over the host's memory, and one rank over NCCL. Where there is no GPU the program
// says so and exits with 77, which CTest reports as skipped.
#define CATCH_CONFIG_RUNNER
#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/cuda.h>

#include <cmath>
#include <cstdio>
#include <limits>

#include "support/catch.h"
#include "support/optimizer_suite.h"
#include "zero/nccl.h"
#include "zero/staged.h"

using namespace training;
using torch::optim::AdamW;
using torch::optim::AdamWOptions;
using torch::optim::SGD;
using torch::optim::SGDOptions;

namespace {

const c10::Device kGpu(c10::kCUDA, 0);
const double kInf = std::numeric_limits<double>::infinity();

Params on(c10::Device device, const Params& params) {
  Params out;
  for (const auto& p : params) out.push_back(p.detach().to(device).requires_grad_(true));
  return out;
}

/// Five steps on every rank; the last rank's parameters, on the CPU.
Params trained(int ranks, int stage, c10::Device device, at::ScalarType type, const Factory& make,
               const std::function<zero::Options(zero::Options)>& with) {
  Params result;
  zero::run_ranks(ranks, [&](const zero::Communicator& host) {
    const auto comm = device.is_cpu() ? host : zero::make_staged_communicator(host, device);
    Model model(type);
    model.params = on(device, model.params);
    auto options = with(suite::options_for(comm, stage)).names(Model::names());
    auto opt = zero::wrap(make(model.params), options);
    for (int s = 0; s < 5; ++s) {
      opt.zero_grad();
      model.loss(batch(s, comm.rank(), type).to(device)).backward();
      opt.step();
    }
    expect(opt.last_step().applied, "a step was skipped: ", opt.last_step().reason);
    Params here;
    for (const auto& p : model.params) here.push_back(p.detach().to(at::kCPU).clone());
    expect_equal_on_ranks(host, here);
    if (comm.rank() == ranks - 1) result = here;
  });
  return result;
}

}  // namespace

TEST_CASE("GPU: stages 0 to 3 train as on the CPU, with the same bits at every stage", "[gpu]") {
  const auto adamw = [](Params p) { return std::make_unique<AdamW>(std::move(p), AdamWOptions(0.01).weight_decay(0.1)); };
  const auto sgd = [](Params p) { return std::make_unique<SGD>(std::move(p), SGDOptions(0.05).momentum(0.9)); };
  const auto plain = [](zero::Options o) { return o; };
  const auto clipped = [](zero::Options o) { return o.max_grad_norm(0.05).skip_nonfinite(true); };
  for (const Factory& make : {Factory(adamw), Factory(sgd)}) {
    for (const auto& with : {std::function<zero::Options(zero::Options)>(plain), {clipped}}) {
      for (const auto type : {at::kDouble, at::kBFloat16}) {
        for (const int ranks : {1, 2, 3}) {
          Params first;
          for (const int stage : suite::stages()) {
            INFO(c10::toString(type) << ", " << ranks << " ranks, stage " << stage);
            const auto there = trained(ranks, stage, kGpu, type, make, with);
            if (stage == 0) {
              first = there;
              // Matrix products differ by rounding, in 16 bits by a place of the parameter.
              const double d = distance(there, trained(ranks, stage, c10::Device(c10::kCPU), type, make, with));
              REQUIRE(d < (type == at::kDouble ? 1e-9 : 0.1));
            } else {
              REQUIRE(same_bits(there, first));
            }
          }
        }
      }
    }
  }
}

TEST_CASE("GPU: an overflow is skipped by all ranks, and the scale follows, without the host's being told", "[gpu]") {
  zero::run_ranks(2, [](const zero::Communicator& host) {
    const auto comm = zero::make_staged_communicator(host, kGpu);
    Params params{values({23}, 1, at::kHalf).to(kGpu).requires_grad_(true)};
    auto opt = zero::wrap<AdamW>(params, AdamWOptions(0.01), zero::Options(comm));
    const zero::LossScaler scaler(opt);
    const auto step = [&](double gradient) {
      opt.zero_grad();
      scaler.scale((params[0] * at::full({23}, gradient, params[0].options())).sum()).backward();
      opt.step();
    };
    step(1e-3);
    const auto before = params[0].detach().clone();
    step(comm.rank() == 1 ? kInf : 1e-3);
    expect(at::equal(params[0].detach(), before), "a skipped step has changed a parameter");
    expect(!opt.last_step().applied && scaler.current() == 32768, "scale ", scaler.current());
    step(1e-3);
    expect(opt.last_step().applied && !at::equal(params[0].detach(), before), "the step after it");
  });
}

TEST_CASE("GPU: one rank over NCCL, and its step in a CUDA graph", "[gpu]") {
  const auto comm = zero::make_nccl_communicator(zero::make_self_communicator(), kGpu);
  Params eager{values({1000}, 1, at::kFloat).to(kGpu).requires_grad_(true)};
  Params replayed = on(kGpu, eager);
  auto a = zero::wrap<AdamW>(eager, AdamWOptions(0.01), zero::Options(comm).max_grad_norm(1));
  auto b = zero::wrap<AdamW>(replayed, AdamWOptions(0.01), zero::Options(comm).max_grad_norm(1));
  const auto gradient = [](int s) { return values({1000}, 3 + s, at::kFloat).to(kGpu); };
  const auto stream = c10::cuda::getStreamFromPool(/*isHighPriority=*/false, kGpu.index());
  const c10::cuda::CUDAStreamGuard guard(stream);
  for (auto* p : {&eager[0], &replayed[0]}) p->mutable_grad() = at::zeros_like(*p);
  for (int s = 0; s < 2; ++s) {  // whatever is made once
    eager[0].mutable_grad().copy_(gradient(s)), replayed[0].mutable_grad().copy_(gradient(s));
    a.step(), b.step();
  }
  stream.synchronize();
  at::cuda::CUDAGraph graph;
  graph.capture_begin();
  b.step();
  graph.capture_end();
  for (int s = 2; s < 6; ++s) {
    eager[0].mutable_grad().copy_(gradient(s)), replayed[0].mutable_grad().copy_(gradient(s));
    a.step();
    graph.replay();
  }
  stream.synchronize();
  REQUIRE(same_bits(eager, replayed));
  REQUIRE(b.last_step().grad_norm.value() == a.last_step().grad_norm.value());
  REQUIRE(a.last_step().clip_factor < 1);
}

int main(int argc, char** argv) {
  if (!torch::cuda::is_available()) {
    std::printf("skipped: no CUDA device\n");
    return 77;
  }
  return Catch::Session().run(argc, argv);
}
