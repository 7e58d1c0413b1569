// Gradients that page: what a reader of p.grad() sees between backward and step, what it costs, and how several backwards add up.
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/autograd/custom_function.h>

#include <thread>

#include "support/contract.h"

using namespace contract;

namespace {

/// The gradients that one process has on the mean of the ranks' losses.
struct Both {
  Model plain, model;
  void backward(const Communicator& comm, int s, double factor = 1) {
    for (int r = 0; r < comm.size(); ++r) (plain.loss(batch(s, r)) * factor / comm.size()).backward();
    (model.loss(batch(s, comm.rank())) * factor).backward();
  }
  void expect_same_gradients(const char* what) {
    for (std::size_t i = 0; i < model.params.size(); ++i) {
      const auto &got = model.params[i].grad(), &expected = plain.params[i].grad();
      expect(got.defined() == expected.defined(), what, ": gradient ", i, " is defined ", got.defined());
      if (got.defined())
        expect(at::allclose(got, expected, 1e-12, 1e-14), what, ": gradient ", i, " is ", got, ", not ", expected);
    }
  }
};

std::int64_t sent(const Communicator& comm) { return comm.traffic().data_bytes; }

/// Runs a function's graph a second time inside backward, as activation checkpointing does.
class Recomputed : public torch::autograd::Function<Recomputed> {
 public:
  using Block = std::function<at::Tensor(const at::Tensor&)>;
  static at::Tensor forward(torch::autograd::AutogradContext* ctx, const at::Tensor& x, const Block* block) {
    ctx->save_for_backward({x});
    ctx->saved_data["block"] = static_cast<std::int64_t>(reinterpret_cast<std::intptr_t>(block));
    return (*block)(x);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx, torch::autograd::variable_list grads) {
    const auto* block = reinterpret_cast<const Block*>(static_cast<std::intptr_t>(ctx->saved_data["block"].toInt()));
    const auto x = ctx->get_saved_variables()[0].detach().requires_grad_(true);
    at::Tensor y;
    {
      const at::AutoGradMode enable(true);
      y = (*block)(x);
    }
    y.backward(grads[0]);
    return {x.grad(), at::Tensor()};
  }
};

}  // namespace

TEST_CASE("D9 B31 p.grad() is the averaged gradient for whoever reads it, after every backward") {
  everywhere([](const Communicator& comm, Options options) {
    Both both;
    auto plain = adamw(both.plain.params);
    auto opt = zero::wrap(adamw(both.model.params), options);
    for (int s = 0; s < 3; ++s) {
      plain->zero_grad(), opt.zero_grad(s != 1);
      for (int k = 0; k < 3; ++k) {
        both.backward(comm, 10 * s + k);
        if (s > 0) both.expect_same_gradients("after a backward");
      }
      for (auto* m : {&both.plain, &both.model}) {
        m->params[2].grad().mul_(0.5);                          // in place
        m->params[0].grad().select(0, 3).add_(0.25);            // through a view
        m->params[6].mutable_grad().copy_(values({11, 3}, 5));  // overwritten, the same on every rank
        m->params[1].grad().data().clamp_(-0.01, 0.01);
        m->params[5].grad().fill_(0.125);
      }
      both.expect_same_gradients("edited");
      plain->step(), opt.step();
    }
    expect_close(both.model.params, both.plain.params, "edited gradients");
    expect_equal_on_ranks(comm, both.model.params);
  });
}

TEST_CASE("D9 reading costs one gather, overwriting and not reading nothing") {
  everywhere([](const Communicator& comm, Options options) {
    Both both;
    options.gathered_gradient_bytes(0);  // nothing stays longer than an operator needs it
    auto opt = zero::wrap(momentum(both.model.params), options);
    const auto once = opt.padded_numel() * 8 / comm.size() * (comm.size() - 1);
    both.backward(comm, 0);
    const auto after_backward = sent(comm);
    opt.zero_grad(false);
    for (auto& p : both.model.params) expect(p.grad().defined(), "zero_grad(false) leaves zeros");
    expect(sent(comm) == after_backward, "zero_() sent ", sent(comm) - after_backward, " bytes");
    both.backward(comm, 1);
    const auto before = sent(comm);
    for (auto& p : both.model.params) (void)p.grad().view({-1}).sizes();  // shapes are no reads
    expect(sent(comm) == before, "looking at shapes sent bytes");
    double sum = 0;
    for (auto& p : both.model.params) sum += p.grad().sum().item<double>();
    const auto reading = sent(comm) - before;
    const auto reduced = options.stage() >= Stage::kGradients ? 0 : once;  // not done before at stages 0 and 1
    // Parameters share buckets, and those of one bucket are read one after the other.
    if (comm.size() > 1)
      expect(reading == once + reduced, "reading sent ", reading, " bytes, one gather is ", once, ", sum ", sum);
    const auto before_edit = sent(comm);
    if (options.stage() >= Stage::kGradients)
      for (auto& p : both.model.params) p.grad().mul_(0.5);
    expect(sent(comm) == before_edit, "scaling shards sent bytes");
  });
}

