// Which parameters train, tied parameters, several passes, accumulation, clearing.
#include <torch/csrc/autograd/autograd.h>

#include "cases.h"

using namespace cases;

namespace {

at::Tensor x_of(int s, int r, std::int64_t columns = 4) {
  return values({3, columns}, 17.0 * s + 3.0 * r + 0.5) * (1 + 0.7 * r);
}

Params mlp(int layers, std::int64_t width = 4) {
  Params out;
  for (int i = 0; i < layers; ++i) {
    out.push_back(leaf(values({width, width}, 2.0 * i + 1)));
    out.push_back(leaf(values({width}, 2.0 * i + 2)));
  }
  return out;
}

at::Tensor run(const Params& w, at::Tensor x) {
  for (std::size_t i = 0; i + 1 < w.size(); i += 2) x = at::tanh(at::linear(x, w[i], w[i + 1]));
  return x;
}

Factory both_kinds(int which) { return which == 0 ? Factory(adamw) : Factory(momentum); }

}  // namespace

TEST_CASE("B09 frozen parameters stay as they are and cost nothing") {
  at_every_stage([](const Communicator& comm, Options options) {
    Problem p;
    p.steps = 10;
    const std::vector<std::size_t> frozen{0, 4, 5, 7};
    p.build = [&] {
      auto w = mlp(4);
      for (const auto i : frozen) w[i].set_requires_grad(false);
      return w;
    };
    p.loss = [](const Params& w, int s, int r) { return run(w, x_of(s, r)).square().mean(); };
    const auto before = p.build();
    const auto got = trains_like_torch(comm, options, p);
    for (const auto i : frozen)
      expect(at::equal(got[i], before[i]) && !got[i].requires_grad(), "frozen parameter ", i, " has changed");
    // What is frozen has no place among gradients and state.
    auto w = p.build();
    auto all = mlp(4);
    auto part = zero::wrap(adamw(w), options), whole = zero::wrap(adamw(all), options);
    expect(part.memory().gradients < whole.memory().gradients, "frozen parameters have gradient memory");
  });
}

TEST_CASE("B11 other heads in other steps") {
  at_every_stage([](const Communicator& comm, Options options) {
    for (int which : {0, 1}) {
      for (bool to_none : {true, false}) {
        Problem p;
        p.steps = 6;
        p.to_none = to_none;
        p.build = [] { return mlp(3); };
        p.loss = [](const Params& w, int s, int r) {
          const auto h = at::tanh(at::linear(x_of(s, r), w[0], w[1]));
          return (s % 2 == 0 ? at::linear(h, w[2], w[3]) : at::linear(h, w[4], w[5])).square().mean();
        };
        p.make = both_kinds(which);
        trains_like_torch(comm, options, p);
      }
    }
  });
}

TEST_CASE("B12 experts that only some ranks use, and one that nobody does") {
  at_every_stage([](const Communicator& comm, Options options) {
    for (double max_norm : {0.0, 0.1}) {
      Problem p;
      p.build = [] { return mlp(3); };
      p.max_norm = max_norm;
      p.loss = [](const Params& w, int s, int r) {
        const auto e = static_cast<std::size_t>(r % 2) * 2;
        return at::linear(x_of(s, r), w[e], w[e + 1]).square().mean();
      };
      trains_like_torch(comm, options, p);
    }
  });
}

TEST_CASE("B14 construction makes no step") {
  at_every_stage([](const Communicator& comm, Options options) {
    Problem p;
    p.steps = 1;
    p.build = [] { return mlp(1); };
    p.loss = [](const Params& w, int s, int r) { return run(w, x_of(s, r)).square().mean(); };
    trains_like_torch(comm, options, p);
    auto w = p.build();
    const auto before = copies(w);
    auto opt = zero::wrap(adamw(w), options);
    expect(same_bits(before, w) && opt.state().empty() && opt.last_step().number == 0, "construction made a step");
  });
}

TEST_CASE("B15 a layer that is used twice, and layers that never are") {
  at_every_stage([](const Communicator& comm, Options options) {
    Problem p;
    p.steps = 8;
    p.build = [] { return mlp(8); };
    p.loss = [](const Params& w, int s, int r) {
      Params path(w.begin(), w.begin() + 12);  // six of the eight
      path.push_back(w[0]), path.push_back(w[1]);
      return run(path, x_of(s, r)).square().mean();
    };
    trains_like_torch(comm, options, p);
  });
}

