// Norms, skipped steps, groups and options, closures, modules in the middle of a loop.
#include <torch/optim/schedulers/step_lr.h>

#include "cases.h"

using namespace cases;

namespace {

at::Tensor x_of(int s, int r, std::int64_t columns = 4) {
  return values({3, columns}, 17.0 * s + 3.0 * r + 0.5) * (1 + 0.7 * r);
}

Params layers(int n) {
  Params out;
  for (int i = 0; i < n; ++i) {
    out.push_back(leaf(values({4, 4}, 2.0 * i + 1) * std::pow(10.0, i % 3 - 1)));
    out.push_back(leaf(values({4}, 2.0 * i + 2)));
  }
  return out;
}

at::Tensor run(const Params& w, at::Tensor x) {
  for (std::size_t i = 0; i + 1 < w.size(); i += 2) x = at::tanh(at::linear(x, w[i], w[i + 1]));
  return x;
}

at::Tensor loss(const Params& w, int s, int r) { return run(w, x_of(s, r)).square().mean(); }

}  // namespace

TEST_CASE("B32 clipping by the norm of the whole averaged gradient") {
  at_every_stage([](const Communicator& comm, Options options) {
    for (const auto how : {suite::Clip::ours, suite::Clip::torch, suite::Clip::loop}) {
      for (double part : {0.5, 1.0, 2.0}) {
        auto expected = layers(3), params = layers(3);
        auto plain = momentum(expected);
        auto opt = zero::wrap(momentum(params), options);
        for (int s = 0; s < 2; ++s) {
          plain->zero_grad(), opt.zero_grad();
          for (int r = 0; r < comm.size(); ++r) (loss(expected, s, r) / comm.size()).backward();
          double sum = 0;
          for (const auto& p : expected) sum += p.grad().square().sum().item<double>();
          const double norm = std::sqrt(sum);
          loss(params, s, comm.rank()).backward();
          suite::clip(how, *plain, expected, part * norm);
          const double told = suite::clip(how, opt, params, part * norm);
          expect(std::abs(told - norm) <= 1e-12 * norm, suite::name_of(how), " returned ", told, ", not ", norm);
          plain->step(), opt.step();
        }
        expect_close(params, expected, "clipped");
      }
    }
  });
}

TEST_CASE("B34 B35 an inf or NaN on one rank: all skip, or all do what torch does") {
  at_every_stage([](const Communicator& comm, Options options) {
    for (const double bad : {std::numeric_limits<double>::infinity(), std::numeric_limits<double>::quiet_NaN()}) {
      for (bool skips : {true, false}) {
        auto expected = layers(2), params = layers(2);
        auto plain = adamw(expected);
        auto opt = zero::wrap(adamw(params), Options(options).skip_nonfinite(skips));
        for (int s = 0; s < 4; ++s) {
          plain->zero_grad(), opt.zero_grad();
          const bool spoilt = s == 1;
          const auto before = copies(params);
          if (!spoilt || !skips)
            for (int r = 0; r < comm.size(); ++r)
              (loss(expected, s, r) * (spoilt && r == 1 ? bad : 1.0) / comm.size()).backward();
          (loss(params, s, comm.rank()) * (spoilt && comm.rank() == 1 ? bad : 1.0)).backward();
          const double norm = zero::clip_grad_norm_(opt, 1e9);
          expect(std::isfinite(norm) == !(spoilt || (s > 1 && !skips)), "the norm is ", norm, " at step ", s);
          if (!spoilt || !skips) torch::nn::utils::clip_grad_norm_(expected, 1e9), plain->step();
          opt.step();
          expect(opt.last_step().applied == !(skips && spoilt), "applied: ", opt.last_step().applied);
          if (skips && spoilt) expect(same_bits(before, params), "a skipped step has changed parameters");
        }
        if (skips) expect_close(params, expected, "after a skipped step");
        if (!skips)
          for (std::size_t i = 0; i < params.size(); ++i)
            expect(params[i].isnan().any().item<bool>() == expected[i].isnan().any().item<bool>(), "NaN here but not in torch");
      }
    }
  });
}

