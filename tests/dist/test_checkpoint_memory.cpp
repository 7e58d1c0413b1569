// Most memory that saving and loading take beyond what is there: nothing to save (a copy of the shards in the background), the shards'
// state and a bucket to load. By the process's own high-water mark; ranks are threads, so it is the sum over ranks.
#include <fstream>
#include <string>

#include "support/catch.h"
#include "support/checkpoints.h"

using namespace checkpoints;
using torch::optim::AdamW;
using torch::optim::AdamWOptions;

namespace {

constexpr std::int64_t kMiB = std::int64_t{1} << 20;
constexpr std::int64_t kElements = kMiB;  // of a parameter: 4 MiB in float32
constexpr int kParameters = 16;           // 64 MiB
constexpr std::int64_t kBucket = 8 * kMiB;
constexpr std::int64_t kAllowance = 6 * kMiB;  // of whatever else is made meanwhile

std::int64_t status(const std::string& field) {
  std::ifstream in("/proc/self/status");
  for (std::string line; std::getline(in, line);)
    if (line.rfind(field + ":", 0) == 0) return std::stoll(line.substr(field.size() + 1)) * 1024;
  return 0;
}

// By how much the peak exceeds what is resident at the beginning.
template <typename Body>
std::int64_t growth(const Communicator& comm, Body body) {
  comm.barrier();
  std::int64_t before = 0;
  if (comm.rank() == 0) {
    std::ofstream("/proc/self/clear_refs") << "5";
    before = status("VmRSS");
  }
  comm.barrier();
  body();
  comm.barrier();
  return comm.rank() == 0 ? status("VmHWM") - before : 0;
}

struct Large {
  Params params;
  zero::ZeroOptimizer opt;
  Large(const Communicator& comm, int stage, float value)
      : params(make(value)), opt(zero::wrap<AdamW>(params, AdamWOptions(0.01), suite::options_for(comm, stage, kBucket))) {}
  static Params make(float value) {
    Params out;
    for (int i = 0; i < kParameters; ++i) out.push_back(at::full({kElements}, value, at::kFloat).requires_grad_(true));
    return out;
  }
  void step() {
    for (auto& p : params) p.sum().backward();
    opt.step();
    opt.zero_grad();
  }
};

}  // namespace

TEST_CASE("saving takes no memory, loading what it makes and a bucket") {
  const auto total = 4 * kElements * kParameters;
  for (int stage = 1; stage <= 3; ++stage) {
    INFO("stage " << stage);
    const test::Folder folder;
    REQUIRE_NOTHROW(on_ranks(2, [&](const Communicator& comm) {
      Large it(comm, stage, 1);
      it.step(), it.step();
      const auto saving = growth(comm, [&] { zero::save(folder.path(), {}, it.opt); });
      expect(saving <= kAllowance, "save: ", saving / kMiB, " MiB");
      const auto background = growth(comm, [&] {
        zero::save(folder.path(), {}, it.opt, {}, zero::SaveOptions().async());
        zero::wait_for_save(it.opt);
      });
      expect(background <= 3 * total + kAllowance, "in the background: ", background / kMiB, " MiB");
      const auto again = growth(comm, [&] { zero::load(folder.path(), {}, it.opt); });
      expect(again <= kBucket + kAllowance, "load over a state that is there: ", again / kMiB, " MiB");
      const auto exported = growth(comm, [&] { zero::export_model(folder.path() + "/m", {}, it.opt, at::kHalf); });
      expect(exported <= kBucket + kAllowance, "export: ", exported / kMiB, " MiB");
    }));
    REQUIRE_NOTHROW(on_ranks(2, [&](const Communicator& comm) {
      Large it(comm, stage, 2);
      const auto loading = growth(comm, [&] { zero::load(folder.path(), {}, it.opt); });
      expect(loading <= 2 * total + 2 * kBucket + kAllowance, "load: ", loading / kMiB, " MiB for ", 2 * total / kMiB,
             " of state");
    }));
  }
}
