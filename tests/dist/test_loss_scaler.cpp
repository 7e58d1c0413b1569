// Loss scaling: nothing changes but what float16 can hold, overflows are skipped by all, and the scale follows the published rules.
#include <ATen/ops/_amp_update_scale.h>
#include <torch/serialize.h>

#include <cmath>
#include <limits>

#include "support/contract.h"

using namespace contract;
using zero::LossScaler;
using zero::LossScalerOptions;

namespace {

const double kInf = std::numeric_limits<double>::infinity();

/// One parameter whose gradient is what a test says, by backward.
struct Given {
  Params params;
  zero::ZeroOptimizer opt;
  explicit Given(Options options, at::ScalarType type = at::kFloat)
      : params{values({23}, 1).to(type).requires_grad_(true), values({5}, 2).to(type).requires_grad_(true)},
        opt(zero::wrap<AdamW>(params, AdamWOptions(0.01).weight_decay(0.1), options.names({"first", "second"}))) {}
  void backward(const LossScaler& scaler, double first, double second) {
    opt.zero_grad();
    const auto type = params[0].scalar_type();
    scaler.scale((params[0] * at::full({23}, first, type)).sum() + (params[1] * at::full({5}, second, type)).sum()).backward();
  }
  /// The state that a skipped step leaves alone.
  Params kept() {
    (void)opt.last_step();  // where a device decides, state() says what was known when somebody asked last
    auto out = copies(params);
    for (const auto& p : params) {
      const auto it = opt.state().find(p.unsafeGetTensorImpl());
      if (it == opt.state().end() || !it->second) continue;
      auto& s = static_cast<torch::optim::AdamWParamState&>(*it->second);
      out.push_back(s.exp_avg().clone()), out.push_back(s.exp_avg_sq().clone());
      out.push_back(at::full({}, s.step()));
    }
    for (const auto& shard : opt.local_shards())
      if (shard.master.defined()) out.push_back(shard.master.clone());
    return out;
  }
};

}  // namespace

TEST_CASE("loss scale: a power of two changes no bit, whoever clips and when") {
  enum class Way { plain, clip_in_step, unscale_then_torch, unscale_twice, norm_first };
  for (const auto type : {at::kFloat, at::kBFloat16}) {
    everywhere([&](const Communicator& comm, Options options) {
      const auto train = [&](double scale, Way way) {
        Model model(type);
        auto opt = zero::wrap<AdamW>(model.params, AdamWOptions(0.01).weight_decay(0.1), options);
        const LossScaler scaler(opt, LossScalerOptions::fixed(scale));
        for (int s = 0; s < 5; ++s) {
          opt.zero_grad();
          for (int k = 0; k < 2; ++k) scaler.scale(model.loss(batch(10 * k + s, comm.rank(), type)) / 2).backward();
          double norm = -1;
          if (way == Way::norm_first) norm = opt.grad_norm();
          if (way == Way::clip_in_step || way == Way::norm_first) norm = zero::clip_grad_norm_(opt, 0.2);
          if (way == Way::unscale_then_torch || way == Way::unscale_twice) {
            scaler.unscale();
            if (way == Way::unscale_twice) scaler.unscale();
            norm = zero::clip_grad_norm_(opt, 0.2);
          }
          opt.step();
          const auto& report = opt.last_step();
          expect(report.applied && report.loss_scale == scale, "scale ", report.loss_scale);
          if (way != Way::plain)
            expect(report.grad_norm && std::fabs(*report.grad_norm - norm) <= 1e-12 * norm, "norms differ");
        }
        return copies(model.params);
      };
      for (const Way way : {Way::plain, Way::clip_in_step, Way::unscale_then_torch, Way::unscale_twice, Way::norm_first}) {
        const auto expected = train(1, way == Way::plain ? Way::plain : Way::clip_in_step);
        for (const double scale : {1024.0, 0.25})
          expect(same_bits(train(scale, way), expected), "scale ", scale, ", way ", static_cast<int>(way));
      }
    });
  }
}

