// What drop-in means, one test per promise.
#include <torch/csrc/autograd/autograd.h>
#include <torch/optim/schedulers/step_lr.h>
#include <torch/serialize/archive.h>

#include <sstream>

#include "support/catch.h"
#include "support/optimizer_suite.h"

using namespace training;
using zero::Communicator;
using zero::Options;
using zero::Stage;

namespace {

void on_threads(std::vector<int> worlds, const std::function<void(const Communicator&)>& check) {
  zero::WaitPolicy policy;
  policy.timeout = std::chrono::seconds(30);
  for (int n : worlds) {
    INFO(n << " ranks");
    REQUIRE_NOTHROW(zero::run_ranks(n, policy, check));
  }
}

// On every stage and world size that the promise is about.
void everywhere(const std::function<void(const Communicator&, Options)>& check) {
  for (int stage : {0, 1}) {
    INFO("stage " << stage);
    on_threads({1, 2, 3}, [&](const Communicator& comm) { check(comm, suite::options_for(comm, stage)); });
  }
}

using torch::optim::AdamW;
using torch::optim::AdamWOptions;
using torch::optim::SGD;
using torch::optim::SGDOptions;

// A loop in one process on the mean loss, with `touch` free to do what the test is about, and the same loop on ranks.
struct Loop {
  Model model;
  std::unique_ptr<torch::optim::Optimizer> plain;
  void backward(int step, int ranks) {
    for (int r = 0; r < ranks; ++r) (model.loss(batch(step, r)) / ranks).backward();
  }
};

void expect_close(const Params& got, const Params& expected, const char* what, double bar = 1e-12) {
  const double d = distance(got, expected);
  expect(d < bar, what, ": differs from torch::optim by ", d);
}

std::unique_ptr<torch::optim::Optimizer> adamw(Params p) {
  return std::make_unique<AdamW>(std::move(p), AdamWOptions(0.01).weight_decay(0.1));
}
std::unique_ptr<torch::optim::Optimizer> momentum(Params p) {
  return std::make_unique<SGD>(std::move(p), SGDOptions(0.05).momentum(0.9).weight_decay(0.1));
}

}  // namespace

TEST_CASE("D1 schedulers and option casts reach it through a base reference") {
  everywhere([](const Communicator& comm, Options options) {
    Model plain_model, model;
    AdamW plain(plain_model.params, AdamWOptions(0.02));
    auto opt = zero::wrap<AdamW>(model.params, AdamWOptions(0.02), options);
    torch::optim::Optimizer& base = opt;
    torch::optim::StepLR plain_schedule(plain, 2, 0.5), schedule(base, 2, 0.5);
    for (int s = 0; s < 5; ++s) {
      if (s == 3) {
        static_cast<AdamWOptions&>(plain.param_groups()[0].options()).weight_decay(0.3);
        static_cast<AdamWOptions&>(base.param_groups()[0].options()).weight_decay(0.3);
      }
      plain.zero_grad(), base.zero_grad();
      for (int r = 0; r < comm.size(); ++r) (plain_model.loss(batch(s, r)) / comm.size()).backward();
      model.loss(batch(s, comm.rank())).backward();
      plain.step(), base.step();
      plain_schedule.step(), schedule.step();
    }
    expect(base.param_groups()[0].options().get_lr() == plain.param_groups()[0].options().get_lr(),
           "the schedule has moved differently");
    expect_close(model.params, plain_model.params, "with a scheduler");
  });
}

