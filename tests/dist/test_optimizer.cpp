// Results of ZeroOptimizer against torch::optim, on ranks that are threads.
#include "support/catch.h"
#include "support/optimizer_suite.h"

namespace {

void on_threads(void (*check)(const zero::Communicator&), std::vector<int> worlds = {1, 2, 3, 4}) {
  zero::WaitPolicy policy;
  policy.timeout = std::chrono::seconds(30);
  for (int n : worlds) {
    INFO(n << " ranks");
    REQUIRE_NOTHROW(zero::run_ranks(n, policy, check));
  }
}

}  // namespace

TEST_CASE("every optimizer equals torch::optim in double at every stage") { on_threads(suite::equals_torch_in_double); }
TEST_CASE("all stages give the same bits") { on_threads(suite::stages_give_the_same_bits); }
TEST_CASE("bytes sent are 2 psi (N-1)/N") { on_threads(suite::bytes_sent_are_the_formula); }
