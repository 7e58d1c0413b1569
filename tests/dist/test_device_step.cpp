// Steps that are decided and made as on a GPU, by the kernels' bodies as loops (support/step_on_host.h): the bits of the host's step,
// without the host's being told anything before it asks.
#include <torch/serialize.h>

#include <atomic>
#include <limits>
#include <map>
#include <sstream>

#include "support/contract.h"
#include "support/step_on_host.h"

using namespace contract;
using step_on_host::Installed;
using zero::LossScaler;
using zero::LossScalerOptions;

namespace {

const double kInf = std::numeric_limits<double>::infinity();

/// What a training run leaves on each rank.
using Run = std::function<Params(const Communicator&, Options)>;

std::map<std::vector<int>, Params> on_all(const Run& run) {
  std::map<std::vector<int>, Params> out;
  for (const int stage : suite::stages()) {
    for (const int world : {1, 2, 3, 4}) {
      std::vector<Params> of_rank(static_cast<std::size_t>(world));
      INFO("stage " << stage << ", " << world << " ranks");
      on_threads({world}, [&](const Communicator& comm) {
        of_rank[static_cast<std::size_t>(comm.rank())] = run(comm, suite::options_for(comm, stage));
      });
      for (int r = 0; r < world; ++r) out[{stage, world, r}] = of_rank[static_cast<std::size_t>(r)];
    }
  }
  return out;
}

/// By the host and as on a device.
void compare(const char* what, const Run& run, double bar = 0) {
  INFO(what);
  const auto by_host = on_all(run);
  const Installed installed;
  const auto on_device = on_all(run);
  for (const auto& [where, expected] : by_host) {
    INFO("stage " << where[0] << ", rank " << where[2] << " of " << where[1]);
    if (bar == 0) {
      REQUIRE(same_bits(on_device.at(where), expected));
    } else {
      REQUIRE(distance(on_device.at(where), expected) < bar);
    }
  }
}

Params everything(zero::ZeroOptimizer& opt, const Params& params) {
  auto out = copies(params);
  for (const auto& shard : opt.local_shards())
    if (shard.master.defined()) out.push_back(shard.master.clone());
  return out;
}

Run training_of(const Factory& make, at::ScalarType type, const std::function<Options(Options)>& with = nullptr) {
  return [=](const Communicator& comm, Options options) {
    Model model(type);
    auto opt = zero::wrap(make(model.params), (with ? with(options) : options).names(Model::names()));
    for (int s = 0; s < 5; ++s) {
      opt.zero_grad();
      model.loss(batch(s, comm.rank(), type)).backward();
      opt.step();
    }
    return everything(opt, model.params);
  };
}

std::int64_t steps_of(zero::ZeroOptimizer& opt, const at::Tensor& p) {
  const auto it = opt.state().find(p.unsafeGetTensorImpl());
  return it == opt.state().end() ? -1 : static_cast<torch::optim::AdamWParamState&>(*it->second).step();
}

}  // namespace

TEST_CASE("device step: the host's bits, for every class, type and option that the fused pass knows") {
  using torch::optim::Adam;
  using torch::optim::AdamOptions;
  const auto adam = [](Params p) { return std::make_unique<Adam>(std::move(p), AdamOptions(0.01).weight_decay(0.1)); };
  const auto amsgrad = [](Params p) { return std::make_unique<AdamW>(std::move(p), AdamWOptions(0.01).amsgrad(true)); };
  const auto sgd = [](Params p) { return std::make_unique<SGD>(std::move(p), SGDOptions(0.05)); };
  const auto nesterov = [](Params p) {
    return std::make_unique<SGD>(std::move(p), SGDOptions(0.05).momentum(0.9).nesterov(true));
  };
  const auto dampened = [](Params p) {
    return std::make_unique<SGD>(std::move(p), SGDOptions(0.05).momentum(0.9).dampening(0.3));
  };
  for (const auto type : {at::kFloat, at::kDouble, at::kBFloat16}) {
    compare("Adam", training_of(adam, type));
    compare("AdamW", training_of(adamw, type));
    compare("AdamW with amsgrad", training_of(amsgrad, type));
    compare("SGD", training_of(sgd, type));
    compare("SGD with momentum", training_of(nesterov, type));
    compare("SGD with dampening", training_of(dampened, type));
  }
  const auto without_masters = [](Options o) { return o.master_weights(false).state_dtype(at::kBFloat16); };
  compare("AdamW in bfloat16 alone", training_of(adamw, at::kBFloat16, without_masters));
}