TEST_CASE("D1 archives go through the wrapped class, both ways") {
  on_threads({1, 2}, [](const Communicator& comm) {
    const auto options = suite::options_for(comm, 0);
    for (const auto& [name, make] : optimizers()) {
      if (name == "a user's class") continue;  // it has no serialize()
      Model a, b, c;
      auto first = zero::wrap(make(a.params), options);
      auto run = [&](Model& m, torch::optim::Optimizer& o, int from, int to, bool all) {
        for (int s = from; s < to; ++s) {
          o.zero_grad();
          for (int r = 0; r < comm.size(); ++r)
            if (all || r == comm.rank()) (m.loss(batch(s, r)) / (all ? comm.size() : 1)).backward();
          o.step();
        }
      };
      run(a, first, 0, 3, false);
      std::stringstream file;
      torch::serialize::OutputArchive out;
      first.save(out);
      out.save_to(file);
      const auto weights = copies(a.params);
      run(a, first, 3, 6, false);

      const at::NoGradGuard no_grad;
      for (std::size_t i = 0; i < weights.size(); ++i) b.params[i].copy_(weights[i]), c.params[i].copy_(weights[i]);
      const at::AutoGradMode grad(true);
      auto plain = make(b.params);  // an archive of ours in a plain optimizer
      torch::serialize::InputArchive in;
      file.seekg(0);
      in.load_from(file);
      plain->load(in);
      run(b, *plain, 3, 6, true);
      expect_close(b.params, a.params, name.c_str());

      std::stringstream plain_file;  // and a plain archive in ours, sharded
      {
        Model d;
        auto trained = make(d.params);
        run(d, *trained, 0, 3, true);
        torch::serialize::OutputArchive plain_out;
        trained->save(plain_out);
        plain_out.save_to(plain_file);
      }
      auto second = zero::wrap(make(c.params), suite::options_for(comm, 1));
      torch::serialize::InputArchive plain_in;
      plain_in.load_from(plain_file);
      second.load(plain_in);
      run(c, second, 3, 6, false);
      expect_close(c.params, a.params, name.c_str());
    }
  });
}

TEST_CASE("D1 saving at stage 1 says that it can't, and why") {
  on_threads({2}, [](const Communicator& comm) {
    Model model;
    auto opt = zero::wrap(adamw(model.params), suite::options_for(comm, 1));
    torch::serialize::OutputArchive out;
    expect_error({"only its part of the state"}, [&] { opt.save(out); });
  });
}

TEST_CASE("D2 every constructor shape") {
  on_threads({2}, [](const Communicator& comm) {
    Options options(comm);
    Model m1, m2, m3, m4, m5, m6, m7;
    auto o1 = zero::wrap<AdamW>(m1.params, AdamWOptions(0.01), options);
    auto o2 = zero::wrap<SGD>(m2.params, 0.01, options);
    auto o3 = zero::wrap<SGD>({m3.params[0], m3.params[1]}, SGDOptions(0.01), options);
    std::vector<torch::optim::OptimizerParamGroup> groups;
    groups.emplace_back(Params{m4.params[0]}, std::make_unique<AdamWOptions>(0.5));
    groups.emplace_back(Params{m4.params[1], m4.params[2]});
    auto o4 = zero::wrap<AdamW>(groups, AdamWOptions(0.01), options);
    auto o5 = zero::wrap<torch::optim::Adam>(m5.params, options);
    auto o6 = zero::wrap(adamw(m6.params), options);
    auto o7 = zero::wrap<AdamW>(m7.params, AdamWOptions(0.01));  // a world of one outside of mpirun
    expect(o3.parameters().size() == 2, "a braced list has two tensors");
    expect(o4.param_groups().size() == 2, "two groups");
    expect(o4.param_groups()[0].options().get_lr() == 0.5 && o4.param_groups()[1].options().get_lr() == 0.01,
           "each group its own rate");
    expect(o1.wrapped_name() == "AdamW" && o5.wrapped_name() == "Adam" && o6.wrapped_name() == "AdamW", "names");
    expect(o7.comm().size() == 1, "a world of one");
  });
}

TEST_CASE("D2 B53 a group that is added later starts at once and leaves the others alone") {
  everywhere([](const Communicator& comm, Options options) {
    Model plain_model, model;
    auto train = [&](Model& m, torch::optim::Optimizer& opt, bool all) {
      for (int s = 0; s < 5; ++s) {
        if (s == 2) {
          opt.add_param_group(torch::optim::OptimizerParamGroup({m.params[2], m.params[5]},
                                                                std::make_unique<AdamWOptions>(AdamWOptions(0.003))));
        }
        if (s == 4) opt.param_groups()[1].options().set_lr(0.05);
        for (auto& p : m.params) p.mutable_grad().reset();
        for (int r = 0; r < comm.size(); ++r)
          if (all || r == comm.rank()) (m.loss(batch(s, r)) / (all ? comm.size() : 1)).backward();
        opt.step();
      }
    };
    const auto few = [](Model& m) { return Params{m.params[0], m.params[1], m.params[3], m.params[4], m.params[6]}; };
    auto plain = adamw(few(plain_model));
    train(plain_model, *plain, true);
    auto opt = zero::wrap(adamw(few(model)), options);
    train(model, opt, false);
    expect_close(model.params, plain_model.params, "a group added later");
    for (auto* p : {&model.params[2], &model.params[0]}) {
      const auto it = opt.state().find(p->unsafeGetTensorImpl());
      if (it == opt.state().end()) continue;  // another rank's
      const auto steps = static_cast<torch::optim::AdamWParamState&>(*it->second).step();
      expect(steps == (p == &model.params[2] ? 3 : 5), "step count ", steps);
    }
  });
}

