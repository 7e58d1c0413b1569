// What each rank keeps, by counting allocations: LibTorch's allocator for private memory, the process's own mappings for memory
// that ranks share. Both must equal what memory() says and what memory_plan() and the ZeRO formula predict.
#include <malloc.h>

#include <optional>

#include "memory.h"
#include "support/catch.h"
#include "support/training.h"

using namespace training;

namespace {

constexpr std::int64_t kMiB = std::int64_t{1} << 20;

bool within(double value, double expected, double part) { return std::abs(value - expected) <= part * expected; }

struct Measured {
  std::int64_t private_bytes, shared_bytes, pss;
  zero::Memory memory, plan;
};

// Ψ ≈ 6 Mi parameters in awkward sizes; state measured between a backward and the step after it, when all categories are there.
Measured measure(const zero::Communicator& comm, int stage, std::int64_t& psi) {
  malloc_trim(0);  // what malloc has kept from an earlier measurement would be used again unseen
  const std::int64_t private_before = gpt::live_tensor_bytes(), shared_before = gpt::shared_bytes_per_rank(comm.size());
  const std::int64_t pss_before = gpt::proportional_set();
  Params params;
  for (const std::int64_t n : {1000003, 2000003, 17, 1500001, 7, 1800000})
    params.push_back(at::full({n}, 0.5, at::TensorOptions().dtype(at::kFloat)).requires_grad_(true));
  psi = 0;
  for (const auto& p : params) psi += p.numel();
  auto opt = zero::wrap<torch::optim::AdamW>(
      params, torch::optim::AdamWOptions(1e-3),
      zero::Options(comm).stage(static_cast<zero::Stage>(stage)).bucket_bytes(2 * kMiB).memory_budget(9 * kMiB));
  for (int s = 0; s < 2; ++s) {
    opt.zero_grad();
    at::Tensor loss = at::zeros({});
    for (const auto& p : params) loss = loss + (p * p).sum();
    loss.backward();
    if (s == 0) opt.step();
  }
  Measured m{};
  m.private_bytes = gpt::live_tensor_bytes() - private_before;
  m.shared_bytes = gpt::shared_bytes_per_rank(comm.size()) - shared_before;
  malloc_trim(0);
  comm.barrier();
  m.pss = gpt::proportional_set() - pss_before;
  comm.barrier();
  m.memory = opt.memory();
  m.plan = opt.memory_plan();
  return m;
}

}  // namespace

TEST_CASE("resident bytes are the formula plus declared buffers, by counting allocations") {
  gpt::count_allocations();
  const auto comm = zero::make_communicator();
  const double n = comm.size();
  std::int64_t psi = 0;
  measure(comm, 1, psi);  // brings in code pages and the allocator's own
  Measured by_stage[4]{};
  for (int stage : {0, 1, 2, 3}) by_stage[stage] = measure(comm, stage, psi);
  for (int stage : {0, 1, 2, 3}) {
    const auto& m = by_stage[stage];
    INFO("stage " << stage << ", " << n << " ranks: private " << m.private_bytes << ", shared " << m.shared_bytes
                  << ", PSS growth " << m.pss);
    const double bytes = 4.0 * static_cast<double>(psi);
    REQUIRE(within(static_cast<double>(m.memory.parameters), bytes / (stage == 3 ? n : 1), 0.05));
    REQUIRE(within(static_cast<double>(m.memory.gradients), bytes / (stage >= 2 ? n : 1), 0.05));
    REQUIRE(within(static_cast<double>(m.memory.optimizer_state), 2 * bytes / (stage == 0 ? 1 : n), 0.05));
    REQUIRE(within(static_cast<double>(m.plan.parameters), static_cast<double>(m.memory.parameters), 0.01));
    REQUIRE(within(static_cast<double>(m.plan.gradients), static_cast<double>(m.memory.gradients), 0.01));
    REQUIRE(within(static_cast<double>(m.plan.optimizer_state), static_cast<double>(m.memory.optimizer_state), 0.01));
    if (stage < 3)
      REQUIRE(m.plan.buffers == m.memory.buffers);
    else  // whole parameters, as many as happen to be there: the budget at most
      REQUIRE(m.plan.buffers >= m.memory.buffers);
    // Counted from outside: everything, whoever allocated it.
    REQUIRE(within(static_cast<double>(m.private_bytes + m.shared_bytes), static_cast<double>(m.memory.total()), 0.05));
  }
  if (comm.size() > 1) {
    // The trend that the kernel sees, over all ranks: stage 1 saves about 8Ψ(N−1)/N on each.
    auto over_ranks = at::full({}, static_cast<double>(by_stage[0].pss - by_stage[1].pss), at::kDouble);
    comm.all_reduce(over_ranks);
    const double saved = over_ranks.item<double>() / n, expected = 8.0 * static_cast<double>(psi) * (n - 1) / n;
    INFO("PSS growth " << by_stage[0].pss << " at stage 0, " << by_stage[1].pss << " at stage 1; expected to save "
                       << expected);
    REQUIRE(saved > 0.5 * expected);
    REQUIRE(saved < 1.5 * expected);
  }
}