TEST_CASE("B16 a tied weight counts once in the norm; the same tensor twice is refused") {
  at_every_stage([](const Communicator& comm, Options options) {
    Problem p;
    p.build = [] { return Params{leaf(values({7, 4}, 1)), leaf(values({4, 4}, 2))}; };
    p.max_norm = 0.05;
    p.loss = [](const Params& w, int s, int r) {
      const auto h = at::linear(at::embedding(w[0], at::arange(3) + (s + r) % 4), w[1]);
      return at::linear(h, w[0]).square().mean();
    };
    trains_like_torch(comm, options, p);
    auto w = p.build();
    expect_error({"same tensor", "once"}, [&] { zero::wrap<SGD>(Params{w[0], w[1], w[0]}, SGDOptions(0.1), options); });
    Groups groups;
    groups.emplace_back(Params{w[0]}), groups.emplace_back(Params{w[1], w[0]});
    expect_error({"same tensor", "once"}, [&] { zero::wrap<SGD>(groups, SGDOptions(0.1), options); });
  });
}

TEST_CASE("B19 several forwards, then several backwards; one layer several times in a forward") {
  at_every_stage([](const Communicator& comm, Options options) {
    for (bool reversed : {false, true}) {
      auto expected = mlp(1), params = mlp(1);
      auto plain = momentum(expected);
      auto opt = zero::wrap(momentum(params), options);
      const auto loss = [](const Params& w, int s, int r) { return run(w, run(w, run(w, x_of(s, r)))).square().mean(); };
      for (int s = 0; s < 3; ++s) {
        plain->zero_grad(), opt.zero_grad();
        for (int r = 0; r < comm.size(); ++r) ((loss(expected, s, r) + loss(expected, s + 20, r)) / comm.size()).backward();
        const auto one = loss(params, s, comm.rank()), two = loss(params, s + 20, comm.rank());
        (reversed ? two : one).backward();
        (reversed ? one : two).backward();
        for (std::size_t i = 0; i < params.size(); ++i)
          expect(at::allclose(params[i].grad(), expected[i].grad(), 1e-12, 1e-14), "gradient ", i);
        plain->step(), opt.step();
      }
      expect_close(params, expected, "several forwards");
    }
  });
}

TEST_CASE("B20 any number of equal micro-batches is the whole batch") {
  at_every_stage([](const Communicator& comm, Options options) {
    for (int k : {1, 2, 3, 4}) {
      auto expected = mlp(2), params = mlp(2);
      auto plain = adamw(expected);
      auto opt = zero::wrap(adamw(params), options);
      for (int s = 0; s < 5; ++s) {
        const auto whole = values({24 * comm.size(), 4}, s);
        plain->zero_grad(), opt.zero_grad();
        run(expected, whole).square().mean().backward();
        const auto mine = whole.narrow(0, 24 * comm.rank(), 24);
        for (int m = 0; m < k; ++m) (run(params, mine.narrow(0, m * (24 / k), 24 / k)).square().mean() / k).backward();
        plain->step(), opt.step();
      }
      expect_close(params, expected, "micro-batches");
    }
  });
}

TEST_CASE("B23 every pattern of deferred and averaged micro-batches") {
  at_every_stage([](const Communicator& comm, Options options) {
    for (int pattern = 0; pattern < 16; ++pattern) {
      auto expected = mlp(2), params = mlp(2);
      auto plain = momentum(expected);
      auto opt = zero::wrap(momentum(params), options);
      for (int window = 0; window < 2; ++window) {
        plain->zero_grad(), opt.zero_grad();
        for (int k = 0; k < 3; ++k) {
          for (int r = 0; r < comm.size(); ++r) (run(expected, x_of(k, r)).square().mean() / (3 * comm.size())).backward();
          std::optional<zero::NoSync> wait;
          if (k < 2 && ((pattern >> (2 * window + k)) & 1)) wait.emplace(opt);
          (run(params, x_of(k, comm.rank())).square().mean() / 3).backward();
        }
        plain->step(), opt.step();
      }
      expect_close(params, expected, "pattern");
    }
  });
}

TEST_CASE("B24 unequal micro-batches: the mean over samples with weights, the mean of means without") {
  at_every_stage([](const Communicator& comm, Options options) {
    const int counts[4][2] = {{5, 3}, {4, 1}, {0, 2}, {3, 0}};
    const auto x = [&](int r, int k) { return values({counts[r][k], 4}, 5.0 * r + k); };
    for (bool weighted : {true, false}) {
      auto with = options;
      if (weighted) with.reduction(zero::Reduction::kWeighted);
      auto expected = mlp(1), params = mlp(1);
      auto plain = momentum(expected);
      auto opt = zero::wrap(momentum(params), with);
      double total = 0;
      for (int r = 0; r < comm.size(); ++r) total += counts[r][0] + counts[r][1];
      for (int k = 0; k < 2; ++k) {
        for (int r = 0; r < comm.size(); ++r)
          (run(expected, x(r, k)).square().sum() / (weighted ? total : 2.0 * comm.size() * std::max(counts[r][k], 1)))
              .backward();
        const auto sum = run(params, x(comm.rank(), k)).square().sum();
        if (weighted) {
          opt.add_weight(counts[comm.rank()][k]);
          sum.backward();
        } else {
          (sum / (2.0 * std::max(counts[comm.rank()][k], 1))).backward();
        }
      }
      plain->step(), opt.step();
      expect_close(params, expected, weighted ? "weighted" : "mean of means");
    }
  });
}