TEST_CASE("D9 a raw pointer is refused with the way out, and reduce_gradients() is it") {
  everywhere([](const Communicator& comm, Options options) {
    Both both;
    options.names(Model::names());
    auto plain = momentum(both.plain.params);
    auto opt = zero::wrap(momentum(both.model.params), options);
    for (int s = 0; s < 3; ++s) {
      plain->zero_grad(), opt.zero_grad();
      both.backward(comm, s);
      if (comm.size() > 1)
        expect_error({"'w2'", "reduce_gradients()"}, [&] { (void)both.model.params[2].grad().data_ptr<double>(); });
      opt.reduce_gradients();
      for (std::size_t i = 0; i < both.model.params.size(); ++i) {
        const auto *got = both.model.params[i].grad().data_ptr<double>(),
                   *expected = both.plain.params[i].grad().data_ptr<double>();
        for (std::int64_t e = 0; e < both.model.params[i].numel(); ++e)
          expect(std::abs(got[e] - expected[e]) < 1e-13, "element ", e, " of ", i);
      }
      both.model.params[0].grad().data_ptr<double>()[17] = 3, both.plain.params[0].grad().data_ptr<double>()[17] = 3;
      both.model.params[6].mutable_grad().mul_(2), both.plain.params[6].mutable_grad().mul_(2);
      if (s == 1) both.backward(comm, 7);
      plain->step(), opt.step();
    }
    expect_close(both.model.params, both.plain.params, "written by pointer");
  });
}

TEST_CASE("D8 B20 B23 deferred backwards, in every pattern") {
  everywhere([](const Communicator& comm, Options options) {
    for (int pattern = 0; pattern < 8; ++pattern) {
      Both both;
      auto plain = adamw(both.plain.params);
      auto opt = zero::wrap(adamw(both.model.params), options);
      for (int s = 0; s < 3; ++s) {
        if (s < 2) plain->zero_grad(), opt.zero_grad(s == 0);  // the third adds to the second
        for (int k = 0; k < 3; ++k) {
          std::optional<zero::NoSync> wait;
          if ((pattern >> k) & 1) wait.emplace(opt);
          const auto before = sent(comm);
          both.backward(comm, 10 * s + k, 1.0 / 3);
          if (wait) expect(sent(comm) == before, "a deferred backward sent ", sent(comm) - before, " bytes");
        }
        if (s == 1) both.expect_same_gradients("after deferred backwards");
        plain->step(), opt.step();
      }
      expect_close(both.model.params, both.plain.params, "deferred");
    }
  });
}

TEST_CASE("D8 B12 deferred gradients that are cleared where they have arrived, and on no other rank") {
  everywhere([](const Communicator& comm, Options options) {
    for (bool to_none : {true, false}) {
      for (bool kept : {false, true}) {  // something was there before the deferred backward
        Params plain_params{values({5, 3}, 1), values({7}, 2), values({4}, 3)}, params = copies(plain_params);
        for (auto& p : plain_params) p.requires_grad_(true);
        for (auto& p : params) p.requires_grad_(true);
        auto plain = momentum(plain_params);
        auto opt = zero::wrap(momentum(params), options);
        // The first parameter is rank 0's alone, the last one the highest rank's.
        const auto loss = [&](const Params& p, int s, int rank) {
          auto sum = (p[1] * values({7}, s + 0.3 * rank)).sum().square();
          if (rank == 0) sum = sum + (p[0] * values({5, 3}, s)).sum().square();
          if (rank == comm.size() - 1) sum = sum + (p[2] * values({4}, s)).sum().square();
          return sum;
        };
        const auto backward = [&](int s) {
          for (int r = 0; r < comm.size(); ++r) (loss(plain_params, s, r) / comm.size()).backward();
          loss(params, s, comm.rank()).backward();
        };
        for (int s = 0; s < 3; ++s) {
          if (!kept) plain->zero_grad(), opt.zero_grad();
          {
            const zero::NoSync wait(opt);
            backward(s);
          }
          plain->zero_grad(to_none), opt.zero_grad(to_none);
          backward(s + 10);
          plain->step(), opt.step();
          expect_close(params, plain_params, to_none ? "cleared" : "zeroed");
        }
      }
    }
  });
}