TEST_CASE("device step: a norm of its own, close to the host's, clips in the step") {
  const auto clipped = [](Options o) { return o.max_grad_norm(0.05); };
  compare("max_grad_norm", training_of(adamw, at::kDouble, clipped), 1e-12);
  const auto asked = [](const Communicator& comm, Options options) {
    Model model;
    auto opt = zero::wrap(adamw(model.params), options.record_grad_norm(true).max_grad_norm(0.05));
    Params norms;
    for (int s = 0; s < 4; ++s) {
      opt.zero_grad();
      model.loss(batch(s, comm.rank())).backward();
      if (s == 2) norms.push_back(at::full({}, zero::clip_grad_norm_(opt, 0.07)));
      if (s == 3) norms.push_back(at::full({}, opt.grad_norm()));
      opt.step();
      expect(opt.last_step().applied, "a step was skipped");
      norms.push_back(at::full({}, opt.last_step().grad_norm.value()));
      norms.push_back(at::full({}, opt.last_step().clip_factor));
    }
    for (const auto& p : model.params) norms.push_back(p.detach().clone());
    return norms;
  };
  compare("norms", asked, 1e-12);
}

TEST_CASE("max_grad_norm is clip_grad_norm_ before each step, but for p.grad()") {
  everywhere([](const Communicator& comm, Options options) {
    Model clipped, model;
    auto a = zero::wrap(adamw(clipped.params), Options(options));
    auto b = zero::wrap(adamw(model.params), options.max_grad_norm(0.05));
    for (int s = 0; s < 3; ++s) {
      a.zero_grad(), b.zero_grad();
      clipped.loss(batch(s, comm.rank())).backward();
      model.loss(batch(s, comm.rank())).backward();
      const double norm = zero::clip_grad_norm_(a, 0.05);
      a.step(), b.step();
      expect(b.last_step().grad_norm == norm && b.last_step().clip_factor == a.last_step().clip_factor, "norms differ");
      expect(b.last_step().clip_factor < 1, "nothing was clipped");
    }
    expect(same_bits(clipped.params, model.params), "parameters differ");
  });
}

