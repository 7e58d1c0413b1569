// The same under mpirun.
#include "support/catch.h"
#include "support/optimizer_suite.h"

TEST_CASE("every optimizer equals torch::optim in double at every stage") {
  REQUIRE_NOTHROW(suite::equals_torch_in_double(zero::make_communicator()));
}
TEST_CASE("all stages give the same bits") { REQUIRE_NOTHROW(suite::stages_give_the_same_bits(zero::make_communicator())); }
TEST_CASE("bytes sent are 2 psi (N-1)/N") { REQUIRE_NOTHROW(suite::bytes_sent_are_the_formula(zero::make_communicator())); }
