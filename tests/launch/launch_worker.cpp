// A rank under zero-run.
//   launch_worker conform         the conformance suite of communicators, and a few training steps
//   launch_worker fail RANK       that rank ends with status 7 at its second barrier; the others say what they notice
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <string>

#include "support/optimizer_suite.h"
#include "unit/comm_conformance.h"

int main(int argc, char** argv) try {
  const std::string what = argc > 1 ? argv[1] : "";
  auto comm = zero::make_communicator();
  if (what == "conform") {
    for (const auto& check : zero::conformance::kChecks) check.run(comm.duplicate());
    suite::expect(std::string(comm.backend()) == "launched" && comm.local_size() == comm.size(), "who it is");
    const auto again = zero::make_communicator();
    suite::expect(again.size() == comm.size() && !(again == comm), "a second communicator");
    const auto expected = suite::reference(suite::optimizers()[2].second, comm.size(), 3);
    for (int stage : suite::stages()) {
      const auto got = suite::wrapped(comm, suite::optimizers()[2].second, 3, suite::options_for(comm, stage));
      suite::expect(suite::distance(got, expected) < 1e-12, "stage ", stage, " differs from torch::optim");
    }
    return 0;
  }
  suite::expect(what == "fail" && argc == 3, "usage: launch_worker conform | fail RANK");
  comm.barrier("first");
  if (comm.rank() == std::atoi(argv[2])) std::_Exit(7);
  comm.barrier("second");
  return 0;
} catch (const std::exception& e) {
  std::fprintf(stderr, "launch_worker: %s\n", e.what());
  return 3;
}
