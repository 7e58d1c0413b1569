// What each rank keeps, by counting allocations: LibTorch's allocator for private memory, the process's own mappings for memory
// that ranks share. Both must equal what memory() says and what memory_plan() and the ZeRO formula predict.
#include <malloc.h>

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
  auto opt = zero::wrap<torch::optim::AdamW>(params, torch::optim::AdamWOptions(1e-3),
                                             zero::Options(comm).stage(static_cast<zero::Stage>(stage)).bucket_bytes(2 * kMiB));
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
  Measured by_stage[2]{measure(comm, 0, psi), {}};
  by_stage[1] = measure(comm, 1, psi);
  for (int stage : {0, 1}) {
    const auto& m = by_stage[stage];
    INFO("stage " << stage << ", " << n << " ranks: private " << m.private_bytes << ", shared " << m.shared_bytes
                  << ", PSS growth " << m.pss);
    const double bytes = 4.0 * static_cast<double>(psi);
    REQUIRE(within(static_cast<double>(m.memory.parameters), bytes, 0.05));
    REQUIRE(within(static_cast<double>(m.memory.gradients), bytes, 0.05));
    REQUIRE(within(static_cast<double>(m.memory.optimizer_state), 2 * bytes / (stage == 0 ? 1 : n), 0.05));
    REQUIRE(within(static_cast<double>(m.plan.parameters), static_cast<double>(m.memory.parameters), 0.01));
    REQUIRE(within(static_cast<double>(m.plan.gradients), static_cast<double>(m.memory.gradients), 0.01));
    REQUIRE(within(static_cast<double>(m.plan.optimizer_state), static_cast<double>(m.memory.optimizer_state), 0.01));
    REQUIRE(m.plan.buffers == m.memory.buffers);
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
