// One rank per host: the bytes that a step is said to send are the bytes that leave the host's network interface.
#include <algorithm>
#include <cstdlib>
#include <fstream>

#include "support/catch.h"
#include "support/training.h"

using namespace training;

namespace {

std::int64_t bytes_out() {
  const char* interface = std::getenv("ZERO_CLUSTER_INTERFACE");
  std::ifstream file(std::string("/sys/class/net/") + (interface != nullptr ? interface : "eth0") + "/statistics/tx_bytes");
  std::int64_t bytes = -1;
  file >> bytes;
  return bytes;
}

}  // namespace

TEST_CASE("bytes sent per step equal the interface's counter") {
  const auto comm = zero::make_communicator();
  REQUIRE(comm.nodes() == comm.size());
  for (int stage : {0, 1}) {
    Params params;
    for (const std::int64_t n : {3000017, 1000003, 129}) params.push_back(at::full({n}, 0.5, at::kFloat).requires_grad_(true));
    auto opt = zero::wrap<torch::optim::AdamW>(
        params, torch::optim::AdamWOptions(1e-3),
        zero::Options(comm).stage(static_cast<zero::Stage>(stage)).bucket_bytes(std::int64_t{4} << 20));
    double least = 1e9;
    for (int s = 0; s < 5; ++s) {
      opt.zero_grad();
      for (auto& p : params) p.mutable_grad() = at::full_like(p, 0.25 * (comm.rank() + 1));
      comm.barrier();
      const auto before = bytes_out();
      opt.step();
      comm.barrier();
      const auto out = bytes_out() - before;
      const auto expected = 2 * opt.padded_numel() * 4 / comm.size() * (comm.size() - 1);
      REQUIRE(before >= 0);
      REQUIRE(opt.last_step().bytes_sent == expected);
      INFO("stage " << stage << ", step " << s << ": " << out << " bytes left the interface, " << expected << " were counted");
      REQUIRE(out > expected);
      least = std::min(least, static_cast<double>(out) / static_cast<double>(expected));
    }
    INFO("stage " << stage << ": at least " << least << " of what was counted left the interface in each step");
    if (comm.rank() == 0) std::printf("traffic: stage %d: bytes that left the interface / bytes counted: %.4f\n", stage, least);
    // Ethernet, IP and TCP headers are 66 bytes for each 1448; the peer's data are acknowledged with empty segments. The best of the
    // steps, since a machine that keeps a rank from its processor makes TCP send segments twice; what isn't counted is sent in all.
    REQUIRE(least < 1.08);
  }
}