TEST_CASE("loss scale: LibTorch's clip after unscale() sees the true gradients") {
  everywhere([](const Communicator& comm, Options options) {
    const auto train = [&](double scale) {
      Model model(at::kFloat);
      auto opt = zero::wrap<AdamW>(model.params, AdamWOptions(0.01), options);
      const LossScaler scaler(opt, LossScalerOptions::fixed(scale));
      for (int s = 0; s < 3; ++s) {
        opt.zero_grad();
        scaler.scale(model.loss(batch(s, comm.rank(), at::kFloat))).backward();
        scaler.unscale();
        const double norm = torch::nn::utils::clip_grad_norm_(model.params, 0.2);
        expect(norm > 0.2 && norm < 100, "the norm is ", norm);
        opt.step();
      }
      return copies(model.params);
    };
    expect(same_bits(train(1), train(4096)), "clipping depends on the scale");
  });
}

TEST_CASE("loss scale: small gradients survive in float16 with it, and vanish without") {
  everywhere([](const Communicator&, Options options) {
    for (const double scale : {1.0, 65536.0}) {
      Params params{at::ones({40}, at::kHalf).requires_grad_(true)};
      auto opt = zero::wrap<SGD>(params, SGDOptions(1.0), options);
      const LossScaler scaler(opt, LossScalerOptions::fixed(scale));
      // The gradient of the product is 2^-26 × scale, which float16 has for the larger scale only.
      scaler.scale((params[0].to(at::kFloat) * 0x1p-26).sum()).backward();
      opt.step();
      for (const auto& shard : opt.local_shards())
        expect(shard.master[0].item<double>() == (scale > 1 ? static_cast<double>(1.0F - 0x1p-26F) : 1.0), "scale ", scale,
               ": ", shard.master[0].item<double>());
    }
  });
}

TEST_CASE("loss scale: what overflows on one rank is skipped on all, and leaves nothing behind") {
  for (const auto type : {at::kFloat, at::kBFloat16, at::kHalf}) {
    everywhere([&](const Communicator& comm, Options options) {
      const int bad = comm.size() - 1;
      for (const double what : {kInf, std::numeric_limits<double>::quiet_NaN()}) {
        Given it(options, type), good(options, type);
        const LossScaler scaler(it.opt, LossScalerOptions().initial(256));
        const LossScaler other(good.opt, LossScalerOptions::fixed(1));
        for (int s = 0; s < 2; ++s) {
          for (auto* x : {&it, &good}) {
            x->backward(x == &it ? scaler : other, 0.5 + s + comm.rank(), 0.25);
            zero::clip_grad_norm_(x->opt, 1.0);
            x->opt.step();
          }
        }
        const auto before = it.kept();
        it.backward(scaler, 0.5, comm.rank() == bad ? what : 0.5);
        it.opt.step();
        const auto& report = it.opt.last_step();
        expect(!report.applied && report.number == 3 && report.loss_scale == 256, "step 3 was applied");
        expect(report.first_nonfinite.find("second") != std::string::npos, "it was ", report.first_nonfinite);
        expect(report.reason.find("second") != std::string::npos, report.reason);
        expect(report.grad_norm && !std::isfinite(*report.grad_norm), "a finite norm");
        expect(scaler.current() == 128, "the scale is ", scaler.current());
        const auto after = it.kept();
        expect(before.size() == after.size() && same_bits(before, after), "a skipped step has left traces");
        // The second in a row says where.
        it.backward(scaler, 0.5, comm.rank() == bad ? what : 0.5);
        it.opt.step();
        expect(!it.opt.last_step().applied && it.opt.last_step().nonfinite_rank == bad, "rank ",
               it.opt.last_step().nonfinite_rank);
        expect(scaler.current() == 64, "the scale is ", scaler.current());
        for (auto* x : {&it, &good}) {
          x->backward(x == &it ? scaler : other, 0.75 + comm.rank(), 0.25);
          zero::clip_grad_norm_(x->opt, 1.0);
          x->opt.step();
        }
        expect(it.opt.last_step().applied && it.opt.last_step().loss_scale == 64, "step 5");
        expect(same_bits(it.kept(), good.kept()), "the steps that counted make another model");
      }
    });
  }
}