TEST_CASE("B25 a second backward over one graph") {
  at_every_stage([](const Communicator& comm, Options options) {
    for (int way = 0; way < 3; ++way) {
      auto expected = mlp(2), params = mlp(2);
      auto opt = zero::wrap(momentum(params), options);
      const auto forward = [](const Params& w, int r) {
        const auto y = run(w, x_of(1, r));
        return std::make_pair(y.square().mean(), (y * 0.3).sum());
      };
      for (int r = 0; r < comm.size(); ++r) {
        const auto [one, two] = forward(expected, r);
        ((way == 0 ? one * 2 : way == 1 ? one + two : two) / comm.size()).backward();
      }
      const auto [one, two] = forward(params, comm.rank());
      one.backward({}, true);
      if (way == 2) opt.zero_grad();
      (way == 0 ? one : two).backward();
      for (std::size_t i = 0; i < params.size(); ++i)
        expect(at::allclose(params[i].grad(), expected[i].grad(), 1e-12, 1e-14), "gradient ", i, ", way ", way);
      opt.step();
    }
  });
}

TEST_CASE("B26 second-order gradients through autograd::grad; create_graph in backward is refused") {
  at_every_stage([](const Communicator& comm, Options options) {
    Problem p;
    p.steps = 3;
    p.bar = 1e-10;
    p.build = [] { return mlp(2); };
    p.loss = [](const Params& w, int s, int r) {
      const auto x = x_of(s, r).requires_grad_(true);
      const auto y = at::linear(at::tanh(at::linear(x, w[0], w[1])), w[2], w[3]);
      const auto g = torch::autograd::grad({y.sum()}, {x}, {}, true, true)[0];
      return y.square().mean() + g.square().sum();
    };
    trains_like_torch(comm, options, p);
    if (options.stage() == Stage::kReplicated) return;
    auto w = p.build();
    auto opt = zero::wrap(adamw(w), options);
    expect_error({"create_graph"}, [&] { p.loss(w, 0, comm.rank()).backward({}, true, true); });
    for (auto& t : w) t.mutable_grad().reset();
  });
}

TEST_CASE("B29 clearing by optimizer, by module or by hand, in every place") {
  at_every_stage([](const Communicator& comm, Options options) {
    for (int way = 0; way < 3; ++way) {
      for (int sequence = 0; sequence < 4; ++sequence) {
        auto expected = mlp(2), params = mlp(2);
        auto plain = momentum(expected);
        auto opt = zero::wrap(momentum(params), options);
        const auto clear = [&](Params& w, torch::optim::Optimizer& o) {
          if (way == 0) o.zero_grad();
          if (way == 1)  // as Module::zero_grad(false) does
            for (auto& t : w)
              if (t.grad().defined()) t.mutable_grad().detach_().zero_();
          if (way == 2)
            for (auto& t : w) t.mutable_grad().reset();
        };
        const auto backward = [&](int s) {
          for (int r = 0; r < comm.size(); ++r) (run(expected, x_of(s, r)).square().mean() / comm.size()).backward();
          run(params, x_of(s, comm.rank())).square().mean().backward();
        };
        const auto clear_both = [&] { clear(expected, *plain), clear(params, opt); };
        const auto step_both = [&] { plain->step(), opt.step(); };
        for (int s = 0; s < 3; ++s) {
          if (sequence == 0) clear_both(), backward(s), step_both();
          if (sequence == 1) backward(s), clear_both(), backward(s + 10), step_both(), clear_both();
          if (sequence == 2) backward(s), step_both();
          if (sequence == 3)
            backward(s), backward(s + 10), clear_both(), backward(s + 20), backward(s + 30), step_both(), clear_both();
        }
        expect_close(params, expected, "cleared");
      }
    }
  });
}

TEST_CASE("B31 gradients can be read after every micro-batch, and edited after the last") {
  at_every_stage([](const Communicator& comm, Options options) {
    auto expected = mlp(2), params = mlp(2);
    auto plain = adamw(expected);
    auto opt = zero::wrap(adamw(params), options);
    for (int s = 0; s < 2; ++s) {
      plain->zero_grad(), opt.zero_grad();
      for (int k = 0; k < 3; ++k) {
        for (int r = 0; r < comm.size(); ++r)
          (run(expected, x_of(10 * s + k, r)).square().mean() / (3 * comm.size())).backward();
        (run(params, x_of(10 * s + k, comm.rank())).square().mean() / 3).backward();
        for (std::size_t i = 0; i < params.size(); ++i)
          expect(at::allclose(params[i].grad(), expected[i].grad(), 1e-12, 1e-14), "gradient ", i, " after micro-batch ", k);
      }
      expected[1].mutable_grad().mul_(0.5), params[1].mutable_grad().mul_(0.5);
      plain->step(), opt.step();
    }
    expect_close(params, expected, "edited");
  });
}
