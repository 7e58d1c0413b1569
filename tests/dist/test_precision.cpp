// 16-bit parameters with float32 masters, and the types of gradients and state.
#include <ATen/autocast_mode.h>

#include <cmath>

#include "support/contract.h"

using namespace contract;

namespace {

const std::vector<std::vector<std::int64_t>> kShapes{{7, 5}, {7}, {3, 7}, {}, {0, 4}, {130}};

Params leaves(at::ScalarType type) {
  Params out;
  for (std::size_t i = 0; i < kShapes.size(); ++i)
    out.push_back(values(kShapes[i], 1.0 + static_cast<double>(i)).to(type).requires_grad_(true));
  return out;
}

/// Rank r's gradients of step s, in the parameters' type.
at::Tensor gradient(std::size_t i, int s, int r, at::ScalarType type) {
  return values(kShapes[i], 5.0 * s + r + 0.3 * static_cast<double>(i)).mul(1 + 0.5 * r).to(type);
}

/// What reaches the update: the mean in float32, rounded once to the type that travels.
at::Tensor mean_gradient(std::size_t i, int s, int ranks, at::ScalarType type, at::ScalarType travels) {
  auto sum = gradient(i, s, 0, type).to(at::kFloat);
  for (int r = 1; r < ranks; ++r) sum = sum + gradient(i, s, r, type).to(at::kFloat);
  return (sum / ranks).to(travels).to(at::kFloat);
}

/// torch::optim on float32 masters that begin as the 16-bit values.
struct Reference {
  Params masters;
  std::unique_ptr<torch::optim::Optimizer> opt;
  Reference(const Factory& make, at::ScalarType type) {
    for (const auto& p : leaves(type)) masters.push_back(p.detach().to(at::kFloat).requires_grad_(true));
    opt = make(masters);
  }
  void step(int s, int ranks, at::ScalarType type, at::ScalarType travels) {
    for (std::size_t i = 0; i < masters.size(); ++i) masters[i].mutable_grad() = mean_gradient(i, s, ranks, type, travels);
    opt->step();
  }
};

void set_gradients(const Params& params, int s, int rank) {
  for (std::size_t i = 0; i < params.size(); ++i) {
    // By backward: at stages 2 and 3 that is how gradients come.
    (params[i] * gradient(i, s, rank, params[i].scalar_type())).sum().backward();
  }
}

double unit_of(at::ScalarType type) { return type == at::kHalf ? 0x1p-11 : 0x1p-8; }

}  // namespace

TEST_CASE("masters: every class trains 16-bit parameters as torch::optim trains their float32 masters") {
  for (const auto type : {at::kBFloat16, at::kHalf}) {
    for (const bool in_float : {false, true}) {
      everywhere([&](const Communicator& comm, Options options) {
        const at::NoGradGuard no_grad;
        if (in_float) options.reduce_dtype(at::kFloat);
        for (const auto& [name, make] : optimizers()) {
          Reference expected(make, type);
          auto params = leaves(type);
          auto opt = zero::wrap(make(params), options);
          for (int s = 0; s < 6; ++s) {
            opt.zero_grad();
            {
              const at::AutoGradMode enable(true);
              set_gradients(params, s, comm.rank());
            }
            for (const auto& p : params)
              expect(p.grad().scalar_type() == (in_float ? at::kFloat : type), "gradients are ", p.grad().scalar_type());
            opt.step();
            expected.step(s, comm.size(), type, in_float ? at::kFloat : type);
            double worst_master = 0;
            for (const auto& shard : opt.local_shards()) {
              std::size_t i = 0;
              while (params[i].unsafeGetTensorImpl() != shard.parameter.unsafeGetTensorImpl()) ++i;
              const auto right = expected.masters[i].detach().reshape({-1}).narrow(0, shard.begin, shard.values.numel());
              expect(shard.master.defined() && shard.master.scalar_type() == at::kFloat, name, ": no master");
              expect(at::equal(shard.values, shard.master.to(type)), name, ": a parameter isn't its master's rounding");
              worst_master = std::max(worst_master, (shard.master - right).abs().max().item<double>());
            }
            expect(worst_master < 2e-6, name, ", step ", s, ": a master differs by ", worst_master);
          }
          for (std::size_t i = 0; i < params.size(); ++i) {
            expect(params[i].scalar_type() == type, "the type has changed");
            if (params[i].numel() == 0) continue;
            const auto right = expected.masters[i].detach();
            const auto off = (params[i].to(at::kFloat) - right).abs() / right.abs().clamp_min(1e-2);
            expect(off.max().item<double>() <= 1.01 * unit_of(type), name, ": ", off.max().item<double>(), " off");
          }
          expect_equal_on_ranks(comm, params);
        }
      });
    }
  }
}