TEST_CASE("device step: an overflow at one rank skips at all, and the host is told when it asks") {
  const Installed installed;
  for (const auto type : {at::kFloat, at::kHalf}) {
    everywhere([&](const Communicator& comm, Options options) {
      Params params{values({23}, 1).to(type).requires_grad_(true), values({5}, 2).to(type).requires_grad_(true)};
      auto opt = zero::wrap<AdamW>(params, AdamWOptions(0.01).weight_decay(0.1), options.names({"first", "second"}));
      const LossScaler scaler(opt, LossScalerOptions::torch().initial(64).growth_interval(3));
      const auto step = [&](double second) {
        opt.zero_grad();
        const double here = comm.rank() == comm.size() - 1 ? second : 0.5;
        scaler.scale((params[0] * at::full({23}, 0.25, type)).sum() + (params[1] * at::full({5}, here, type)).sum()).backward();
        opt.step();
      };
      step(kInf);  // a first step that is skipped leaves no state
      step(0.5);
      const auto before = everything(opt, params);
      step(kInf);
      step(kInf);
      expect(same_bits(everything(opt, params), before), "a skipped step has changed something");
      const auto mine = opt.local_shards();
      const bool has_state = !mine.empty() && mine[0].values.numel() > 0;
      const at::Tensor held = has_state ? mine[0].parameter : at::Tensor();
      if (has_state) expect(steps_of(opt, held) == 0, "the host has counted ", steps_of(opt, held), " steps without asking");
      const auto& report = opt.last_step();
      expect(!report.applied && report.number == 4, "the report says applied, step ", report.number);
      expect(report.loss_scale == 16, "the scale was ", report.loss_scale);
      expect(report.first_nonfinite == "'second' (group 0, #1)", "first was ", report.first_nonfinite);
      expect(report.reason.find("second") != std::string::npos, report.reason);
      if (has_state) expect(steps_of(opt, held) == 1, steps_of(opt, held), " steps were made");
      expect(scaler.current() == 8, "the scale is ", scaler.current());
      for (int s = 0; s < 3; ++s) step(0.5);
      expect(scaler.current() == 16 && scaler.clean_steps() == 0, "the scale is ", scaler.current());
      expect(opt.last_step().applied && opt.last_step().loss_scale == 8, "not applied");
      if (has_state) expect(steps_of(opt, held) == 4, steps_of(opt, held), " steps were made");
      scaler.set(1024);
      step(0.5);
      expect(opt.last_step().loss_scale == 1024, "the scale that was set is ", opt.last_step().loss_scale);
    });
  }
}

TEST_CASE("device step: a momentum that was to begin in a skipped step begins in the next") {
  const auto run = [](const Communicator& comm, Options options) {
    Params params{values({23}, 1, at::kFloat).requires_grad_(true)};
    auto opt = zero::wrap<SGD>(params, SGDOptions(0.1).momentum(0.9).dampening(0.5), options.skip_nonfinite(true));
    for (int s = 0; s < 4; ++s) {
      opt.zero_grad();
      (params[0] * at::full({23}, s == 0 && comm.rank() == 0 ? kInf : 0.5 + s)).sum().backward();
      opt.step();
      if (s == 0) {
        expect(!opt.last_step().applied, "applied");
        expect(opt.state().empty(), "a skipped step has left state");
      }
    }
    return copies(params);
  };
  compare("dampening", run);
}

TEST_CASE("device step: it follows learning rates, parameters without a gradient, and new parameters and groups") {
  const auto run = [](const Communicator& comm, Options options) {
    Params params;
    for (int i = 0; i < 4; ++i) params.push_back(values({13 + i}, 1 + i, at::kFloat).requires_grad_(true));
    auto opt = zero::wrap<AdamW>(params, AdamWOptions(0.01), options);
    for (int s = 0; s < 8; ++s) {
      if (s == 4) {
        params.push_back(values({9}, 7, at::kFloat).requires_grad_(true));
        opt.add_param_group(torch::optim::OptimizerParamGroup({params.back()}, std::make_unique<AdamWOptions>(0.5)));
      }
      static_cast<AdamWOptions&>(opt.param_groups()[0].options()).lr(0.01 / (1 + s));
      opt.zero_grad();
      auto loss = (params[0] * (0.1 * (s + 1 + comm.rank()))).sum() + params[3].square().sum();
      if (s % 2 == 0) loss = loss + (params[1] * 0.3).sum();
      if (s >= 4) loss = loss + (params[4] * 0.7).sum();
      if (s != 6) loss = loss + params[2].sum();
      loss.backward();
      opt.step();
    }
    return copies(params);
  };
  compare("changes", run);
}