TEST_CASE("D9 an edit that not every rank makes is an error, not a gradient made of two") {
  for (int stage : suite::stages()) {
    INFO("stage " << stage);
    const std::vector<std::pair<const char*, std::function<void(at::Tensor)>>> edits{
        {"mul_", [](at::Tensor g) { g.mul_(0.5); }},
        {"fill_", [](at::Tensor g) { g.fill_(2); }},
        {"zero_", [](at::Tensor g) { g.zero_(); }},
    };
    on_threads({2, 3}, [&](const Communicator& comm) {
      for (const auto& [name, edit] : edits) {
        Model model;
        auto opt = zero::wrap(momentum(model.params), suite::options_for(comm, stage));
        model.loss(batch(0, comm.rank())).backward();
        opt.step();
        const auto before = copies(model.params);
        opt.zero_grad();
        model.loss(batch(1, comm.rank())).backward();
        const bool gathers = stage < 2 && std::string(name) == "mul_";  // collective at those stages, and refused there
        if (comm.rank() == 1 && !gathers) edit(model.params[2].grad());
        std::string said;
        if (!gathers) {
          try {
            opt.step();
          } catch (const c10::Error& e) {
            said = e.what_without_backtrace();
          }
          expect(said.find("every rank has to make the same edits") != std::string::npos ||
                     said.find("Every rank has to make the same edits") != std::string::npos,
                 name, ": step() said '", said, "'");
          expect(same_bits(copies(model.params), before), name, ": parameters have changed");
          // The ranks are still in step.
          opt.zero_grad();
          model.loss(batch(1, comm.rank())).backward();
        }
        opt.step();
        expect_equal_on_ranks(comm, model.params);
      }
    });
  }
}

TEST_CASE("D8 B19 B25 several forwards, losses and passes over one graph") {
  everywhere([](const Communicator& comm, Options options) {
    using Losses = std::vector<std::pair<at::Tensor, at::Tensor>>;  // of each rank, from forwards made beforehand
    for (int way = 0; way < 5; ++way) {
      Both both;
      auto plain = momentum(both.plain.params);
      auto opt = zero::wrap(momentum(both.model.params), options);
      for (int s = 0; s < 3; ++s) {
        const auto forward = [&](const Model& m, int rank, double share) {
          const auto one = m.loss(batch(s, rank)) * share;
          return std::make_pair(one, m.loss(batch(s + 50, rank)) * (0.5 * share) + one);
        };
        const auto passes = [&](const Losses& losses, torch::optim::Optimizer& o) {
          const auto all = [&](auto pass) {
            for (const auto& [one, two] : losses) pass(one, two);
          };
          if (way == 0) all([](auto one, auto) { one.backward({}, true); }), all([](auto, auto two) { two.backward(); });
          if (way == 1) all([](auto, auto two) { two.backward({}, true); }), all([](auto one, auto) { one.backward(); });
          if (way == 2) all([](auto one, auto) { one.backward({}, true); }), all([](auto one, auto) { one.backward(); });
          if (way == 3) all([](auto one, auto two) { (one + two).backward(); });
          if (way == 4) {
            all([](auto one, auto) { one.backward({}, true); });
            o.zero_grad(s == 1);
            all([](auto, auto two) { two.backward(); });
          }
        };
        plain->zero_grad(), opt.zero_grad();
        Losses all;
        for (int r = 0; r < comm.size(); ++r) all.push_back(forward(both.plain, r, 1.0 / comm.size()));
        passes(all, *plain);
        passes({forward(both.model, comm.rank(), 1)}, opt);
        both.expect_same_gradients("several passes");
        plain->step(), opt.step();
      }
      expect_close(both.model.params, both.plain.params, "several passes");
    }
  });
}

