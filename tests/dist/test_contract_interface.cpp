// The drop-in contract, one test per promise: the optimizer's interface, its groups, options and archives.
#include <torch/csrc/autograd/autograd.h>
#include <torch/optim/schedulers/step_lr.h>
#include <torch/serialize/archive.h>

#include <sstream>

#include "support/contract.h"

using namespace contract;

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
    if (comm.size() > 1) expect_error({"when the optimizer was destroyed"}, [&] { (void)a.params[6].grad().sum(); });
    for (auto& p : a.params) p.mutable_grad().reset();
    a.loss(batch(4, comm.rank())).backward();  // hooks have gone with it
    (void)a.params[6].grad().data_ptr<double>();
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