TEST_CASE("B52 groups with options of their own, some settings left to the defaults") {
  at_every_stage([](const Communicator& comm, Options options) {
    Problem p;
    p.steps = 2;
    p.build = [] { return layers(2); };
    p.loss = loss;
    p.make = [](const Params& w) {
      Groups groups;
      for (std::size_t i = 0; i < 3; ++i)
        groups.emplace_back(Params{w[i]},
                            std::make_unique<AdamWOptions>(AdamWOptions().weight_decay(0.1 * static_cast<double>(i))));
      groups.emplace_back(Params{w[3]});
      return std::make_unique<AdamW>(groups, AdamWOptions(0.02));
    };
    trains_like_torch(comm, options, p);
  });
}

TEST_CASE("B53 a group that is added later, a learning rate that moves, a scheduler") {
  at_every_stage(
      [](const Communicator& comm, Options options) {
        auto expected = layers(3), params = layers(3);
        const auto first = [](const Params& w) { return Params(w.begin(), w.begin() + 4); };
        const auto later = [](const Params& w) {
          return torch::optim::OptimizerParamGroup(Params(w.begin() + 4, w.end()),
                                                   std::make_unique<AdamWOptions>(AdamWOptions(0.05).weight_decay(0.01)));
        };
        auto plain = adamw(first(expected));
        auto opt = zero::wrap(adamw(first(params)), options);
        torch::optim::StepLR plain_schedule(*plain, 2, 0.5), schedule(opt, 2, 0.5);
        for (int s = 0; s < 5; ++s) {
          if (s == 2) plain->add_param_group(later(expected)), opt.add_param_group(later(params));
          if (s == 3) {
            plain->param_groups()[0].options().set_lr(0.003);
            opt.param_groups()[0].options().set_lr(0.003);
          }
          plain->zero_grad(), opt.zero_grad();
          for (int r = 0; r < comm.size(); ++r) (loss(expected, s, r) / comm.size()).backward();
          loss(params, s, comm.rank()).backward();
          plain->step(), opt.step();
          if (s < 2) plain_schedule.step(), schedule.step();
          expect_close(params, expected, "after a group was added");
        }
      },
      {2, 3, 4, 5});
}

TEST_CASE("B54 step(closure) evaluates it once") {
  at_every_stage([](const Communicator& comm, Options options) {
    auto expected = layers(2), params = layers(2);
    auto plain = momentum(expected);
    auto opt = zero::wrap(momentum(params), options);
    for (int s = 0; s < 3; ++s) {
      plain->zero_grad();
      for (int r = 0; r < comm.size(); ++r) (loss(expected, s, r) / comm.size()).backward();
      plain->step();
      int calls = 0;
      const auto told = opt.step([&] {
        ++calls;
        opt.zero_grad();
        const auto l = loss(params, s, comm.rank());
        l.backward();
        return l;
      });
      expect(calls == 1 && told.defined(), "the closure ran ", calls, " times");
    }
    expect_close(params, expected, "closure");
  });
}

TEST_CASE("B57 a weight that is made from two parameters in forward") {
  at_every_stage([](const Communicator& comm, Options options) {
    Problem p;
    p.steps = 10;
    p.build = [] { return Params{leaf(values({4, 3}, 1)), leaf(values({4, 1}, 2) + 1)}; };
    p.loss = [](const Params& w, int s, int r) {
      const auto weight = w[1] * w[0] / w[0].norm(2, {1}, true);
      return at::linear(x_of(s, r, 3), weight).square().mean();
    };
    trains_like_torch(comm, options, p);
  });
}