TEST_CASE("device step: saved and loaded, it goes on with the same bits") {
  const auto run = [](const Communicator& comm, Options options) {
    if (comm.size() > 1 && options.stage() != Stage::kReplicated) return Params{};
    Model model(at::kFloat);
    auto opt = zero::wrap(adamw(model.params), options);
    const LossScaler scaler(opt, LossScalerOptions::torch().initial(8).growth_interval(2));
    const auto step = [&](int s) {
      opt.zero_grad();
      scaler.scale(model.loss(batch(s, comm.rank(), at::kFloat))).backward();
      opt.step();
    };
    for (int s = 0; s < 3; ++s) step(s);
    std::stringstream saved;
    torch::save(opt, saved);
    const auto there = copies(model.params);
    for (int s = 3; s < 6; ++s) step(s);
    const auto expected = copies(model.params);
    {
      const at::NoGradGuard no_grad;
      for (std::size_t i = 0; i < there.size(); ++i) model.params[i].copy_(there[i]);
    }
    torch::load(opt, saved);
    for (int s = 3; s < 6; ++s) step(s);
    expect(same_bits(model.params, expected), "a loaded optimizer goes on with other bits");
    return copies(model.params);
  };
  compare("saved and loaded", run);
}

namespace {

/// Counts what is launched.
class Counting final : public zero::DeviceLauncher {
 public:
  static std::atomic<int> updates, others;
  void begin_step(zero::kernels::cuda::StepRecord* r) override { ++others, to_->begin_step(r); }
  void add_statistics(zero::kernels::Span grad, const zero::kernels::cuda::SegmentTable& segments,
                      const zero::kernels::cuda::ParameterStep* parameters, zero::kernels::cuda::StatisticsWorkspace* workspace,
                      zero::kernels::cuda::StepRecord* record) override {
    ++others, to_->add_statistics(grad, segments, parameters, workspace, record);
  }
  void combine(const zero::kernels::cuda::Statistics* s, int n, zero::kernels::cuda::StepRecord* r) override {
    ++others, to_->combine(s, n, r);
  }
  void decide(const zero::kernels::cuda::AdamDecision& t, zero::kernels::cuda::AdamPlan<float>* a,
              zero::kernels::cuda::AdamPlan<double>* b) override {
    ++others, to_->decide(t, a, b);
  }
  void decide(const zero::kernels::cuda::SgdDecision& t, zero::kernels::cuda::SgdPlan<float>* a,
              zero::kernels::cuda::SgdPlan<double>* b) override {
    ++others, to_->decide(t, a, b);
  }
  void update(const zero::kernels::AdamSpans& s, const zero::kernels::cuda::AdamTables& t) override {
    ++updates, to_->update(s, t);
  }
  void update(const zero::kernels::SgdSpans& s, const zero::kernels::cuda::SgdTables& t) override {
    ++updates, to_->update(s, t);
  }

 private:
  std::unique_ptr<zero::DeviceLauncher> to_ = step_on_host::make_launcher();
};
std::atomic<int> Counting::updates{0}, Counting::others{0};

}  // namespace

TEST_CASE("device step: one launch updates a bucket's shard, whatever is in it") {
  for (const int stage : {1, 2, 3}) {
    INFO("stage " << stage);
    const Installed installed;
    zero::launcher_for_cpu_tensors() = [] { return std::make_unique<Counting>(); };
    on_threads({2}, [&](const Communicator& comm) {
      Params params;
      for (int i = 0; i < 50; ++i) params.push_back(values({40 + i}, i, at::kFloat).requires_grad_(true));
      auto opt =
          zero::wrap<AdamW>(params, AdamWOptions(0.01), Options(comm).stage(static_cast<Stage>(stage)).skip_nonfinite(true));
      const auto step = [&] {
        opt.zero_grad();
        auto loss = params[0].sum();
        for (int i = 1; i < 50; ++i) loss = loss + params[static_cast<std::size_t>(i)].square().sum();
        loss.backward();
        opt.step();
      };
      step();
      comm.barrier();
      if (comm.rank() == 0) Counting::updates = Counting::others = 0;
      comm.barrier();
      step();
      comm.barrier();
      // Both ranks: one bucket of 50 parameters; clear, statistics, combine, decide.
      expect(Counting::updates == 2, Counting::updates.load(), " updates");
      expect(Counting::others == 2 * 4, Counting::others.load(), " other launches");
      comm.barrier();
    });
  }
}
