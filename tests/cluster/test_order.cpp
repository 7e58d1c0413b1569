// Between hosts a fault is collective: what that means for ranks that take different paths.
#include "support/contract.h"

using namespace contract;

TEST_CASE("ranks on two hosts that touch buckets in different order are told so, with both buckets") {
  const auto comm = zero::make_communicator();
  REQUIRE(comm.nodes() == comm.size());
  Params params;
  for (int i = 0; i < 3; ++i) params.push_back(values({16}, i).requires_grad_(true));
  auto opt = zero::wrap(momentum(params),
                        suite::options_for(comm, 3, 1).memory_budget(1).exceed_budget().names({"first", "second", "third"}));
  // In one order: fine, step after step, and never ahead of the touch.
  for (int s = 0; s < 3; ++s) {
    opt.zero_grad();
    (params[0].sum() * params[1].sum() + params[2].square().sum()).backward();
    opt.step();
    REQUIRE(opt.last_step().prefetch_hits == 0);
    REQUIRE(opt.last_step().bytes_gathered >= 3 * 64);
  }
  // Rank 0 wants the first, rank 1 the third: of the same size, so that only the name tells.
  std::string message;
  try {
    (void)params[comm.rank() == 0 ? 0 : 2].sum();
  } catch (const c10::Error& e) {
    message = e.msg();
  }
  INFO(message);
  REQUIRE(message.find("'first'") != std::string::npos);
  REQUIRE(message.find("'third'") != std::string::npos);
  REQUIRE(message.find("gathering parameters") != std::string::npos);
}