TEST_CASE("D8 B62 recomputation inside backward") {
  everywhere([](const Communicator& comm, Options options) {
    for (bool first : {true, false}) {  // the recomputed block is the last or the first that backward comes to
      Both both;
      auto plain = momentum(both.plain.params);
      auto opt = zero::wrap(momentum(both.model.params), options);
      for (int s = 0; s < 3; ++s) {
        plain->zero_grad(), opt.zero_grad();
        const auto backward = [&](const Model& m, int rank, double share, bool recompute) {
          const Recomputed::Block one = [&](const at::Tensor& x) { return at::tanh(at::linear(x, m.params[0], m.params[1])); };
          const Recomputed::Block two = [&](const at::Tensor& h) { return at::linear(h, m.params[2]) * m.params[3]; };
          const auto x = batch(s, rank).requires_grad_(true);
          const auto h = recompute && first ? Recomputed::apply(x, &one) : one(x);
          const auto y = recompute && !first ? Recomputed::apply(h, &two) : two(h);
          ((at::linear(y + m.params[5], m.params[6]).square().mean() + m.params[1].sum() * 0.1) * share).backward();
        };
        for (int r = 0; r < comm.size(); ++r) backward(both.plain, r, 1.0 / comm.size(), false);
        backward(both.model, comm.rank(), 1, true);
        if (s == 1) both.expect_same_gradients("recomputed");
        plain->step(), opt.step();
      }
      expect_close(both.model.params, both.plain.params, "recomputed");
    }
  });
}

TEST_CASE("D10 B11 B12 parameters that some ranks, or none, use") {
  everywhere([](const Communicator& comm, Options options) {
    for (const auto& make : {Factory(adamw), Factory(momentum)}) {
      Params plain_experts, experts;
      for (int e = 0; e < 4; ++e) {
        plain_experts.push_back(values({5, 3}, e).requires_grad_(true));
        experts.push_back(values({5, 3}, e).requires_grad_(true));
      }
      auto plain = make(plain_experts);
      auto opt = zero::wrap(make(experts), options);
      // Rank r goes through expert (r + s) mod 2, all through 2 at even steps, nobody through 3.
      const auto loss = [](const Params& p, int s, int r) {
        auto l = (p[(r + s) % 2] * values({5, 3}, 10 * s + r)).square().sum();
        if (s % 2 == 0) l = l + (p[2] * values({5, 3}, 10 * s + r + 0.5)).sum();
        return l;
      };
      for (int s = 0; s < 5; ++s) {
        plain->zero_grad(), opt.zero_grad();
        for (int r = 0; r < comm.size(); ++r) (loss(plain_experts, s, r) / comm.size()).backward();
        loss(experts, s, comm.rank()).backward();
        for (std::size_t e = 0; e < experts.size(); ++e)
          expect(experts[e].grad().defined() == plain_experts[e].grad().defined(), "expert ", e, " at step ", s,
                 ": a gradient is there on this rank: ", experts[e].grad().defined());
        torch::nn::utils::clip_grad_norm_(plain_experts, 0.5);
        torch::nn::utils::clip_grad_norm_(experts, 0.5);
        plain->step(), opt.step();
      }
      expect_close(experts, plain_experts, "experts");
    }
  });
}

TEST_CASE("D8 expanded, shared and overlapping gradients") {
  everywhere([](const Communicator& comm, Options options) {
    const auto build = [] {
      return Params{values({4}, 1).requires_grad_(true), values({4}, 2).requires_grad_(true),
                    values({2, 3}, 3).requires_grad_(true), values({3, 3}, 4).t().requires_grad_(true)};
    };
    auto plain_params = build(), params = build();
    auto plain = momentum(plain_params);
    auto opt = zero::wrap(momentum(params), options);
    const auto loss = [](const Params& p, int s, int r) {
      // cat gives both one storage; sum gives an expanded gradient
      return (at::cat({p[0], p[1]}) * values({8}, s + 3 * r)).sum() + p[2].sum() * (1.0 + r) +
             (p[3] * p[3].t()).sum() * (s + 1.0 + r);
    };
    for (int s = 0; s < 3; ++s) {
      if (s != 1) plain->zero_grad(), opt.zero_grad();
      for (int r = 0; r < comm.size(); ++r) (loss(plain_params, s, r) / comm.size()).backward();
      loss(params, s, comm.rank()).backward();
      plain->step(), opt.step();
    }
    expect_close(params, plain_params, "shared gradients");
    expect(params[3].strides() == plain_params[3].strides(), "strides have changed");
  });
}