TEST_CASE("B58 forwards without backward, evaluation in between, inference mode first") {
  at_every_stage([](const Communicator& comm, Options options) {
    auto expected = layers(2), params = layers(2);
    auto plain = adamw(expected);
    auto opt = zero::wrap(adamw(params), options);
    {
      const c10::InferenceMode inference;
      (void)run(params, x_of(9, 9));
    }
    for (int s = 0; s < 4; ++s) {
      plain->zero_grad(), opt.zero_grad();
      const auto unused = loss(params, s + 5, comm.rank());
      {
        const at::NoGradGuard no_grad;
        expect((loss(params, 8, 8) - loss(expected, 8, 8)).abs().item<double>() < 1e-12, "evaluation sees old parameters");
      }
      for (int r = 0; r < comm.size(); ++r) (loss(expected, s, r) / comm.size()).backward();
      loss(params, s, comm.rank()).backward();
      plain->step(), opt.step();
    }
    expect_close(params, expected, "with evaluations");
  });
}

TEST_CASE("B62 recomputation with the random numbers of the first time") {
  // Ranks that are threads share one generator, so masks come from a seed of each rank's own.
  at_every_stage([](const Communicator& comm, Options options) {
    Problem p;
    p.build = [] {
      auto w = layers(2);
      w[1].set_requires_grad(false);
      return w;
    };
    p.loss = [](const Params& w, int s, int r) {
      auto generator = at::detail::createCPUGenerator(static_cast<std::uint64_t>(100 * s + r));
      const auto mask = at::bernoulli(at::full({3, 4}, 0.5, at::kDouble), generator) * 2;
      return at::linear(at::tanh(at::linear(x_of(s, r), w[0], w[1])) * mask, w[2], w[3]).square().mean();
    };
    trains_like_torch(comm, options, p);
  });
}

TEST_CASE("B63 averages of parameters, swapped in for evaluation and back") {
  at_every_stage([](const Communicator& comm, Options options) {
    auto expected = layers(2), params = layers(2);
    auto average = copies(expected), ours = copies(params);
    auto plain = momentum(expected);
    auto opt = zero::wrap(momentum(params), options);
    const at::AutoGradMode enable(true);
    for (int s = 0; s < 4; ++s) {
      plain->zero_grad(), opt.zero_grad();
      for (int r = 0; r < comm.size(); ++r) (loss(expected, s, r) / comm.size()).backward();
      loss(params, s, comm.rank()).backward();
      plain->step(), opt.step();
      const at::NoGradGuard no_grad;
      for (std::size_t i = 0; i < params.size(); ++i)
        average[i].mul_(0.5).add_(expected[i], 0.5), ours[i].mul_(0.5).add_(params[i], 0.5);
    }
    expect_close(ours, average, "averages");
    const at::NoGradGuard no_grad;
    const auto kept = copies(params);
    for (std::size_t i = 0; i < params.size(); ++i) params[i].copy_(ours[i]);
    expect((loss(params, 7, 7) - run(average, x_of(7, 7)).square().mean()).abs().item<double>() < 1e-12,
           "evaluation with averages");
    for (std::size_t i = 0; i < params.size(); ++i) params[i].copy_(kept[i]);
    expect(same_bits(params, kept), "swapping back lost something");
  });
}

TEST_CASE("B64 batch norm's statistics are each rank's own, from the same start") {
  at_every_stage([](const Communicator& comm, Options options) {
    Params params{leaf(values({4, 4}, 1)), leaf(at::ones({4}, at::kDouble)), leaf(at::zeros({4}, at::kDouble))};
    auto mean = at::zeros({4}, at::kDouble), variance = at::ones({4}, at::kDouble);
    auto own_mean = mean.clone(), own_variance = variance.clone();
    auto opt = zero::wrap<SGD>(params, SGDOptions(0.1), options);
    for (int s = 0; s < 5; ++s) {
      opt.zero_grad();
      const auto h = at::linear(x_of(s, comm.rank()), params[0]);
      {
        const at::NoGradGuard no_grad;
        own_mean.mul_(0.9).add_(h.mean(0), 0.1), own_variance.mul_(0.9).add_(h.var(0), 0.1);
      }
      at::batch_norm(h, params[1], params[2], mean, variance, true, 0.1, 1e-5, false).square().mean().backward();
      opt.step();
    }
    expect(at::allclose(mean, own_mean) && at::allclose(variance, own_variance), "statistics are not this rank's");
    expect_equal_on_ranks(comm, params);
  });
}
