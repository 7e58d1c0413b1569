// Mixed precision: masters, loss scales, overflows, clipping.
#include <torch/serialize.h>

#include <cmath>
#include <limits>

#include "cases.h"

using namespace cases;
using zero::LossScaler;
using zero::LossScalerOptions;

namespace {

const double kInf = std::numeric_limits<double>::infinity();

Params narrow(at::ScalarType type = at::kBFloat16) {
  return {leaf(values({6, 5}, 1, type)), leaf(values({6}, 2, type)), leaf(values({3, 6}, 3, type))};
}

at::Tensor loss_of(const Params& w, int s, int r) {
  const auto x = values({4, 5}, 17.0 * s + 3.0 * r + 0.5, w[0].scalar_type()) * (1 + 0.5 * r);
  return at::linear(at::tanh(at::linear(x, w[0], w[1])), w[2]).to(at::kFloat).square().mean();
}

/// Parameters, masters and state of this rank, with step numbers.
Params everything(zero::ZeroOptimizer& opt, const Params& params) {
  auto out = copies(params);
  for (const auto& shard : opt.local_shards())
    if (shard.master.defined()) out.push_back(shard.master.clone());
  for (const auto& p : params) {
    const auto it = opt.state().find(p.unsafeGetTensorImpl());
    if (it == opt.state().end() || !it->second) continue;
    auto& s = static_cast<torch::optim::AdamWParamState&>(*it->second);
    out.push_back(s.exp_avg().clone()), out.push_back(s.exp_avg_sq().clone()), out.push_back(at::full({}, s.step()));
  }
  return out;
}

}  // namespace

TEST_CASE("B08 bfloat16 base weights and float32 adapters: each is what its float32 master says") {
  at_every_stage([](const Communicator& comm, Options options) {
    const auto build = [](at::ScalarType base) {
      return Params{leaf(values({6, 6}, 1, at::kBFloat16).to(base)), leaf(values({2, 6}, 2, at::kFloat)),
                    leaf(values({6, 2}, 3, at::kFloat))};
    };
    const auto loss = [](const Params& w, const at::Tensor& base, int s, int r) {
      const auto x = values({3, 6}, 17.0 * s + 3.0 * r + 0.5, at::kFloat) * (1 + 0.7 * r);
      return (at::linear(x, base) + at::linear(at::linear(x, w[1]), w[2])).square().mean();
    };
    auto params = build(at::kBFloat16), masters = build(at::kFloat);
    auto opt = zero::wrap<SGD>(params, SGDOptions(0.05).momentum(0.9), options);
    SGD plain(masters, SGDOptions(0.05).momentum(0.9));
    for (int s = 0; s < 5; ++s) {
      opt.zero_grad(), plain.zero_grad();
      // The reference computes with the rounded weight; its gradient is rounded on every rank, and their mean once more.
      at::Tensor mean;
      const auto rounded = masters[0].detach().to(at::kBFloat16);
      for (int r = 0; r < comm.size(); ++r) {
        auto base = rounded.clone().requires_grad_(true);
        (loss(masters, base.to(at::kFloat), s, r) / comm.size()).backward();
        auto mine = rounded.clone().requires_grad_(true);
        loss(masters, mine.to(at::kFloat), s, r).backward({}, false, false, {mine});
        mean = mean.defined() ? mean + mine.grad().to(at::kFloat) : mine.grad().to(at::kFloat);
      }
      masters[0].mutable_grad() = (mean / comm.size()).to(at::kBFloat16).to(at::kFloat);
      loss(params, params[0].to(at::kFloat), s, comm.rank()).backward();
      const double norm = torch::nn::utils::clip_grad_norm_(masters, 0.5);
      const double ours = zero::clip_grad_norm_(opt, 0.5);
      expect(std::fabs(norm - ours) < 1e-5 * norm, "the norm over both types is ", ours, ", not ", norm);
      opt.step(), plain.step();
      // Adapters sum over ranks in another order: to rounding. Both ways a bfloat16 element may then be a neighbour.
      for (std::size_t i = 0; i < 3; ++i) {
        const double off = (params[i].detach().to(at::kFloat) - masters[i].detach()).abs().max().item<double>();
        expect(off < (i == 0 ? 0x1p-9 : 2e-6), "parameter ", i, " is ", off, " off");
      }
    }
    for (const auto& shard : opt.local_shards())
      if (shard.master.defined()) expect(at::equal(shard.values, shard.master.to(at::kBFloat16)), "not its master's rounding");
    expect(params[0].scalar_type() == at::kBFloat16 && params[1].scalar_type() == at::kFloat, "a type has changed");
  });
}

