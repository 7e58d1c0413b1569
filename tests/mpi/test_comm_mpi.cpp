// Communicators over MPI: the conformance suite in shared memory, with every rank a node of its own, and with nodes of two ranks.
// Run by mpirun at 2, 3 and 4 ranks; tests/cluster runs it over two hosts.
#include <fstream>

#include "comm_conformance.h"
#include "support/catch.h"
#include "zero/mpi.h"

using namespace zero;

namespace {

// A communicator for each check, so that one which breaks its own doesn't disturb the next.
template <std::size_t N>
void run_checks(const conformance::Check (&checks)[N]) {
  for (const auto& check : checks) {
    INFO(check.name);
    REQUIRE_NOTHROW([&] {
      const auto comm = make_mpi_communicator(MPI_COMM_WORLD);
      conformance::expect(std::string(comm.backend()) == "mpi", comm, "who it is");
      check.run(comm);
      comm.barrier();
    }());
  }
}

struct Variable {
  Variable(const char* name, const char* value) : name_(name), before_(std::getenv(name) != nullptr ? std::getenv(name) : "") {
    setenv(name, value, 1);
  }
  ~Variable() { before_.empty() ? unsetenv(name_) : setenv(name_, before_.c_str(), 1); }
  const char* name_;
  std::string before_;
};

// Mappings of this process whose file has `name` in its path.
int mappings_of(const std::string& name) {
  std::ifstream maps("/proc/self/maps");
  std::string line;
  int count = 0;
  while (std::getline(maps, line)) count += line.find(name) != std::string::npos ? 1 : 0;
  return count;
}

}  // namespace

TEST_CASE("ranks conform") { run_checks(conformance::kChecks); }

TEST_CASE("ranks conform in small chunks") {
  const Variable small("ZERO_STAGING_BYTES", "50000");
  run_checks(conformance::kMoving);
}

TEST_CASE("ranks conform when each is a node of its own") {
  const Variable apart("ZERO_NODE_SHARING", "0");
  {
    const auto comm = make_mpi_communicator(MPI_COMM_WORLD);
    CHECK(comm.local_size() == 1);
    CHECK(comm.nodes() == comm.size());
  }
  run_checks(conformance::kChecks);
  const Variable small("ZERO_STAGING_BYTES", "50000");
  run_checks(conformance::kMoving);
}

TEST_CASE("nodes of two ranks conform") {
  const Variable pairs("ZERO_NODE_SHARING", "2");
  {
    const auto comm = make_mpi_communicator(MPI_COMM_WORLD);
    CHECK(comm.local_size() <= 2);
  }
  run_checks(conformance::kChecks);
  const Variable small("ZERO_STAGING_BYTES", "50000");
  run_checks(conformance::kMoving);
}

TEST_CASE("any communicator of MPI's, which stays the program's") {
  int rank = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm odd_and_even = MPI_COMM_NULL;
  MPI_Comm_split(MPI_COMM_WORLD, rank % 2, -rank, &odd_and_even);
  const auto comm = make_mpi_communicator(odd_and_even);
  MPI_Comm_free(&odd_and_even);
  const auto ranks = comm.exchange(std::to_string(rank));
  CHECK(ranks[static_cast<std::size_t>(comm.rank())] == std::to_string(rank));
  CHECK_THROWS_AS(make_mpi_communicator(MPI_COMM_NULL), c10::Error);
}

TEST_CASE("make_communicator takes the whole job, init_mpi may be called again") {
  init_mpi();
  int size = 0;
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  const auto comm = make_communicator();
  CHECK(comm.size() == size);
  CHECK(std::string(comm.backend()) == "mpi");
}

TEST_CASE("shared memory has no name in /dev/shm") {
  const int before = mappings_of("/dev/shm/");
  const auto comm = make_mpi_communicator(MPI_COMM_WORLD);
  const int ours = mappings_of("/memfd:zero");
  const auto buffer = comm.allocate(1 << 20, "a test");
  CHECK(mappings_of("/memfd:zero") == ours + comm.local_size());
  CHECK(mappings_of("/dev/shm/") == before);
}