TEST_CASE("loss scale: finite gradients whose sum isn't") {
  for (int stage : suite::stages()) {
    on_threads({2, 3}, [&](const Communicator& comm) {
      Given it(suite::options_for(comm, stage).reduction(zero::Reduction::kSum), at::kHalf);
      const LossScaler scaler(it.opt, LossScalerOptions().initial(4));
      const auto before = it.kept();
      it.backward(scaler, 0.5, 60000.0 / 4);
      it.opt.step();
      expect(!it.opt.last_step().applied && scaler.current() == 2, "applied");
      expect(same_bits(before, it.kept()), "traces");
      // No rank's own gradient is to blame.
      it.backward(scaler, 0.5, 60000.0 / 2);
      it.opt.step();
      expect(!it.opt.last_step().applied && it.opt.last_step().nonfinite_rank == -1, "rank ",
             it.opt.last_step().nonfinite_rank);
      expect(it.opt.last_step().first_nonfinite.find("second") != std::string::npos, it.opt.last_step().first_nonfinite);
    });
  }
}

TEST_CASE("loss scale: at the minimum the step says which parameter on which rank, and fails if asked") {
  everywhere([](const Communicator& comm, Options options) {
    const int bad = comm.size() / 2;
    for (const bool fail : {false, true}) {
      Given it(options);
      const LossScaler scaler(it.opt, LossScalerOptions().initial(2).minimum(2).fail_at_minimum(fail));
      it.backward(scaler, comm.rank() == bad ? kInf : 1, 1);
      const auto before = it.kept();
      if (fail) {
        expect_error({"first", "rank " + std::to_string(bad), "can't become smaller"}, [&] { it.opt.step(); });
      } else {
        it.opt.step();
      }
      const auto& report = it.opt.last_step();
      expect(!report.applied && report.nonfinite_rank == bad && report.first_nonfinite.find("first") != std::string::npos,
             "rank ", report.nonfinite_rank, ": ", report.first_nonfinite);
      expect(report.reason.find("can't become smaller") != std::string::npos, report.reason);
      expect(scaler.current() == 2 && same_bits(before, it.kept()), "the minimum");
      it.backward(scaler, 1, 1);
      it.opt.step();
      expect(it.opt.last_step().applied, "the run goes on");
    }
  });
}

