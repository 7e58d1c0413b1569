#include "support/zoo_suite.h"

TEST_CASE("a model of LibTorch's own layers has the same bits at every stage and with any budget") {
  contract::on_threads({1, 2, 3, 4}, zoo::has_the_same_bits_everywhere);
}
