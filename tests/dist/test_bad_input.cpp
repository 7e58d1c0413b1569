// What bad input gets: one clear error on every rank, and everything as it was.
#include <torch/optim/lbfgs.h>

#include "support/catch.h"
#include "support/optimizer_suite.h"

using namespace training;
using zero::Communicator;
using zero::Options;

namespace {

void on_threads(std::vector<int> worlds, const std::function<void(const Communicator&)>& check) {
  zero::WaitPolicy policy;
  policy.timeout = std::chrono::seconds(20);
  for (int n : worlds) {
    INFO(n << " ranks");
    REQUIRE_NOTHROW(zero::run_ranks(n, policy, check));
  }
}

std::unique_ptr<torch::optim::Optimizer> adamw(Params p) {
  return std::make_unique<torch::optim::AdamW>(std::move(p), torch::optim::AdamWOptions(0.01));
}

Options named(const Communicator& comm) { return Options(comm).names(Model::names()).bucket_bytes(256); }

}  // namespace

TEST_CASE("parameters that can't be optimized are refused on every rank, whichever rank has them") {
  on_threads({1, 2, 3}, [](const Communicator& comm) {
    const bool mine = comm.rank() == comm.size() - 1;
    auto refused = [&](const std::vector<std::string>& parts, const std::function<Params(Params)>& spoil) {
      Model model;
      const auto before = copies(model.params);
      expect_error(parts, [&] {
        zero::wrap<torch::optim::AdamW>(mine ? spoil(model.params) : model.params, torch::optim::AdamWOptions(0.01),
                                        named(comm));
      });
      expect(same_bits(before, model.params), "a refused construction has changed parameters");
    };
    refused({"no parameters"}, [](Params) { return Params{}; });
    refused({"leaf"}, [](Params p) { return p[2] = p[2] * 2, p; });
    refused({"'w2'", "floating point"}, [](Params p) { return p[2] = at::ones({3, 7}, at::kLong), p; });
    refused({"undefined"}, [](Params p) { return p[2] = at::Tensor(), p; });
    refused({"'w2'", "same tensor as 'b1'"}, [](Params p) { return p[2] = p[1], p; });
    refused({"'w2'", "sparse"}, [](Params p) { return p[2] = at::eye(3, at::kDouble).to_sparse(), p; });
    Model model;  // and the communicator is as good as before
    auto opt = zero::wrap(adamw(model.params), named(comm));
    model.loss(batch(0, comm.rank())).backward();
    opt.step();
  });
}

TEST_CASE("one tensor in two groups") {
  on_threads({1, 2}, [](const Communicator& comm) {
    Model model;
    std::vector<torch::optim::OptimizerParamGroup> groups;
    groups.emplace_back(Params{model.params[0], model.params[1]});
    groups.emplace_back(Params{model.params[1], model.params[2]});
    expect_error({"same tensor", "group 1", "group 0"},
                 [&] { zero::wrap<torch::optim::AdamW>(groups, torch::optim::AdamWOptions(0.01), Options(comm)); });
  });
}

TEST_CASE("LBFGS") {
  on_threads({1, 2}, [](const Communicator& comm) {
    Model model;
    expect_error({"LBFGS", "can't be sharded"},
                 [&] { zero::wrap<torch::optim::LBFGS>(model.params, torch::optim::LBFGSOptions(0.1), Options(comm)); });
  });
}