TEST_CASE("D3 classes that can't be sharded are refused with the reason") {
  on_threads({1, 2}, [](const Communicator& comm) {
    Model model;
    expect_error({"SignDescent", "Options::elementwise()"},
                 [&] { zero::wrap(std::make_unique<SignDescent>(model.params), Options(comm)); });
    auto opt = zero::wrap(std::make_unique<SignDescent>(model.params), Options(comm).elementwise());
    model.loss(batch(0, comm.rank())).backward();
    opt.step();
    expect(opt.last_step().applied, "a class that the user vouches for runs");
  });
}

TEST_CASE("D4 B52 partial options of groups: what the base class ends up with is what is used") {
  everywhere([](const Communicator& comm, Options options) {
    auto groups_of = [](Model& m) {
      std::vector<torch::optim::OptimizerParamGroup> groups;
      for (int i : {0, 2, 6})
        groups.emplace_back(Params{m.params[i]}, std::make_unique<SGDOptions>(SGDOptions(0.0).weight_decay(0.01 * (i + 1))));
      return groups;
    };
    Model plain_model, model;
    SGD plain(groups_of(plain_model), SGDOptions(0.1));
    auto opt = zero::wrap<SGD>(groups_of(model), SGDOptions(0.1), options);
    for (int s = 0; s < 2; ++s) {
      for (int r = 0; r < comm.size(); ++r) (plain_model.loss(batch(s, r)) / comm.size()).backward();
      model.loss(batch(s, comm.rank())).backward();
      plain.step(), opt.step();
      plain.zero_grad(), opt.zero_grad();
    }
    expect_close(model.params, plain_model.params, "partial options");
  });
}

TEST_CASE("D5 a learning rate that drifts apart between ranks is named") {
  on_threads({2, 3}, [](const Communicator& comm) {
    Model model;
    auto opt = zero::wrap(adamw(model.params), suite::options_for(comm, 1));
    model.loss(batch(0, comm.rank())).backward();
    opt.step();
    const auto before = copies(model.params);
    if (comm.rank() == 1) opt.param_groups()[0].options().set_lr(0.25);
    expect_error({"lr of group 0", "0.01", "on rank 0", "0.25", "on rank 1"}, [&] { opt.step(); });
    expect(same_bits(before, model.params), "a refused step has changed parameters");
    opt.param_groups()[0].options().set_lr(0.01);
    opt.step();  // and the communicator is as good as before
  });
}

TEST_CASE("D6 movable, destroyable between backward and step, several on one communicator") {
  everywhere([](const Communicator& comm, Options options) {
    Model a, b, plain_a, plain_b;
    auto pa = adamw(plain_a.params), pb = momentum(plain_b.params);
    std::unique_ptr<zero::ZeroOptimizer> oa;
    {
      auto made = zero::wrap(adamw(a.params), options);
      oa = std::make_unique<zero::ZeroOptimizer>(std::move(made));
    }
    auto ob = zero::wrap(momentum(b.params), options);
    for (int s = 0; s < 3; ++s) {
      pa->zero_grad(), pb->zero_grad(), oa->zero_grad(), ob.zero_grad();
      for (int r = 0; r < comm.size(); ++r)
        ((plain_a.loss(batch(s, r)) + plain_b.loss(batch(s + 9, r))) / comm.size()).backward();
      (a.loss(batch(s, comm.rank())) + b.loss(batch(s + 9, comm.rank()))).backward();
      pa->step(), pb->step(), oa->step(), ob.step();
    }
    expect_close(a.params, plain_a.params, "first of two");
    expect_close(b.params, plain_b.params, "second of two");
    a.loss(batch(4, comm.rank())).backward();
    const auto values_before = copies(a.params);
    const auto grad_before = a.params[0].grad().clone();
    oa.reset();
    expect(same_bits(values_before, a.params) && at::equal(grad_before, a.params[0].grad()),
           "parameters and gradients outlive the optimizer");
    a.params[0].mutable_grad().reset();
    a.loss(batch(4, comm.rank())).backward();  // hooks have gone with it
  });
}

