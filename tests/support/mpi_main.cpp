// main() of the tests that run under mpirun.
//
// Every rank runs every test case, in the order of declaration. A check that fails on one rank would leave the others waiting in
// the next collective: so a rank whose test case has failed says so and ends the job, after a moment in which the ranks that
// failed for the same reason can report too. The first failing test case is therefore the last one run.
#define CATCH_CONFIG_RUNNER
#include "support/catch.h"

#include <mpi.h>

#include <chrono>
#include <cstdio>
#include <iostream>
#include <string>
#include <thread>
#include <vector>

#include "zero/mpi.h"

namespace {

#ifdef ZERO_TEST_CATCH3
using ListenerBase = Catch::EventListenerBase;
std::string name_of(const Catch::TestCaseStats& stats) { return stats.testInfo->name; }
#else
using ListenerBase = Catch::TestEventListenerBase;
std::string name_of(const Catch::TestCaseStats& stats) { return stats.testInfo.name; }
#endif

struct EndJobOnFailure : ListenerBase {
  using ListenerBase::ListenerBase;

  void testCaseEnded(const Catch::TestCaseStats& stats) override {
    if (stats.totals.assertions.failed == 0 || stats.totals.testCases.failed == 0) return;
    int rank = -1;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    std::cout.flush();
    std::fprintf(stderr, "rank %d: test case failed: %s\n", rank, name_of(stats).c_str());
    std::this_thread::sleep_for(std::chrono::seconds(2));
    MPI_Abort(MPI_COMM_WORLD, 1);
  }
};
CATCH_REGISTER_LISTENER(EndJobOnFailure)

}  // namespace

int main(int argc, char* argv[]) {
  zero::init_mpi();
  int rank = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  // One full report is enough; the other ranks add what fails.
  std::vector<char*> args(argv, argv + argc);
  std::string reporter = "--reporter=compact";
  if (rank != 0) args.push_back(reporter.data());
  return Catch::Session().run(static_cast<int>(args.size()), args.data());
}