TEST_CASE("B65 ranks that disagree are told where, first difference and both values") {
  on_threads({2, 3}, [](const Communicator& comm) {
    const bool odd = comm.rank() == 1;
    auto disagree = [&](const std::vector<std::string>& parts,
                        const std::function<void(Model&, Options&, torch::optim::AdamWOptions&)>& spoil) {
      Model model;
      auto options = named(comm);
      torch::optim::AdamWOptions adam(0.01);
      if (odd) spoil(model, options, adam);
      const auto before = copies(model.params);
      const auto began = std::chrono::steady_clock::now();
      expect_error(parts, [&] { zero::wrap<torch::optim::AdamW>(model.params, adam, options); });
      expect(std::chrono::steady_clock::now() - began < std::chrono::seconds(10), "it took too long");
      expect(same_bits(before, model.params), "a refused construction has changed parameters");
    };
    disagree({"shape of 'w2'", "[3, 7]", "[7, 3]"}, [](Model& m, Options&, auto&) {
      m.params[2] = values({7, 3}, 3).requires_grad_(true);
    });
    disagree({"shape of 'b2'", "[3]", "[4]"},
             [](Model& m, Options&, auto&) { m.params[5] = values({4}, 3).requires_grad_(true); });
    disagree({"type of 'b1'", "Double", "Float"},
             [](Model& m, Options&, auto&) { m.params[1] = values({7}, 3, at::kFloat).requires_grad_(true); });
    disagree({"requires_grad of 'b1'", "true", "false"},
             [](Model& m, Options&, auto&) { m.params[1].set_requires_grad(false); });
    disagree({"'w3'"}, [](Model& m, Options&, auto&) { m.params.pop_back(); });
    disagree({"'b1'", "'w1'"}, [](Model& m, Options& o, auto&) {
      std::swap(m.params[0], m.params[1]);
      auto names = Model::names();
      std::swap(names[0], names[1]);
      o.names(names);
    });
    disagree({"lr of group 0", "0.01", "0.02"}, [](Model&, Options&, auto& a) { a.lr(0.02); });
    disagree({"Options::stage", "1", "0"}, [](Model&, Options& o, auto&) { o.stage(zero::Stage::kReplicated); });
    disagree({"Options::bucket_bytes"}, [](Model&, Options& o, auto&) { o.bucket_bytes(512); });
    disagree({"the divisor"}, [](Model&, Options& o, auto&) { o.divisor(7); });
    disagree({"strides of 'w2'"}, [](Model& m, Options&, auto&) { m.params[2] = values({7, 3}, 3).t().requires_grad_(true); });
    Model model;
    auto opt = zero::wrap(adamw(model.params), named(comm));
  });
  on_threads({2}, [](const Communicator& comm) {
    Model model;
    expect_error({"the wrapped class", "AdamW", "SGD"}, [&] {
      if (comm.rank() == 0)
        zero::wrap(adamw(model.params), named(comm));
      else
        zero::wrap<torch::optim::SGD>(model.params, 0.1, named(comm));
    });
  });
}

TEST_CASE("B27 sparse gradients are refused on all ranks, before anything is written") {
  on_threads({1, 2}, [](const Communicator& comm) {
    Model model;
    auto opt = zero::wrap(adamw(model.params), named(comm));
    model.loss(batch(0, comm.rank())).backward();
    if (comm.rank() == 0) model.params[0].mutable_grad() = at::ones({7, 5}, at::kDouble).to_sparse();
    const auto before = copies(model.params);
    expect_error({"'w1'", "sparse"}, [&] { opt.step(); });
    expect_error({"'w1'", "sparse"}, [&] { opt.grad_norm(); });
    expect(same_bits(before, model.params) && opt.state().empty(), "a refused step has changed something");
    model.params[0].mutable_grad() = at::ones({7, 5}, at::kDouble);
    opt.step();
  });
}

TEST_CASE("a parameter whose shape changed, and a gradient that doesn't fit") {
  on_threads({1, 2}, [](const Communicator& comm) {
    for (int stage : {0, 1, 2, 3}) {
      Model model;
      auto opt = zero::wrap(adamw(model.params), named(comm).stage(static_cast<zero::Stage>(stage)));
      model.loss(batch(0, comm.rank())).backward();
      opt.step();
      if (comm.rank() == 0) model.params[5].set_data(values({9}, 1));
      expect_error({"'b2'", "[9]", "[3]"}, [&] { opt.step(); });
    }
  });
}

TEST_CASE("ranks at different calls are told so") {
  on_threads({2}, [](const Communicator& comm) {
    Model model;
    auto opt = zero::wrap(adamw(model.params), named(comm));
    model.loss(batch(0, comm.rank())).backward();
    expect_error({"different calls", "grad_norm", "step"},
                 [&] { comm.rank() == 0 ? (void)opt.step() : (void)opt.grad_norm(); });
  });
}