TEST_CASE("D7 B29 every way of clearing gradients, and none") {
  everywhere([](const Communicator& comm, Options options) {
    for (const auto& make : {Factory(adamw), Factory(momentum)}) {
      for (int way = 0; way < 5; ++way) {
        Model plain_model, model;
        auto plain = make(plain_model.params);
        auto opt = zero::wrap(make(model.params), options);
        auto clear = [&](torch::optim::Optimizer& o, Model& m) {
          if (way == 0) o.zero_grad();
          if (way == 1) o.zero_grad(false);
          if (way == 2)
            for (auto& p : m.params) p.mutable_grad().reset();
          if (way == 3)
            for (auto& p : m.params)
              if (p.grad().defined()) p.mutable_grad().detach_().zero_();
          // 4: never
        };
        for (int s = 0; s < 4; ++s) {
          clear(*plain, plain_model), clear(opt, model);
          for (int r = 0; r < comm.size(); ++r) (plain_model.loss(batch(s, r)) / comm.size()).backward();
          model.loss(batch(s, comm.rank())).backward();
          if (s == 2) {  // backward – clear – backward – step
            clear(*plain, plain_model), clear(opt, model);
            for (int r = 0; r < comm.size(); ++r) (plain_model.loss(batch(s + 20, r)) / comm.size()).backward();
            model.loss(batch(s + 20, comm.rank())).backward();
          }
          plain->step(), opt.step();
          if (s == 3) plain->step(), opt.step();  // twice on the same gradients
        }
        expect_close(model.params, plain_model.params, way == 4 ? "never cleared" : "cleared");
      }
    }
  });
}

TEST_CASE("D7 a gradient that somebody kept from an earlier step keeps its values") {
  everywhere([](const Communicator& comm, Options options) {
    Model model;
    auto opt = zero::wrap(adamw(model.params), options);
    model.loss(batch(0, comm.rank())).backward();
    const auto kept = model.params[0].grad();
    const auto view = model.params[1].grad().view({-1});
    const auto kept_values = kept.clone(), view_values = view.clone();
    opt.step();
    opt.zero_grad();
    model.loss(batch(1, comm.rank())).backward();
    expect(at::equal(kept, kept_values) && at::equal(view, view_values), "a kept gradient was overwritten");
    expect(!at::equal(model.params[0].grad(), kept_values), "the new gradient is new");
  });
}

TEST_CASE("D8 B20 several backwards per step, and gradients that the user assigned") {
  everywhere([](const Communicator& comm, Options options) {
    for (int k : {1, 2, 3}) {
      Model plain_model, model;
      auto plain = adamw(plain_model.params);
      auto opt = zero::wrap(adamw(model.params), options);
      for (int s = 0; s < 3; ++s) {
        plain->zero_grad(), opt.zero_grad();
        for (int m = 0; m < k; ++m) {
          for (int r = 0; r < comm.size(); ++r) (plain_model.loss(batch(10 * s + m, r)) / (k * comm.size())).backward();
          (model.loss(batch(10 * s + m, comm.rank())) / k).backward();
        }
        plain_model.params[5].mutable_grad() = values({3}, 1) * ((1.0 + comm.size()) / 2);
        model.params[5].mutable_grad() = values({3}, 1) * (1.0 + comm.rank());
        plain->step(), opt.step();
      }
      expect_close(model.params, plain_model.params, "accumulated");
    }
  });
}

TEST_CASE("D9 B32 B16 our clipping is torch's, on the average") {
  everywhere([](const Communicator& comm, Options options) {
    for (double part : {0.5, 1.0, 2.0}) {
      for (bool twice : {false, true}) {
        Model plain_model, model;
        auto plain = momentum(plain_model.params);
        auto opt = zero::wrap(momentum(model.params), options);
        for (int s = 0; s < 4; ++s) {
          if (s != 2) plain->zero_grad(), opt.zero_grad();  // once the clipped gradients are built upon
          for (int r = 0; r < comm.size(); ++r) (plain_model.loss(batch(s, r)) / comm.size()).backward();
          model.loss(batch(s, comm.rank())).backward();
          double sum = 0;
          for (auto& p : plain_model.params) sum += p.grad().square().sum().item<double>();
          const double norm = std::sqrt(sum), max = part * norm;
          auto clip_plain = [&](double limit) {
            double now = 0;
            for (auto& p : plain_model.params) now += p.grad().square().sum().item<double>();
            const double factor = std::min(1.0, limit / (std::sqrt(now) + 1e-6));
            for (auto& p : plain_model.params) p.mutable_grad().mul_(factor);
          };
          expect(std::abs(opt.grad_norm() - norm) <= 1e-12 * norm, "grad_norm ", opt.grad_norm(), ", torch has ", norm);
          clip_plain(max);
          const double told = zero::clip_grad_norm_(opt, max);
          expect(std::abs(told - norm) <= 1e-12 * norm, "clip returned ", told, ", torch has ", norm);
          if (twice) clip_plain(max / 3), zero::clip_grad_norm_(opt, max / 3);
          if (s == 1) {  // a backward after the clip adds to what was clipped
            for (int r = 0; r < comm.size(); ++r) (plain_model.loss(batch(s + 30, r)) / comm.size()).backward();
            model.loss(batch(s + 30, comm.rank())).backward();
          }
          plain->step(), opt.step();
          if (s != 1) expect(std::abs(*opt.last_step().grad_norm - norm) <= 1e-12 * norm, "last_step has another norm");
        }
        expect_close(model.params, plain_model.params, "clipped");
      }
    }
  });
}

