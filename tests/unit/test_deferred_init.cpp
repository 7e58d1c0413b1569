// Tensors in files: refusals, and values. What it does to memory is in tests/mpi/test_memory_mpi.cpp.
#include "zero/deferred_init.h"

#include <fstream>
#include <iterator>
#include <string>

#include "support/catch.h"
#include "support/training.h"

using namespace training;

TEST_CASE("DeferredInit passes over folders in memory, and models are the same to the bit") {
  if (std::ifstream("/proc/mounts").good()) {
    std::ifstream mounts("/proc/mounts");
    std::string text((std::istreambuf_iterator<char>(mounts)), std::istreambuf_iterator<char>());
    if (text.find(" /dev/shm tmpfs") != std::string::npos)
      REQUIRE_NOTHROW(
          expect_error({"DeferredInit", "/dev/shm", "tmpfs"}, [] { const zero::DeferredInit deferred("/dev/shm"); }));
  }
  REQUIRE_NOTHROW(
      expect_error({"DeferredInit", "/no/such/folder"}, [] { const zero::DeferredInit deferred("/no/such/folder"); }));
  const auto build = [] {
    at::manual_seed(3);
    return Params{at::randn({40000}), at::rand({3}), at::empty({0}), at::randn({50000}).mul_(2)};
  };
  const auto expected = build();
  Params got;
  {
    const zero::DeferredInit deferred({}, 0);
    got = build();
  }
  REQUIRE(same_bits(got, expected));
}