TEST_CASE("D6 several optimizers on one communicator, and a loss that fills both") {
  everywhere([](const Communicator& comm, Options options) {
    Both a, b;
    auto plain_a = adamw(a.plain.params), plain_b = momentum(b.plain.params);
    auto opt_a = zero::wrap(adamw(a.model.params), options);
    auto opt_b = zero::wrap(momentum(b.model.params), options);
    for (int s = 0; s < 4; ++s) {
      plain_a->zero_grad(), opt_a.zero_grad();
      a.backward(comm, s);  // a alone
      plain_a->step(), opt_a.step();
      plain_b->zero_grad(), opt_b.zero_grad();
      for (int r = 0; r < comm.size(); ++r)
        ((b.plain.loss(batch(s, r)) + a.plain.loss(batch(s + 9, r)) * 0.1) / comm.size()).backward();
      (b.model.loss(batch(s, comm.rank())) + a.model.loss(batch(s + 9, comm.rank())) * 0.1).backward();
      plain_b->step(), opt_b.step();
    }
    expect_close(a.model.params, a.plain.params, "first optimizer");
    expect_close(b.model.params, b.plain.params, "second optimizer");
  });
}

TEST_CASE("D6 exceptions in the middle of forward or backward leave a usable optimizer") {
  everywhere([](const Communicator& comm, Options options) {
    for (bool clears : {true, false}) {
      Both both;
      auto plain = momentum(both.plain.params);
      auto opt = zero::wrap(momentum(both.model.params), options);
      for (int s = 0; s < 4; ++s) {
        plain->zero_grad(), opt.zero_grad();
        if (s == 2) {
          bool thrown = false;
          int seen = 0;
          std::vector<unsigned> hooks;
          for (const auto& p : both.model.params)
            hooks.push_back(p.register_hook([&seen](const at::Tensor& g) -> at::Tensor {
              if (++seen == 4) throw std::runtime_error("the user's own");
              return g;
            }));
          try {
            both.model.loss(batch(99, comm.rank())).backward();
          } catch (const std::exception&) {
            thrown = true;
          }
          expect(thrown, "no exception came out of backward");
          for (std::size_t i = 0; i < hooks.size(); ++i) both.model.params[i].remove_hook(hooks[i]);
          if (clears)
            opt.zero_grad();
          else
            for (auto& p : both.model.params) p.mutable_grad().reset();
        }
        both.backward(comm, s);
        if (s == 2) both.expect_same_gradients("after an exception");
        plain->step(), opt.step();
      }
      expect_close(both.model.params, both.plain.params, "after an exception");
    }
  });
}

TEST_CASE("D25 B24 weights: the mean over samples, however they are spread") {
  everywhere([](const Communicator& comm, Options options) {
    options.reduction(zero::Reduction::kWeighted);
    Both both;
    auto plain = momentum(both.plain.params);
    auto opt = zero::wrap(momentum(both.model.params), options);
    const auto rows = [&](int s, int k, int r) { return (3 * s + 2 * k + r * 5 + 1) % 5; };  // 0 now and then
    const auto sum = [](Model& m, const at::Tensor& x) {
      const auto y = at::linear(at::tanh(at::linear(x, m.params[0], m.params[1])), m.params[2]) * m.params[3] + m.params[5];
      return at::linear(y, m.params[6]).square().sum();
    };
    for (int s = 0; s < 4; ++s) {
      plain->zero_grad(), opt.zero_grad();
      double total = 0;
      for (int k = 0; k < 2; ++k)
        for (int r = 0; r < comm.size(); ++r) total += rows(s, k, r);
      for (int k = 0; k < 2; ++k) {
        for (int r = 0; r < comm.size(); ++r)
          (sum(both.plain, values({rows(s, k, r), 5}, s + 7 * k + 3 * r)) / std::max(total, 1.0)).backward();
        opt.add_weight(rows(s, k, comm.rank()));
        sum(both.model, values({rows(s, k, comm.rank()), 5}, s + 7 * k + 3 * comm.rank())).backward();
      }
      if (s % 2 == 1) both.expect_same_gradients("weighted");
      plain->step(), opt.step();
    }
    expect_close(both.model.params, both.plain.params, "weighted");
    // Nobody has seen anything.
    opt.zero_grad();
    sum(both.model, values({0, 5}, 1)).backward();
    opt.step();
    for (const auto& p : both.model.params) expect(p.isfinite().all().item<bool>(), "no weight at all made a NaN");
  });
}

