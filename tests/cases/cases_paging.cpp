// Faults of systems that shard parameters.
#include <torch/serialize.h>

#include <cstdio>
#include <fstream>

#include "cases.h"

using namespace cases;

namespace {

struct Layers {
  Params params;
  explicit Layers(int count, std::int64_t width, at::ScalarType dtype = at::kDouble) {
    for (int i = 0; i < count; ++i) {
      params.push_back((values({width, width}, 5.0 * i + 1, dtype) * 0.4).requires_grad_(true));
      params.push_back((values({width}, 5.0 * i + 2, dtype) * 0.4).requires_grad_(true));
    }
  }
  at::Tensor loss(const at::Tensor& input, const std::vector<int>& order) const {
    auto x = input;
    for (const int i : order) x = at::tanh(at::linear(x, params[2 * i], params[2 * i + 1])) + 0.5 * x;
    return x.square().mean();
  }
};

}  // namespace

TEST_CASE("B55 a layer used only for some inputs, and layers in another order") {
  on_ranks([](const Communicator& comm) {
    constexpr std::int64_t kWidth = 7, kLayer = 512;  // a layer's bucket, padded, fits
    const std::vector<std::vector<int>> orders{{0, 1, 2}, {0, 1, 2}, {0, 2},    {0, 1, 2}, {0, 2},
                                               {0, 2},    {2, 1, 0}, {2, 1, 0}, {2, 0}};
    std::vector<Params> results;
    Layers plain(3, kWidth);
    auto reference = momentum(plain.params);
    for (const bool prefetch : {true, false}) {
      Layers model(3, kWidth);
      auto opt = zero::wrap(momentum(model.params),
                            suite::options_for(comm, 3, kLayer).prefetch(prefetch).memory_budget(1500).exceed_budget());
      for (std::size_t s = 0; s < orders.size(); ++s) {
        if (prefetch) {
          reference->zero_grad();
          for (int r = 0; r < comm.size(); ++r)
            (plain.loss(values({3, kWidth}, 1.0 + static_cast<double>(s) + 20.0 * r), orders[s]) / comm.size()).backward();
          reference->step();
        }
        opt.zero_grad();
        model.loss(values({3, kWidth}, 1.0 + static_cast<double>(s) + 20.0 * comm.rank()), orders[s]).backward();
        opt.step();
        if (comm.size() > 1)
          expect(opt.last_step().peak_resident_parameter_bytes <= 1536, "step ", s, ": ",
                 opt.last_step().peak_resident_parameter_bytes, " bytes were whole");
      }
      results.push_back(copies(model.params));
    }
    expect(same_bits(results[0], results[1]), "fetching ahead changes results");
    expect_close(results[0], plain.params, "layers left out");
    expect_equal_on_ranks(comm, results[0]);
  });
}

TEST_CASE("B61 what autograd has saved doesn't keep parameters whole, and nothing grows") {
  on_ranks([](const Communicator& comm) {
    if (comm.size() == 1) return;
    constexpr std::int64_t kWidth = 64, kLayer = (kWidth + 2) * kWidth * 4;
    Layers model(8, kWidth, at::kFloat);
    auto opt = zero::wrap(momentum(model.params), suite::options_for(comm, 3, kLayer).memory_budget(2 * kLayer));
    zero::Memory early;
    for (int s = 0; s < 50; ++s) {
      opt.zero_grad();
      const auto loss = model.loss(values({3, kWidth}, 1.0 + s, at::kFloat), {0, 1, 2, 3, 4, 5, 6, 7});
      const auto whole = opt.memory().buffers - opt.memory_plan(zero::Stage::kGradients, comm.size()).buffers;
      expect(whole <= 2 * kLayer, "at the end of forward ", whole, " bytes are whole");
      loss.backward();
      opt.step();
      expect(opt.last_step().peak_resident_parameter_bytes <= 2 * kLayer, "step ", s, ": over the budget");
      if (s == 5) early = opt.memory();
    }
    expect(opt.memory().total() <= early.total() + 1024, "memory grows: ", early.total(), " bytes, then ",
           opt.memory().total());
  });
}

TEST_CASE("B46 a saved parameter doesn't drag its bucket along") {
  at_every_stage([](const Communicator& comm, Options options) {
    Params params;
    for (int i = 0; i < 32; ++i) params.push_back(values({1000}, i).requires_grad_(true));
    auto opt = zero::wrap(momentum(params), options.bucket_bytes(64 << 10));
    const auto path = "/tmp/zero_b46_" + std::to_string(comm.size()) + "_" + std::to_string(comm.rank()) + "_" +
                      std::to_string(static_cast<int>(options.stage())) + ".pt";
    for (int n = 0; n < 3; ++n) {
      const zero::GatherGuard whole(opt, {params[3]});
      torch::save(params[3], path);
    }
    std::ifstream file(path, std::ios::binary | std::ios::ate);
    expect(file.good() && file.tellg() < 8000 + 4096, "the file of one parameter has ", file.tellg(), " bytes");
    at::Tensor back;
    torch::load(back, path);
    expect(at::equal(back, params[3]), "other values");
    std::remove(path.c_str());
  });
}
