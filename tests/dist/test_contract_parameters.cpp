// The drop-in contract, one test per promise: parameters and their storage.
#include "support/contract.h"

using namespace contract;

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
    expect_error({"'w1'", "after the first step"}, [&] {
      model.loss(batch(0, comm.rank())).backward();
      opt.step();
    });
  });
}

TEST_CASE("D12 a conversion after the first step is refused by ranks that own nothing, too, and can be taken back") {
  on_threads({2, 3}, [](const Communicator& comm) {
    for (int stage : suite::stages()) {
      const auto build = [] { return Params{at::full({3}, 0.5, at::kFloat).requires_grad_(true)}; };
      const auto loss = [](const at::Tensor& p, int s, int rank) { return (p * (1.0 + s + rank)).square().sum(); };
      Params plain_params = build(), params = build();  // so small that the first rank owns it all
      auto plain = adamw(plain_params);
      auto opt = zero::wrap(adamw(params), suite::options_for(comm, stage).names({"small"}));
      const auto step = [&](int s) {
        plain->zero_grad(), opt.zero_grad();
        for (int r = 0; r < comm.size(); ++r) (loss(plain_params[0], s, r) / comm.size()).backward();
        loss(params[0], s, comm.rank()).backward();
        plain->step(), opt.step();
      };
      step(0);
      const auto before = params[0].detach().clone();
      params[0].set_data(before.to(at::kDouble)), params[0].mutable_grad().reset();
      expect_error({"'small'", "after the first step"}, [&] {
        loss(params[0], 1, comm.rank()).backward();
        opt.step();
      });
      params[0].set_data(before.clone()), params[0].mutable_grad().reset();
      step(1), step(2);
      expect_close(params, plain_params, "after a conversion that was taken back", 1e-6);
      expect_equal_on_ranks(comm, params);
    }
  });
}

TEST_CASE("D12 a conversion that one rank forgets is named, and can be made good") {
  on_threads({2, 3}, [](const Communicator& comm) {
    for (int stage : suite::stages()) {
      Model plain_model, model(at::kFloat);
      auto opt = zero::wrap(adamw(model.params), suite::options_for(comm, stage).names(Model::names()));
      auto convert = [&] {
        for (std::size_t i = 0; i < model.params.size(); ++i) model.params[i].set_data(plain_model.params[i].detach().clone());
      };
      if (comm.rank() == 1) convert();
      expect_error({"type of 'w1'", "Float on rank 0", "Double on rank 1"}, [&] { opt.step(); });
      expect_error({"type of 'w1'"}, [&] { opt.step(); });
      if (comm.rank() != 1) convert();
      auto plain = adamw(plain_model.params);
      for (int r = 0; r < comm.size(); ++r) (plain_model.loss(batch(0, r)) / comm.size()).backward();
      model.loss(batch(0, comm.rank())).backward();
      plain->step(), opt.step();
      expect_close(model.params, plain_model.params, "converted in the end");
    }
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

TEST_CASE("D15 everybody starts from rank 0's parameters", "[bytes]") {
  on_threads({2, 3}, [](const Communicator& comm) {
    for (int stage : suite::stages()) {
      Model model(at::kDouble, 1.0 + comm.rank());
      const auto own = copies(model.params);
      auto opt = zero::wrap(adamw(model.params), suite::options_for(comm, stage));
      expect(same_bits(model.params, copies(Model(at::kDouble, 1.0).params)), "not rank 0's parameters");
      Model kept(at::kDouble, 1.0 + comm.rank());
      auto second = zero::wrap(adamw(kept.params), suite::options_for(comm, stage).broadcast_parameters(false));
      if (stage < 3)
        expect(same_bits(kept.params, own), "broadcast although told not to");
      else  // each rank keeps what it owns of its own values
        expect(!same_bits(kept.params, copies(Model(at::kDouble, 1.0).params)), "broadcast although told not to");
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