TEST_CASE("loss scale: 5000 steps by torch's rule and by DeepSpeed's") {
  // Rare overflows at first, so that the scale grows; then bursts.
  const auto overflows = [](int s) { return s % 2311 == 2310 || (s > 3000 && s % 97 < 2) || (s > 4200 && s % 3 == 0); };
  zero::run_ranks(2, [&](const Communicator& comm) {
    Params a{at::zeros({3}).requires_grad_(true)}, b{at::zeros({3}).requires_grad_(true)};
    auto torchs = zero::wrap<SGD>(a, SGDOptions(0.0), Options(comm)),
         deeps = zero::wrap<SGD>(b, SGDOptions(0.0), Options(comm));
    const LossScaler torch_scaler(torchs, LossScalerOptions::torch()), deep_scaler(deeps, LossScalerOptions::deepspeed());
    // torch.amp's rule is an operator of LibTorch; DeepSpeed's as its documentation and source (runtime/fp16/loss_scaler.py) have it,
    // by the number of the iteration.
    auto scale = at::full({}, 65536.0F);
    auto tracker = at::zeros({}, at::kInt);
    double cur = 65536;
    int iteration = 0, last_overflow = -1, hysteresis = 2;
    int grown = 0, shrunk = 0;
    for (int s = 0; s < 5000; ++s) {
      const bool overflow = overflows(s);
      // Only the gradient's kind matters here: assigned, on one rank.
      const auto g = at::full({3}, overflow && comm.rank() == 1 ? kInf : 1.0, at::kFloat);
      a[0].mutable_grad() = g.clone(), b[0].mutable_grad() = g.clone();
      torchs.step(), deeps.step();
      const double before = cur;
      at::_amp_update_scale_(scale, tracker, at::full({}, overflow ? 1.0F : 0.0F), 2.0, 0.5, 2000);
      if (overflow) {
        if (hysteresis == 1) {
          cur = std::max(cur / 2, 1.0);
        } else {
          --hysteresis;
        }
        last_overflow = iteration;
      } else if ((iteration - last_overflow) % 1000 == 0) {
        hysteresis = 2;
        cur *= 2;
      }
      ++iteration;
      grown += cur > before, shrunk += cur < before;
      expect(torch_scaler.current() == scale.item<double>(), "step ", s, ": torch's scale is ", scale.item<double>(), ", ours ",
             torch_scaler.current());
      expect(deep_scaler.current() == cur, "step ", s, ": DeepSpeed's scale is ", cur, ", ours ", deep_scaler.current());
      expect(torchs.last_step().applied == !overflow && deeps.last_step().applied == !overflow, "step ", s);
    }
    expect(grown >= 2 && shrunk > 5, "the pattern shows nothing: ", grown, " and ", shrunk);
  });
}

TEST_CASE("loss scale: set() counts from the next step on when losses have been scaled") {
  everywhere([](const Communicator& comm, Options options) {
    Given it(options);
    const LossScaler scaler(it.opt, LossScalerOptions().initial(8));
    it.backward(scaler, 1, 1);
    scaler.set(32);
    expect(scaler.current() == 8, "at once");
    const double norm = it.opt.grad_norm();
    expect(std::fabs(norm - std::sqrt(28.0)) < 1e-5, "the norm is ", norm);
    it.opt.step();
    expect(it.opt.last_step().loss_scale == 8 && scaler.current() == 32, "the next");
    scaler.set(4);
    expect(scaler.current() == 4, "nothing was scaled yet");
    if (comm.size() > 1) {
      if (comm.rank() == 1) scaler.set(2);
      expect_error({"LossScaler: the scale", "rank"}, [&] {
        it.backward(scaler, 1, 1);
        it.opt.step();
      });
    }
  });
}

TEST_CASE("loss scale: gradients that nobody scaled are taken as they are; a rank without a loss follows the others") {
  everywhere([](const Communicator& comm, Options options) {
    Params params{at::zeros({6}).requires_grad_(true)};
    auto opt = zero::wrap<SGD>(params, SGDOptions(1.0), options);
    const LossScaler scaler(opt, LossScalerOptions::fixed(16));
    params[0].sum().backward();
    opt.step();
    expect(opt.last_step().loss_scale == 1, "a scale");
    expect(at::equal(params[0].detach(), at::full({6}, -1.0F)), "unscaled gradients were divided");
    opt.zero_grad();
    if (comm.rank() == 0) {
      scaler.scale(params[0].sum() * comm.size()).backward();
    } else {
      (params[0] * 0).sum().backward();  // no data: no loss that could be scaled
    }
    opt.step();
    expect(opt.last_step().loss_scale == 16, "no scale");
    expect(at::equal(params[0].detach(), at::full({6}, -2.0F)), "scaled gradients weren't divided");
  });
}