TEST_CASE("D10 B09 B11 B12 absent gradients, frozen and unfrozen parameters") {
  everywhere([](const Communicator& comm, Options options) {
    for (const auto& make : {Factory(adamw), Factory(momentum)}) {
      Model plain_model, model;
      auto freeze = [](Model& m, bool on) { m.params[2].set_requires_grad(!on), m.params[5].set_requires_grad(!on); };
      freeze(plain_model, true), freeze(model, true);
      auto plain = make(plain_model.params);
      auto opt = zero::wrap(make(model.params), options);
      const auto frozen = model.params[2].detach().clone();
      const auto memory_frozen = opt.memory().gradients;
      for (int s = 0; s < 6; ++s) {
        if (s == 3) {
          expect(at::equal(frozen, model.params[2]), "a frozen parameter has changed");
          freeze(plain_model, false), freeze(model, false);
        }
        plain->zero_grad(), opt.zero_grad();
        // b1 has a gradient on rank s mod W only; e on no rank at step 1.
        auto drop = [&](Model& m, int rank) {
          if (rank != s % comm.size()) m.params[1].mutable_grad().reset();
          if (s == 1) m.params[4].mutable_grad().reset(), m.params[6].mutable_grad().reset();
        };
        Params sum(plain_model.params.size());
        for (int r = 0; r < comm.size(); ++r) {
          for (auto& p : plain_model.params) p.mutable_grad().reset();
          plain_model.loss(batch(s, r)).backward();
          drop(plain_model, r);
          for (std::size_t i = 0; i < sum.size(); ++i) {
            const auto& g = plain_model.params[i].grad();
            if (g.defined()) sum[i] = sum[i].defined() ? sum[i] + g / comm.size() : g / comm.size();
          }
        }
        for (std::size_t i = 0; i < sum.size(); ++i) plain_model.params[i].mutable_grad() = sum[i];
        model.loss(batch(s, comm.rank())).backward();
        drop(model, comm.rank());
        plain->step(), opt.step();
      }
      expect_close(model.params, plain_model.params, "absent gradients");
      expect(opt.memory().gradients > memory_frozen, "unfrozen parameters have gradients, frozen ones had none");
    }
  });
}

TEST_CASE("D11 B08 several dtypes in one optimizer") {
  everywhere([](const Communicator& comm, Options options) {
    for (const auto& [name, make] : optimizers()) {
      if (name.find("amsgrad") != std::string::npos) continue;  // LibTorch itself can't take the maximum of complex numbers
      const std::vector<at::ScalarType> types{at::kFloat, at::kBFloat16,      at::kDouble,
                                              at::kHalf,  at::kComplexDouble, at::kComplexFloat};
      auto build = [&] {
        Params out;
        for (std::size_t i = 0; i < types.size(); ++i)
          out.push_back(values({5, 3}, 1.0 + static_cast<double>(i)).to(types[i]).requires_grad_(true));
        return out;
      };
      auto plain_params = build(), params = build();
      const bool no_complex = name == "RMSprop" || name == "a user's class";
      if (no_complex) plain_params.resize(4), params.resize(4);
      auto plain = make(plain_params);
      auto opt = zero::wrap(make(params), options);
      for (int s = 0; s < 3; ++s) {
        for (std::size_t i = 0; i < params.size(); ++i) {
          at::Tensor mean;
          for (int r = 0; r < comm.size(); ++r) {
            const auto g = values({5, 3}, 5.0 * s + r + 0.3 * static_cast<double>(i)).to(types[i]);
            const auto wide = g.to(g.is_complex() ? at::kComplexDouble : at::kDouble);
            mean = mean.defined() ? mean + wide : wide;
            if (r == comm.rank()) params[i].mutable_grad() = g;
          }
          plain_params[i].mutable_grad() = (mean / comm.size()).to(types[i]);
        }
        plain->step(), opt.step();
      }
      for (std::size_t i = 0; i < params.size(); ++i) {
        expect(params[i].scalar_type() == types[i], "the type has changed");
        const auto a = at::view_as_real(params[i].detach().to(at::kComplexDouble)),
                   b = at::view_as_real(plain_params[i].detach().to(at::kComplexDouble));
        const double d = (a - b).abs().max().item<double>();
        const double bar = types[i] == at::kBFloat16                                   ? 2e-2
                           : types[i] == at::kHalf                                     ? 2e-3
                           : types[i] == at::kDouble || types[i] == at::kComplexDouble ? 1e-12
                                                                                       : 1e-6;
        expect(d <= bar, name, ", ", types[i], ": differs by ", d);
      }
    }
  });
}