TEST_CASE("gradient memory during backward at stage 2 is a shard, two buckets and one gradient") {
  gpt::count_allocations();
  const auto comm = zero::make_communicator();
  constexpr std::int64_t kBucket = kMiB;
  std::int64_t largest = 0, most = 0;
  Params params, factors;
  for (int i = 0; i < 40; ++i) {
    const std::int64_t n = 20011 + 30011 * (i % 5) + (i == 17 ? 400000 : 0);  // one has a bucket of its own
    params.push_back(at::full({n}, 0.5, at::TensorOptions().dtype(at::kFloat)).requires_grad_(true));
    factors.push_back(at::full({n}, 0.25 + i, at::TensorOptions().dtype(at::kFloat)));
    largest = std::max(largest, n * 4);
  }
  const std::int64_t shared_before = gpt::shared_bytes_per_rank(comm.size());
  auto opt = zero::wrap<torch::optim::SGD>(params, torch::optim::SGDOptions(0.1),
                                           zero::Options(comm).stage(zero::Stage::kGradients).bucket_bytes(kBucket));
  const std::int64_t parameter_bytes = opt.memory().parameters;
  std::int64_t private_before = 0;
  for (const auto& p : params)
    p.register_hook([&](const at::Tensor& g) {  // each gradient, while it is there
      most = std::max(most, gpt::live_tensor_bytes() - private_before);
      return g;
    });
  for (int s = 0; s < 3; ++s) {
    opt.zero_grad();
    at::Tensor loss = at::zeros({});
    for (std::size_t i = 0; i < params.size(); ++i) loss = loss + at::dot(params[i], factors[i]);
    private_before = gpt::live_tensor_bytes();
    if (s > 0) most = 0;  // the first backward learns the order
    loss.backward();
    opt.step();
  }
  const std::int64_t shared = gpt::shared_bytes_per_rank(comm.size()) - shared_before - parameter_bytes;
  const std::int64_t shard = opt.padded_numel() * 4 / comm.size();
  const std::int64_t bound = shard + kBucket + (largest + 64 * comm.size() + kBucket / 100) + largest;
  INFO("private " << most << " (a gradient: up to " << largest << "), shared " << shared << ", shard " << shard << ", bound "
                  << bound);
  if (comm.size() > 1) REQUIRE(most + shared <= bound + bound / 100);
  REQUIRE(most >= largest);  // the measurement sees gradients
}