TEST_CASE("B35 an overflow on one rank, before the sum or in a shard after it: all skip") {
  at_every_stage([](const Communicator& comm, Options options) {
    for (const bool after : {false, true}) {
      auto params = narrow(), good_params = narrow();
      auto opt = zero::wrap(adamw(params), options), good = zero::wrap(adamw(good_params), options);
      const LossScaler scaler(opt, LossScalerOptions().initial(256)), other(good, LossScalerOptions().initial(256));
      const auto step = [&](zero::ZeroOptimizer& o, const Params& p, const LossScaler& sc, int s, bool bad) {
        o.zero_grad();
        auto loss = sc.scale(loss_of(p, s, comm.rank()));
        if (bad && !after && comm.rank() == 1) loss = loss * kInf;
        loss.backward();
        if (bad && after) {  // every rank edits the average alike; the last elements are the last rank's
          const at::NoGradGuard no_grad;
          p.back().grad().view({-1}).narrow(0, p.back().numel() - 1, 1).fill_(kInf);
        }
        o.step();
      };
      step(opt, params, scaler, 1, false), step(good, good_params, other, 1, false);
      const auto before = everything(opt, params);
      step(opt, params, scaler, 2, true);
      expect(!opt.last_step().applied, "step 2 was applied");
      expect(same_bits(before, everything(opt, params)), "step 2 has left traces");
      expect(scaler.current() == 128, "the scale is ", scaler.current());
      step(opt, params, scaler, 3, false), step(good, good_params, other, 3, false);
      expect(opt.last_step().applied, "step 3 was skipped");
      expect(same_bits(everything(opt, params), everything(good, good_params)), "step 3 isn't as if step 2 had not been");
    }
  });
}

TEST_CASE("B37 clipping before and after unscaling, with one scale and another") {
  at_every_stage([](const Communicator& comm, Options options) {
    const auto train = [&](double scale, bool unscale_first) {
      auto params = narrow();
      auto opt = zero::wrap(adamw(params), options);
      const LossScaler scaler(opt, LossScalerOptions::fixed(scale));
      for (int s = 0; s < 4; ++s) {
        opt.zero_grad();
        scaler.scale(loss_of(params, s, comm.rank())).backward();
        if (unscale_first) {
          scaler.unscale();
          scaler.unscale();  // does nothing
        }
        zero::clip_grad_norm_(opt, 0.1);
        opt.step();
        expect(opt.last_step().clip_factor < 1, "nothing was clipped");
      }
      return copies(params);
    };
    const auto expected = train(1, false);
    for (const double scale : {1.0, 1024.0})
      for (const bool unscale_first : {false, true})
        expect(same_bits(train(scale, unscale_first), expected), "scale ", scale, unscale_first ? ", unscaled first" : "");
  });
}

TEST_CASE("B38 a skipped step is reported, and neither the schedule nor Adam's count moves on") {
  at_every_stage([](const Communicator& comm, Options options) {
    auto params = narrow(), good_params = narrow();
    const auto make = [](const Params& p) { return std::make_unique<AdamW>(p, AdamWOptions(0.1).weight_decay(0)); };
    auto opt = zero::wrap(make(params), options), good = zero::wrap(make(good_params), options);
    const LossScaler scaler(opt, LossScalerOptions().initial(4)), other(good, LossScalerOptions::fixed(1));
    int n = 0;
    const auto set_rate = [](zero::ZeroOptimizer& o, int updates) {
      static_cast<AdamWOptions&>(o.param_groups()[0].options()).lr(0.1 / (1 + updates));
    };
    for (int s = 0; s < 6; ++s) {
      const bool bad = s == 2 || s == 5;
      opt.zero_grad(), set_rate(opt, n);
      auto loss = scaler.scale(loss_of(params, s, comm.rank()));
      if (bad && comm.rank() == comm.size() - 1) loss = loss * kInf;
      loss.backward();
      opt.step();
      expect(opt.last_step().applied == !bad, "step ", s);
      if (bad) continue;
      good.zero_grad(), set_rate(good, n);
      other.scale(loss_of(good_params, s, comm.rank())).backward();
      good.step();
      ++n;
    }
    for (const auto& p : params)
      if (const auto it = opt.state().find(p.unsafeGetTensorImpl()); it != opt.state().end() && it->second)
        expect(static_cast<torch::optim::AdamWParamState&>(*it->second).step() == 4, "Adam has counted skipped steps");
    expect(same_bits(everything(opt, params), everything(good, good_params)), "not the model of the good batches");
  });
}