TEST_CASE("D12 the model is converted or loaded after construction") {
  everywhere([](const Communicator& comm, Options options) {
    Model plain_model, model(at::kFloat);
    auto opt = zero::wrap(adamw(model.params), options.names(Model::names()));
    for (std::size_t i = 0; i < model.params.size(); ++i)
      model.params[i].set_data(plain_model.params[i].detach().clone());  // as to(kDouble)
    auto plain = adamw(plain_model.params);
    at::Tensor old, old_values;
    for (int s = 0; s < 4; ++s) {
      if (s == 2) {  // as torch::load into the model: same tensor, other storage
        old = model.params[0].detach();
        old_values = old.clone();
        for (auto* m : {&plain_model, &model}) m->params[0].set_data(values({7, 5}, 77));
      }
      plain->zero_grad(), opt.zero_grad();
      for (int r = 0; r < comm.size(); ++r) (plain_model.loss(batch(s, r)) / comm.size()).backward();
      model.loss(batch(s, comm.rank())).backward();
      plain->step(), opt.step();
    }
    expect_close(model.params, plain_model.params, "converted");
    expect(at::equal(old, old_values), "an alias of the storage that was replaced has changed");
    if (comm.size() > 1) {
      model.params[0].set_data(values({7, 5}, 70 + comm.rank()));
      expect_error({"now differ between ranks", "'w1'"}, [&] { opt.step(); });
    }
  });
  everywhere([](const Communicator& comm, Options options) {
    Model model(at::kFloat);
    auto opt = zero::wrap(adamw(model.params), options.names(Model::names()));
    model.loss(batch(0, comm.rank(), at::kFloat)).backward();
    opt.step();
    for (auto& p : model.params) p.set_data(p.detach().to(at::kDouble)), p.mutable_grad().reset();
    model.loss(batch(0, comm.rank())).backward();
    expect_error({"'w1'", "after the first step"}, [&] { opt.step(); });
  });
}

TEST_CASE("D13 a group's tensors are replaced: like ones take their place, others are refused") {
  everywhere([](const Communicator& comm, Options options) {
    Model plain_model, plain_next(at::kDouble, 5), model, next(at::kDouble, 5);
    auto plain = momentum(plain_model.params);
    auto opt = zero::wrap(momentum(model.params), options);
    auto run = [&](Model& m, torch::optim::Optimizer& o, int s, bool all) {
      o.zero_grad();
      for (int r = 0; r < comm.size(); ++r)
        if (all || r == comm.rank()) (m.loss(batch(s, r)) / (all ? comm.size() : 1)).backward();
      o.step();
    };
    run(plain_model, *plain, 0, true), run(model, opt, 0, false);
    const auto old_gradient = model.params[0].grad().clone();
    plain->param_groups()[0].params() = plain_next.params;
    opt.param_groups()[0].params() = next.params;
    for (int s = 1; s < 4; ++s) run(plain_next, *plain, s, true), run(next, opt, s, false);
    expect_close(next.params, plain_next.params, "replaced");
    expect_close(model.params, plain_model.params, "the old ones");
    expect(at::equal(old_gradient, model.params[0].grad()), "the old tensor's gradient has changed");
    opt.param_groups()[0].params()[2] = values({7, 3}, 3).requires_grad_(true);
    expect_error({"was replaced", "[7, 3]", "[3, 7]"}, [&] { opt.step(); });
  });
}