TEST_CASE("masters: updates far below a 16-bit number's resolution add up") {
  everywhere([](const Communicator& comm, Options options) {
    for (const bool masters : {true, false}) {
      Params params{at::ones({50}, at::kBFloat16).requires_grad_(true)};
      auto opt = zero::wrap<SGD>(params, SGDOptions(1.0), options.master_weights(masters));
      for (int s = 0; s < 64; ++s) {
        opt.zero_grad();
        (params[0] * at::full({50}, 0x1p-11, at::kBFloat16))
            .sum()
            .backward();  // a 16th of the distance to the next number below
        opt.step();
      }
      const double got = params[0].detach().to(at::kFloat)[49].item<double>();
      expect(got == (masters ? 1 - 64 * 0x1p-11 : 1.0), masters ? "with" : "without", " masters: ", got);
      expect(opt.local_shards().empty() || opt.local_shards()[0].master.defined() == masters, "a master");
    }
    (void)comm;
  });
}

TEST_CASE("masters: all stages give the same bits") {
  for (const auto type : {at::kBFloat16, at::kHalf}) {
    for (const int n : {1, 2, 3, 4}) {
      for (const bool in_float : {false, true}) {
        for (const auto state : {at::kFloat, at::kBFloat16}) {
          std::vector<Params> results;
          for (int stage : suite::stages()) {
            Params result;
            on_threads({n}, [&](const Communicator& comm) {
              auto options = suite::options_for(comm, stage).state_dtype(state);
              if (in_float) options.reduce_dtype(at::kFloat);
              auto params = leaves(type);
              auto opt = zero::wrap(adamw(params), options);
              for (int s = 0; s < 4; ++s) {
                opt.zero_grad();
                set_gradients(params, s, comm.rank());
                zero::clip_grad_norm_(opt, 1.0);
                opt.step();
              }
              opt.unshard();
              expect_equal_on_ranks(comm, params);
              if (comm.rank() == 0) result = copies(params);
            });
            results.push_back(std::move(result));
          }
          for (const auto& result : results) CHECK(same_bits(result, results[0]));
        }
      }
    }
  }
}

TEST_CASE("D16 an edit of a 16-bit parameter is what the next step starts from, and the rest keeps its master") {
  everywhere([](const Communicator& comm, Options options) {
    const at::NoGradGuard no_grad;
    Params params{values({40}, 1).to(at::kBFloat16).requires_grad_(true)};
    auto opt = zero::wrap<SGD>(params, SGDOptions(1.0), options);
    auto expected = params[0].detach().to(at::kFloat);
    const auto step = [&](double g) {
      opt.zero_grad();
      {
        const at::AutoGradMode enable(true);
        (params[0] * at::full({40}, g, at::kBFloat16)).sum().backward();
      }
      opt.step();
      expected -= g;
    };
    step(0x1p-12);
    params[0].narrow(0, 0, 10).mul_(3);
    expected.narrow(0, 0, 10).copy_(params[0].detach().narrow(0, 0, 10).to(at::kFloat));
    step(0x1p-12);
    for (const auto& shard : opt.local_shards())
      expect(at::equal(shard.master, expected.narrow(0, shard.begin, shard.values.numel())), "masters after an edit");
    expect(at::equal(params[0].detach(), expected.to(at::kBFloat16)), "parameters after an edit");
    (void)comm;
  });
}

TEST_CASE("state in bfloat16 is half as large, and near") {
  everywhere([](const Communicator& comm, Options options) {
    const auto train = [&](at::ScalarType state, std::int64_t& bytes) {
      Model model(at::kFloat);
      auto opt = zero::wrap<AdamW>(model.params, AdamWOptions(0.01).betas({0.9, 0.9}), options.state_dtype(state));
      for (int s = 0; s < 5; ++s) {
        opt.zero_grad();
        model.loss(batch(s, comm.rank(), at::kFloat)).backward();
        opt.step();
      }
      bytes = opt.memory().optimizer_state;
      // The plan counts padding.
      expect(opt.memory_plan().optimizer_state >= bytes, "the plan has ", opt.memory_plan().optimizer_state, " of ", bytes);
      return copies(model.params);
    };
    std::int64_t wide = 0, narrow = 0;
    const auto a = train(at::kFloat, wide), b = train(at::kBFloat16, narrow);
    expect(wide == 2 * narrow, wide, " and ", narrow, " bytes");
    expect(distance(a, b) < 0.2, "bfloat16 moments are ", distance(a, b), " off");
  });
}