TEST_CASE("B41 loaded weights count, whatever the masters were") {
  at_every_stage([](const Communicator& comm, Options options) {
    enum class How { copy, replace };
    for (const How how : {How::copy, How::replace}) {
      auto params = narrow(), fresh_params = narrow();
      const auto make = [](const Params& p) { return std::make_unique<SGD>(p, SGDOptions(0.1)); };
      auto opt = zero::wrap(make(params), options);
      const auto step = [&](zero::ZeroOptimizer& o, const Params& p, int s, double lr) {
        static_cast<SGDOptions&>(o.param_groups()[0].options()).lr(lr);
        o.zero_grad();
        loss_of(p, s, comm.rank()).backward();
        o.step();
      };
      for (int s = 0; s < 3; ++s) step(opt, params, s, 0.1);
      for (std::size_t i = 0; i < params.size(); ++i) {
        const at::NoGradGuard no_grad;
        const auto loaded = values(params[i].sizes(), 50.0 + static_cast<double>(i), at::kBFloat16);
        fresh_params[i].copy_(loaded);
        how == How::copy ? static_cast<void>(params[i].copy_(loaded)) : params[i].set_data(loaded.clone());
      }
      step(opt, params, 7, 0.0);
      expect(same_bits(params, fresh_params), "a step without a learning rate has changed loaded weights");
      auto fresh = zero::wrap(make(fresh_params), options);
      for (int s = 10; s < 13; ++s) step(opt, params, s, 0.1), step(fresh, fresh_params, s, 0.1);
      expect(same_bits(everything(opt, {}), everything(fresh, {})), "loaded weights train differently from new ones");
      opt.unshard();  // both optimizers are done
    }
  });
}

TEST_CASE("B43 loading keeps the types of masters and state, and their bits") {
  // What is saved has to be whole here: at stage 0.
  on_ranks([](const Communicator& comm) {
    const auto options = Options(comm).stage(Stage::kReplicated);
    auto params = narrow();
    auto opt = zero::wrap(adamw(params), options);
    const auto step = [&](zero::ZeroOptimizer& o, const Params& p, int s) {
      o.zero_grad();
      loss_of(p, s, comm.rank()).backward();
      o.step();
    };
    for (int s = 0; s < 3; ++s) step(opt, params, s);
    std::stringstream archive;
    torch::save(opt, archive);
    const auto saved = copies(params);
    for (int s = 3; s < 6; ++s) step(opt, params, s);
    const auto expected = everything(opt, params);
    for (int stage : suite::stages()) {
      auto again = saved;
      for (auto& p : again) p = p.clone().requires_grad_(true);
      auto loaded = zero::wrap(adamw(again), suite::options_for(comm, stage));
      archive.clear(), archive.seekg(0);
      torch::load(loaded, archive);
      for (int s = 3; s < 6; ++s) step(loaded, again, s);
      for (const auto& p : again)
        if (const auto it = loaded.state().find(p.unsafeGetTensorImpl()); it != loaded.state().end() && it->second)
          expect(static_cast<torch::optim::AdamWParamState&>(*it->second).exp_avg().scalar_type() == at::kFloat,
                 "moments' type");
      expect(same_bits(copies(again), Params(expected.begin(), expected.begin() + 3)), "stage ", stage, ": other parameters");
      if (stage == 0) expect(same_bits(everything(loaded, again), expected), "other masters or moments");
      loaded.unshard();
    }
  });
}