TEST_CASE("D15 everybody starts from rank 0's parameters") {
  on_threads({2, 3}, [](const Communicator& comm) {
    for (int stage : {0, 1}) {
      Model model(at::kDouble, 1.0 + comm.rank());
      const auto own = copies(model.params);
      auto opt = zero::wrap(adamw(model.params), suite::options_for(comm, stage));
      expect(same_bits(model.params, copies(Model(at::kDouble, 1.0).params)), "not rank 0's parameters");
      Model kept(at::kDouble, 1.0 + comm.rank());
      auto second = zero::wrap(adamw(kept.params), suite::options_for(comm, stage).broadcast_parameters(false));
      expect(same_bits(kept.params, own), "broadcast although told not to");
    }
  });
}

TEST_CASE("D16 edits of parameters between steps are kept; aliases and views stay right") {
  everywhere([](const Communicator& comm, Options options) {
    Model plain_model, model;
    const auto alias = model.params[0].detach(), row = model.params[2].detach()[1];
    auto plain = adamw(plain_model.params);
    auto opt = zero::wrap(adamw(model.params), options);
    for (int s = 0; s < 4; ++s) {
      plain->zero_grad(), opt.zero_grad();
      for (int r = 0; r < comm.size(); ++r) (plain_model.loss(batch(s, r)) / comm.size()).backward();
      model.loss(batch(s, comm.rank())).backward();
      plain->step(), opt.step();
      const at::NoGradGuard no_grad;
      for (auto* m : {&plain_model, &model})
        m->params[0].mul_(0.5), m->params[6].clamp_(-0.2, 0.2), m->params[2][1].fill_(0.125);
    }
    expect_close(model.params, plain_model.params, "edited");
    expect(at::equal(alias, model.params[0]) && at::equal(row, model.params[2][1]), "an alias from before the wrap is stale");
  });
}

TEST_CASE("B05 channels-last, transposed, sliced and foreign memory") {
  everywhere([](const Communicator& comm, Options options) {
    std::vector<std::vector<double>> foreign(2, std::vector<double>(12, 0.25));
    auto build = [&](int which) {
      Params out;
      out.push_back(values({4, 3, 3, 3}, 1).contiguous(at::MemoryFormat::ChannelsLast).requires_grad_(true));
      out.push_back(values({4, 4}, 2).t().requires_grad_(true));
      out.push_back(values({6, 6}, 3).detach().narrow(1, 1, 3).requires_grad_(true));  // has gaps
      out.push_back(at::from_blob(foreign[which].data(), {12}, at::kDouble).requires_grad_(true));
      return out;
    };
    auto plain_params = build(0), params = build(1);
    auto plain = adamw(plain_params);
    auto opt = zero::wrap(adamw(params), options);
    auto strides = [](const Params& p) {
      std::vector<std::vector<std::int64_t>> out;
      for (const auto& t : p) out.push_back(t.strides().vec());
      return out;
    };
    const auto before = strides(params);
    for (int s = 0; s < 3; ++s) {
      plain->zero_grad(), opt.zero_grad();
      auto loss = [&](const Params& p, int r) {
        at::Tensor sum = at::zeros({}, at::kDouble);
        for (std::size_t i = 0; i < p.size(); ++i)
          sum = sum + (p[i] * values(p[i].sizes(), s + r + 0.1 * static_cast<double>(i))).pow(2).sum() + p[i].sum();
        return sum;
      };
      for (int r = 0; r < comm.size(); ++r) (loss(plain_params, r) / comm.size()).backward();
      loss(params, comm.rank()).backward();
      plain->step(), opt.step();
    }
    expect_close(params, plain_params, "strided");
    expect(strides(params) == before, "strides have changed");
    expect(foreign[1][3] != 0.25 && params[3].data_ptr() == foreign[1].data(), "memory of the user's own is updated in place");
  });
}

TEST_CASE("D18 state() is this rank's part") {
  on_threads({2, 3}, [](const Communicator& comm) {
    Model model;
    auto opt = zero::wrap(adamw(model.params), suite::options_for(comm, 1, 1 << 20));
    model.loss(batch(0, comm.rank())).backward();
    opt.step();
    std::int64_t mine = 0;
    for (auto& [key, state] : opt.state()) mine += static_cast<torch::optim::AdamWParamState&>(*state).exp_avg().numel();
    auto total = at::full({}, mine, at::kDouble);
    comm.all_reduce(total);
    std::int64_t all = 0;
    for (auto& p : model.params) all += p.numel();
    expect(total.item<double>() == static_cast<double>(all), "the ranks' parts are ", total.item<double>(), " elements, not ",
           all);
  });
}

