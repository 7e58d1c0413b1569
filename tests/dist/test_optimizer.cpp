// Results of ZeroOptimizer against torch::optim, on ranks that are threads.
#include "support/catch.h"
#include "support/optimizer_suite.h"

namespace {

// Results are the same under a sanitizer, which takes ten times as long: then at the one size that nothing divides by.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
const std::vector<int> kWorlds{3};
#else
const std::vector<int> kWorlds{1, 2, 3, 4};
#endif

void on_threads(void (*check)(const zero::Communicator&), const std::vector<int>& worlds = kWorlds) {
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