TEST_CASE("loss scale: ranks out of data follow (Join), unscale() and skips included") {
  for (int stage : suite::stages()) {
    on_threads({2, 3}, [&](const Communicator& comm) {
      Given it(suite::options_for(comm, stage));
      const LossScaler scaler(it.opt, LossScalerOptions().initial(8));
      {
        zero::Join join(it.opt);
        const int batches = comm.rank() == 0 ? 5 : 2;
        for (int s = 0; s < batches; ++s) {
          it.backward(scaler, s == 3 ? kInf : 1.0, 0.5);
          if (s % 2 == 0) scaler.unscale();
          it.opt.step();
        }
        join.wait();
      }
      expect(it.opt.last_step().number == 5 && scaler.current() == 4, "the scale is ", scaler.current());
      expect_equal_on_ranks(comm, it.params);
    });
  }
}

TEST_CASE("loss scale: what makes no sense is refused") {
  on_threads({1, 2}, [](const Communicator& comm) {
    Given it{Options(comm)};
    expect_error({"growth", "≥ 1"}, [&] { (void)LossScaler(it.opt, LossScalerOptions().growth(0.5)); });
    expect_error({"backoff"}, [&] { (void)LossScaler(it.opt, LossScalerOptions().backoff(2)); });
    expect_error({"minimum"}, [&] { (void)LossScaler(it.opt, LossScalerOptions().initial(1).minimum(2)); });
    expect_error({"positive"}, [&] { (void)LossScaler(it.opt, LossScalerOptions().initial(kInf)); });
    const LossScaler scaler(it.opt);
    expect_error({"has one already"}, [&] { (void)LossScaler(it.opt); });
    it.backward(scaler, 1, 1);
    scaler.unscale();
    expect_error({"unscaled already"}, [&] { (void)scaler.scale(it.params[0].sum()); });
    if (comm.size() > 1) {
      it.opt.step();
      it.backward(scaler, 1, 1);
      if (comm.rank() == 0) scaler.unscale();
      expect_error({"unscale()", "rank 0", "rank 1"}, [&] { it.opt.step(); });
    }
  });
}

TEST_CASE("loss scale and masters are saved with the optimizer, and plain archives load") {
  on_threads({1}, [](const Communicator& comm) {
    const auto type = at::kBFloat16;
    std::stringstream full, plain_archive;
    Params after_three, after_six;
    {
      Given it(Options(comm), type);
      const LossScaler scaler(it.opt, LossScalerOptions().initial(64).growth_interval(4));
      for (int s = 0; s < 6; ++s) {
        if (s == 3) {
          torch::save(it.opt, full);
          after_three = it.kept();
        }
        it.backward(scaler, 0.3 + s, 0.1 * s);
        it.opt.step();
      }
      after_six = it.kept();
      expect(scaler.current() == 128 && scaler.clean_steps() == 2, "grown");
    }
    Given it(Options(comm), type);
    const LossScaler scaler(it.opt, LossScalerOptions().initial(1).growth_interval(4));
    {
      const at::NoGradGuard no_grad;
      for (std::size_t i = 0; i < 2; ++i) it.params[i].copy_(after_three[i]);
    }
    torch::load(it.opt, full);
    expect(scaler.current() == 64 && scaler.clean_steps() == 3, "the scale is ", scaler.current());
    for (int s = 3; s < 6; ++s) {
      it.backward(scaler, 0.3 + s, 0.1 * s);
      it.opt.step();
    }
    expect(same_bits(it.kept(), after_six), "three steps after loading are others");

    // Into and from plain torch::optim.
    full.clear(), full.seekg(0);
    Params other{values({23}, 1).to(type).requires_grad_(true), values({5}, 2).to(type).requires_grad_(true)};
    AdamW plain(other, AdamWOptions(0.5));
    torch::load(plain, full);
    expect(static_cast<AdamWOptions&>(plain.param_groups()[0].options()).lr() == 0.01, "plain has read options");
    torch::save(plain, plain_archive);
    torch::load(it.opt, plain_archive);
    it.backward(scaler, 1, 1);
    it.opt.step();
    expect(it.opt.last_step().applied, "after a plain archive");
  });
}