// Mapped buckets take no memory of their own, so that what is on its way fits where whole parameters would be.
TEST_CASE("memory over a step at stage 3 is the shards, the budget and one gradient; copies add the buckets on their way") {
  gpt::count_allocations();
  const auto comm = zero::make_communicator();
  constexpr std::int64_t kBucket = kMiB, kBudget = 3 * kMiB;
  std::int64_t largest = 0, psi = 0;
  std::vector<std::int64_t> sizes;
  for (int i = 0; i < 40; ++i) {
    sizes.push_back(20011 + 30011 * (i % 5) + (i == 17 ? 400000 : 0));
    largest = std::max(largest, sizes.back() * 4);
    psi += sizes.back();
  }
  const auto factors = at::full({largest / 4}, 0.25, at::TensorOptions().dtype(at::kFloat));
  for (const bool mapped : {true, false}) {
    malloc_trim(0);
    const std::int64_t private_before = gpt::live_tensor_bytes(), shared_before = gpt::shared_bytes_per_rank(comm.size());
    auto optimizer = [&] {
      Params params;
      for (const auto n : sizes)
        params.push_back(at::full({n}, 0.5, at::TensorOptions().dtype(at::kFloat)).requires_grad_(true));
      return std::make_unique<torch::optim::AdamW>(std::move(params), torch::optim::AdamWOptions(1e-3));
    };
    auto opt = zero::wrap(optimizer(), zero::Options(comm)
                                           .stage(zero::Stage::kParameters)
                                           .bucket_bytes(kBucket)
                                           .mapped_shard_bytes(mapped ? 16 << 10 : 0)
                                           .memory_budget(kBudget));
    const auto params = opt.param_groups()[0].params();
    std::int64_t most = 0;
    for (int s = 0; s < 4; ++s) {
      gpt::reset_peaks();
      opt.zero_grad();
      at::Tensor loss = at::zeros({});
      // Nothing but parameters and gradients, and one gradient at a time on the way back.
      for (const auto& p : params) loss = loss + at::dot(p, factors.narrow(0, 0, p.numel()));
      loss.backward();
      opt.step();
      if (s > 1) most = std::max(most, gpt::peak_tensor_bytes() - private_before);
      if (comm.size() > 1) REQUIRE(opt.last_step().peak_resident_parameter_bytes <= kBudget);
    }
    const std::int64_t shared = gpt::shared_bytes_per_rank(comm.size()) - shared_before;
    // 16 bytes per parameter: itself, its gradient and Adam's two moments.
    const std::int64_t shards = 4 * (opt.padded_numel() * 4 / comm.size());
    const std::int64_t in_flight = kBucket + largest + 4096 * comm.size();
    const std::int64_t bound = shards + kBudget + largest + (mapped ? 0 : in_flight);
    INFO("private " << most << ", shared " << shared << ", bound " << bound << " = shards " << shards << " + budget " << kBudget
                    << " + a gradient " << largest << (mapped ? "" : " + buckets on their way ") << (mapped ? 0 : in_flight));
    if (comm.size() > 1) REQUIRE(most + shared <= bound + bound / 100);
    if (comm.size() > 1) REQUIRE(shards <= 16 * psi / comm.size() * 105 / 100);
    REQUIRE(most >= largest);
  }
}

TEST_CASE("building a model under DeferredInit and sharding it never needs the model's memory") {
  const auto comm = zero::make_communicator();
  if (comm.size() == 1) return;
  constexpr std::int64_t kLayers = 24, kNumel = 1000003;  // 4 MB each
  const auto build = [&](std::int64_t layers) {
    Params params;
    at::manual_seed(7);
    for (std::int64_t i = 0; i < layers; ++i)
      params.push_back(at::rand({kNumel}, at::TensorOptions().dtype(at::kFloat)).sub_(0.5).requires_grad_(true));
    return params;
  };
  const auto wrap = [&](Params params) {
    return zero::wrap<torch::optim::SGD>(
        std::move(params), torch::optim::SGDOptions(0.1),
        zero::Options(comm).stage(zero::Stage::kParameters).bucket_bytes(4 * kNumel).memory_budget(9 * kNumel));
  };
  (void)wrap(build(2));  // code pages
  malloc_trim(0);
  gpt::reset_peaks();
  const auto before = gpt::resident_set();
  std::optional<zero::DeferredInit> deferred(std::in_place);
  auto params = build(kLayers);
  const auto built = gpt::peak_resident_set() - before;
  auto opt = wrap(params);
  deferred.reset();
  const auto peak = gpt::peak_resident_set() - before;
  const std::int64_t whole = kLayers * kNumel * 4, one = 4 * kNumel;
  const std::int64_t shards = whole / comm.size();
  INFO("built with " << built << ", sharded with " << peak << ", the model has " << whole << ", a shard " << shards);
  // Gradients' shards and the buckets on their way are there, too, but not touched yet, except for what carries the broadcast.
  REQUIRE(built <= 3 * one);
  REQUIRE(peak <= shards + 5 * one);
  // The same values as without, at every place.
  const auto expected = build(kLayers);
  const at::NoGradGuard no_grad;
  for (std::size_t i = 0; i < params.size(); ++i) REQUIRE(at::equal(params[i], expected[i]));
}