TEST_CASE("B66 a rank that throws between backward and step: the others throw too and name it") {
  for (int n : {2, 3}) {
    std::vector<std::string> heard(n);
    try {
      zero::run_ranks(n, [&](const Communicator& comm) {
        Model model;
        auto opt = zero::wrap(adamw(model.params), named(comm));
        model.loss(batch(0, comm.rank())).backward();
        if (comm.rank() == 1) throw std::runtime_error("the data are corrupt");
        const auto before = copies(model.params);
        try {
          opt.step();
        } catch (const c10::Error& e) {
          heard[comm.rank()] = e.msg();
          if (!same_bits(before, model.params)) heard[comm.rank()] = "parameters have changed";
          throw;
        }
      });
      FAIL("nobody threw");
    } catch (const std::runtime_error& e) {
      REQUIRE(std::string(e.what()).find("the data are corrupt") != std::string::npos);
    }
    for (int r = 0; r < n; ++r)
      if (r != 1) {
        INFO("rank " << r << " heard: " << heard[r]);
        REQUIRE(heard[r].find("rank 1") != std::string::npos);
      }
  }
}

TEST_CASE("a rank that makes one step less: the error names it and the step") {
  std::vector<std::string> heard(2);
  zero::run_ranks(2, [&](const Communicator& comm) {
    Model model;
    auto opt = zero::wrap(adamw(model.params), named(comm));
    try {
      for (int s = 0; s < 3 - comm.rank(); ++s) {
        opt.zero_grad();
        model.loss(batch(s, comm.rank())).backward();
        opt.step();
      }
    } catch (const c10::Error& e) {
      heard[comm.rank()] = e.msg();
    }
  });
  INFO(heard[0]);
  REQUIRE(heard[0].find("rank 1") != std::string::npos);
  REQUIRE(heard[0].find("step 3") != std::string::npos);
}

TEST_CASE("B34 NaN and infinite gradients: as torch::optim, or skipped everywhere") {
  on_threads({1, 2, 3}, [](const Communicator& comm) {
    for (int stage : {0, 1, 2, 3}) {
      for (double bad : {std::numeric_limits<double>::infinity(), std::numeric_limits<double>::quiet_NaN()}) {
        Model plain_model, model;
        auto plain = adamw(plain_model.params);
        auto opt = zero::wrap(adamw(model.params), named(comm).stage(static_cast<zero::Stage>(stage)).skip_nonfinite(true));
        auto loud = zero::wrap(adamw(plain_model.params), named(comm).stage(static_cast<zero::Stage>(stage)));
        for (int s = 0; s < 3; ++s) {
          opt.zero_grad();
          const auto spoil = [&](const at::Tensor& g) {
            const auto spoilt = g.clone();
            spoilt[1][2] = bad;
            return spoilt;
          };
          const bool here = s == 1 && comm.rank() == comm.size() - 1;
          const auto hook = here ? model.params[2].register_hook(spoil) : 0;
          model.loss(batch(s, comm.rank())).backward();
          if (here) model.params[2].remove_hook(hook);
          const auto before = copies(model.params);
          const double norm = zero::clip_grad_norm_(opt, 0.1);
          opt.step();
          const auto& report = opt.last_step();
          expect(report.applied == (s != 1), "step ", s, " applied: ", report.applied);
          expect(std::isfinite(norm) == (s != 1), "norm ", norm);
          if (s == 1) {
            expect(report.first_nonfinite.find("'w2'") != std::string::npos && report.reason.find("'w2'") != std::string::npos,
                   report.reason);
            expect(same_bits(before, model.params), "a skipped step has changed parameters");
          }
          for (auto& [key, state] : opt.state()) {
            const auto steps = static_cast<torch::optim::AdamWParamState&>(*state).step();
            expect(steps == (s == 0 ? 1 : s), "step counter ", steps);
          }
        }
        // Without the option a NaN does what it does in torch::optim: it spreads to that element, no further.
        plain_model.loss(batch(0, comm.rank())).backward();
        plain_model.params[2].mutable_grad()[1][2] = bad;  // the average's
        loud.step();
        const auto w = plain_model.params[2].detach();
        expect(w.isnan().sum().item<std::int64_t>() == 1 && std::isnan(w[1][2].item<double>()), "NaN elsewhere");
      }
    }
  });
}