TEST_CASE("D20 the communicator comes later") {
  everywhere([](const Communicator& comm, Options options) {
    Model plain_model, model(at::kDouble, 1.0 + comm.rank());
    auto plain = adamw(plain_model.params);
    auto opt = zero::wrap(adamw(model.params), Options().stage(options.stage()).bucket_bytes(256));
    expect_error({"attach(comm)"}, [&] { opt.step(); });
    expect_error({"attach(comm)"}, [&] { opt.grad_norm(); });
    opt.attach(comm);
    expect_error({"already"}, [&] { opt.attach(comm); });
    for (int s = 0; s < 2; ++s) {
      plain->zero_grad(), opt.zero_grad();
      for (int r = 0; r < comm.size(); ++r) (plain_model.loss(batch(s, r)) / comm.size()).backward();
      model.loss(batch(s, comm.rank())).backward();
      plain->step(), opt.step();
    }
    expect_close(model.params, plain_model.params, "attached later");
  });
}

TEST_CASE("D22 a closure is evaluated once, with gradients") {
  everywhere([](const Communicator& comm, Options options) {
    Model model;
    auto opt = zero::wrap(adamw(model.params), options);
    int calls = 0;
    const at::NoGradGuard no_grad;
    const auto loss = opt.step([&] {
      ++calls;
      opt.zero_grad();
      auto l = model.loss(batch(0, comm.rank()));
      l.backward();
      return l;
    });
    expect(calls == 1 && loss.defined() && opt.last_step().applied, "closure");
  });
}

TEST_CASE("D23 backward through a graph older than the step is refused") {
  everywhere([](const Communicator& comm, Options options) {
    Model model;
    auto opt = zero::wrap(adamw(model.params), options);
    const auto stale = model.loss(batch(0, comm.rank()));
    model.loss(batch(0, comm.rank())).backward();
    opt.step();
    expect_error({"modified by an inplace operation"}, [&] { stale.backward(); });
  });
}

TEST_CASE("D24 create_graph in backward: refused at stage 1 with the way out, and penalties through autograd::grad are right") {
  everywhere([](const Communicator& comm, Options options) {
    Model plain_model, model;
    auto plain = adamw(plain_model.params);
    auto opt = zero::wrap(adamw(model.params), options);
    auto penalised = [](Model& m, int r) {
      const auto x = batch(1, r).requires_grad_(true);
      const auto loss = m.loss(x);
      const auto g = torch::autograd::grad({loss}, {x}, {}, true, true)[0];
      return loss + g.square().sum();
    };
    for (int s = 0; s < 2; ++s) {
      plain->zero_grad(), opt.zero_grad();
      for (int r = 0; r < comm.size(); ++r) (penalised(plain_model, r) / comm.size()).backward();
      penalised(model, comm.rank()).backward();
      plain->step(), opt.step();
    }
    expect_close(model.params, plain_model.params, "penalty");
    if (options.stage() == Stage::kReplicated) return;
    opt.zero_grad();
    expect_error({"create_graph", "torch::autograd::grad"},
                 [&] { model.loss(batch(0, comm.rank())).backward({}, true, true); });
    for (auto& p : model.params) p.mutable_grad().reset();
  });
}

TEST_CASE("D25 sum and a divisor of one's own") {
  on_threads({2, 3}, [](const Communicator& comm) {
    for (int which : {0, 1}) {
      Model plain_model, model;
      auto plain = momentum(plain_model.params);
      auto options = suite::options_for(comm, 1);
      if (which == 0)
        options.reduction(zero::Reduction::kSum);
      else
        options.divisor(5);
      auto opt = zero::wrap(momentum(model.params), options);
      for (int r = 0; r < comm.size(); ++r) (plain_model.loss(batch(0, r)) / (which == 0 ? 1.0 : 5.0)).backward();
      model.loss(batch(0, comm.rank())).backward();
      plain->step(), opt.step();
      expect_close(model.params, plain_model.params, which == 0 ? "sum" : "divisor");
    }
  });
}

TEST_CASE("B14 construction changes nothing") {
  everywhere([](const Communicator& comm, Options options) {
    (void)comm;
    Model model;
    const auto before = copies(model.params);
    auto opt = zero::wrap(adamw(model.params), options);
    expect(same_bits(before, model.params), "parameters have changed");
    expect(opt.last_step().number == 0 && opt.state().empty(), "a step was made");
  });
}