TEST_CASE("memory of masters is counted, and planned") {
  everywhere([](const Communicator& comm, Options options) {
    Params params{values({64, 64}, 1).to(at::kBFloat16).requires_grad_(true)};
    auto opt = zero::wrap<AdamW>(params, AdamWOptions(0.01), options.bucket_bytes(1 << 20));
    (params[0].sum()).backward();
    opt.step();
    std::int64_t held = 0;
    for (const auto& shard : opt.local_shards()) held += shard.values.numel();
    expect(opt.memory().optimizer_state == 12 * held, opt.memory().optimizer_state, " bytes for ", held, " elements");
    const auto plan = opt.memory_plan();
    const auto share = opt.padded_numel() / (opt.stage() == Stage::kReplicated ? 1 : comm.size());
    expect(plan.optimizer_state == 12 * share, "planned: ", plan.optimizer_state);
  });
}

TEST_CASE("autocast: float32 parameters and 16-bit arithmetic train alike at every stage") {
  for (const int n : {1, 2, 3}) {
    std::vector<Params> results;
    for (int stage : suite::stages()) {
      Params result;
      on_threads({n}, [&](const Communicator& comm) {
        Model model(at::kFloat);
        auto opt = zero::wrap<AdamW>(model.params, AdamWOptions(0.01), suite::options_for(comm, stage));
        for (int s = 0; s < 4; ++s) {
          opt.zero_grad();
          at::autocast::set_autocast_dtype(at::kCPU, at::kBFloat16);
          at::autocast::set_autocast_enabled(at::kCPU, true);
          const auto loss = model.loss(batch(s, comm.rank(), at::kFloat));
          at::autocast::clear_cache();
          at::autocast::set_autocast_enabled(at::kCPU, false);
          loss.backward();
          opt.step();
        }
        if (comm.rank() == 0) result = copies(model.params);
      });
      results.push_back(std::move(result));
    }
    for (const auto& result : results) CHECK(same_bits(result, results[0]));
    Model untouched(at::kFloat);
    CHECK(distance(results[0], untouched.params) > 1e-3);
  }
}

TEST_CASE("precision: what can't be right is refused on every rank") {
  on_threads({1, 3}, [](const Communicator& comm) {
    Params half{values({8}, 1).to(at::kHalf).requires_grad_(true)};
    const auto off = Options(comm).master_weights(false);
    expect_error({"float16", "without master weights", "master_weights(false, true)"},
                 [&] { (void)zero::wrap<AdamW>(half, AdamWOptions(0.1), off); });
    (void)zero::wrap<SGD>(half, SGDOptions(0.1), off);
    {
      auto forced = zero::wrap<AdamW>(half, AdamWOptions(0.1), Options(comm).master_weights(false, true));
      (half[0] * 2).sum().backward();
      forced.step();
      expect(half[0].isfinite().all().item<bool>() && forced.memory().optimizer_state <= 8 * 8, "forced");
    }
    Params bf{values({8}, 1).to(at::kBFloat16).requires_grad_(true)};
    (void)zero::wrap<AdamW>(bf, AdamWOptions(0.1), off);
    expect_error({"reduce_dtype", "Float"},
                 [&] { (void)zero::wrap<SGD>(bf, SGDOptions(0.1), Options(comm).reduce_dtype(at::kDouble)); });
    expect_error({"state_dtype", "BFloat16"},
                 [&] { (void)zero::wrap<SGD>(bf, SGDOptions(0.1), Options(comm).state_dtype(at::kHalf)); });
    if (comm.size() > 1)
      expect_error({"Options::state_dtype", "rank"}, [&] {
        auto options = Options(comm);
        if (comm.rank() == 1) options.state_dtype(at::kBFloat16);
        (void)zero::wrap<AdamW>(bf, AdamWOptions(0.1), options);
      });
  });
}

TEST_CASE("weights of unequal batches divide late, without overflow in float16") {
  for (int stage : suite::stages()) {
    on_threads({2, 3, 4}, [&](const Communicator& comm) {
      Params params{at::zeros({37}, at::kHalf).requires_grad_(true)};
      auto opt =
          zero::wrap<SGD>(params, SGDOptions(1.0), suite::options_for(comm, stage).reduction(zero::Reduction::kWeighted));
      opt.add_weight(100);
      (params[0] * at::full({37}, 40000.0, at::kHalf)).sum().backward();  // a sum over 100 samples
      const auto expected = at::full({37}, 400.0, at::kHalf);
      expect(at::equal(params[0].grad(), expected), "the weighted mean is ", params[0].grad()[0].item<double>());
      opt.step();
      expect(opt.last_step().applied, "skipped");
    });
  }
}