TEST_CASE("D25 B67 Join: ranks with unequal numbers of batches") {
  everywhere([](const Communicator& comm, Options options) {
    for (const bool weighted : {false, true}) {
      if (weighted) options.reduction(zero::Reduction::kWeighted);
      Both both;
      auto plain = adamw(both.plain.params);
      auto opt = zero::wrap(adamw(both.model.params), options);
      const auto batches = [](int r) { return 2 + (2 * r + 1) % 4; };
      int most = 0;
      for (int r = 0; r < comm.size(); ++r) most = std::max(most, batches(r));
      for (int s = 0; s < most; ++s) {
        plain->zero_grad();
        int working = 0;
        for (int r = 0; r < comm.size(); ++r) working += s < batches(r);
        for (int r = 0; r < comm.size(); ++r)
          if (s < batches(r)) (both.plain.loss(batch(s, r)) / (weighted ? working : comm.size())).backward();
        torch::nn::utils::clip_grad_norm_(both.plain.params, 0.3);
        plain->step();
      }
      zero::Join join(opt);
      for (int s = 0; s < batches(comm.rank()); ++s) {
        opt.zero_grad(s != 1);
        if (weighted) opt.add_weight(1);
        both.model.loss(batch(s, comm.rank())).backward();
        if (s == 2) (void)both.model.params[0].grad().sum();  // every rank that works reads it
        zero::clip_grad_norm_(opt, 0.3);
        opt.step();
      }
      const auto extra = join.wait();
      expect(extra == most - batches(comm.rank()), "took part in ", extra, " steps");
      expect_close(both.model.params, both.plain.params, weighted ? "joined, weighted" : "joined");
      expect_equal_on_ranks(comm, both.model.params);
    }
  });
}

TEST_CASE("D26 another thread that reads under a guard sees parameters of one step") {
  everywhere([](const Communicator&, const Options& options) {
    Params params;
    for (int i = 0; i < 6; ++i) params.push_back(at::zeros({501}, at::kDouble).requires_grad_(true));
    auto opt = zero::wrap<SGD>(params, SGDOptions(1.0), options);
    std::atomic<bool> done{false};
    std::string wrong;
    std::atomic<int> looks{0};
    std::thread reader([&] {
      const at::NoGradGuard no_grad;
      while (!done) {
        {
          const zero::ReadGuard guard(opt);
          const double first = params[0][0].item<double>();
          for (const auto& p : params)
            if (!(p == first).all().item<bool>()) wrong = "saw parameters of two steps";
          ++looks;
        }
        std::this_thread::yield();
      }
    });
    for (int s = 0; s < 40; ++s) {
      for (auto& p : params) p.mutable_grad() = at::ones({501}, at::kDouble);
      opt.step();
    }
    while (looks == 0) std::this_thread::yield();
    done = true;
    reader.join();
    expect(wrong.empty(), wrong);
    expect(looks > 0, "the reader never got in");
  });
}

TEST_CASE("D8 a gradient that has only come deferred replaces an earlier step's, though its bucket goes without it") {
  everywhere([](const Communicator& comm, Options options) {
    const auto make = [] { return Params{values({5}, 1).requires_grad_(true), values({5}, 2).requires_grad_(true)}; };
    Params expected = make(), params = make();  // one bucket
    auto plain = momentum(expected);
    auto opt = zero::wrap(momentum(params), options);
    const auto loss = [](const Params& p, int s, int rank, bool both) {
      const auto x = values({5}, 3.0 * s + rank);
      return both ? (p[0] * x + p[1] * x.square()).sum() : (p[0] * p[0] * x).sum();
    };
    for (int s = 0; s < 7; ++s) {
      plain->zero_grad(), opt.zero_grad();
      // Both are used in every other step, so that the plan for the sixth expects only the one, and the shard still has the other's.
      const bool first = s % 2 == 0, deferred = s == 5;
      for (int r = 0; r < comm.size(); ++r) {
        if (deferred) (loss(expected, s, r, true) / comm.size()).backward();
        (loss(expected, 10 + s, r, first) / comm.size()).backward();
      }
      if (deferred) {
        const zero::NoSync wait(opt);
        loss(params, s, comm.rank(), true).backward();
      }
      loss(params, 10 + s, comm.rank(), first).backward();
      plain->step(), opt.step();
      expect_close(params, expected, "deferred");
    }
  });
}
