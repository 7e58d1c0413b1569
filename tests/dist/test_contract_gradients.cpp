// The drop-in contract, one test per promise: gradients.
#include "support/contract.h"

using namespace contract;

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
    if (options.stage() >= Stage::kGradients && comm.size() > 1) {
      expect_error({"earlier backward", "clone()"}, [&] { (void)kept.sum(); });  // nobody has it any more
    } else {
      expect(at::equal(kept, kept_values) && at::equal(view, view_values), "a kept gradient was overwritten");
    }
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
        // b1 has a gradient on rank s mod W only; e and w3 on no rank at step 1.
        auto loss = [&](const Model& m, int rank) {
          Model used = m;
          const auto drop = [&](std::size_t i) { used.params[i] = used.params[i].detach(); };
          if (rank != s % comm.size()) drop(1);
          if (s == 1) drop(4), drop(6);
          return used.loss(batch(s, rank));
        };
        for (int r = 0; r < comm.size(); ++r) (loss(plain_model, r) / comm.size()).backward();
        loss(model, comm.rank()).backward();
        for (std::size_t i = 0; i < model.params.size(); ++i)
          expect(model.params[i].grad().defined() == plain_model.params[i].grad().defined(), "gradient ", i, " at step ", s,
                 " is defined: ", model.params[i].grad().defined());
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
