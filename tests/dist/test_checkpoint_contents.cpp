// What a checkpoint holds, and that each of it comes back: counts, options, masters, buffers, scales, random numbers, the user's values.
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/linear.h>
#include <torch/serialize.h>

#include <filesystem>
#include <fstream>
#include <sstream>

#include "checkpoint/manifest.h"
#include "support/catch.h"
#include "support/checkpoints.h"

using namespace checkpoints;
using torch::optim::AdamW;
using torch::optim::AdamWOptions;
using torch::optim::AdamWParamState;
using torch::optim::SGD;
using torch::optim::SGDOptions;
using zero::Options;
using zero::Stage;
using zero::checkpoint::Manifest;
using zero::checkpoint::read_manifest;

namespace {

// 57 elements in two groups, which nothing divides.
struct Mlp {
  Params params;
  Mlp() {
    const std::vector<std::vector<std::int64_t>> shapes{{6, 5}, {6}, {3, 6}, {3}};
    for (std::size_t i = 0; i < shapes.size(); ++i)
      params.push_back(values(shapes[i], 1 + static_cast<double>(i)).requires_grad_(true));
  }
  static std::vector<std::pair<std::string, at::Tensor>> named(const Params& p) {
    return {{"first.weight", p[0]}, {"first.bias", p[1]}, {"second.weight", p[2]}, {"second.bias", p[3]}};
  }
  at::Tensor loss(int step, int part) const {
    const auto x = batch(step, part);
    return at::linear(at::tanh(at::linear(x, params[0], params[1])), params[2], params[3]).square().mean();
  }
  at::Tensor loss(int step, int rank, int ranks) const {
    at::Tensor sum = at::zeros({}, at::kDouble);
    for (int k = rank * 12 / ranks; k < (rank + 1) * 12 / ranks; ++k) sum = sum + loss(step, k);
    return sum / (12 / ranks);
  }
  std::unique_ptr<torch::optim::Optimizer> optimizer() const {
    std::vector<torch::optim::OptimizerParamGroup> groups;
    groups.emplace_back(Params{params[0], params[1]}, std::make_unique<AdamWOptions>(0.02));
    groups.emplace_back(Params{params[2], params[3]}, std::make_unique<AdamWOptions>(AdamWOptions(0.05).weight_decay(0.2)));
    return std::make_unique<AdamW>(std::move(groups), AdamWOptions(0.1));
  }
};

struct MlpTrainer {
  Mlp model;
  zero::ZeroOptimizer opt;
  MlpTrainer(const Communicator& comm, int stage, std::int64_t bucket_bytes = 128)
      : opt(zero::wrap(model.optimizer(), suite::options_for(comm, stage, bucket_bytes))) {}
  std::vector<std::pair<std::string, at::Tensor>> named() const { return Mlp::named(model.params); }
  void steps(int first, int last) {
    for (int s = first; s < last; ++s) {
      opt.zero_grad();
      model.loss(s, opt.comm().rank(), opt.comm().size()).backward();
      opt.step();
    }
  }
  // Parameters and the whole state: counts and moments.
  Params everything() {
    opt.consolidate_state();
    std::stringstream stream;
    torch::save(opt, stream);
    auto out = copies(model.params);
    Mlp twin;
    auto plain = twin.optimizer();
    torch::load(*plain, stream);
    for (const auto& p : twin.params) {
      auto& s = static_cast<AdamWParamState&>(*plain->state().at(p.unsafeGetTensorImpl()));
      out.push_back(s.exp_avg());
      out.push_back(s.exp_avg_sq());
      out.push_back(at::scalar_tensor(static_cast<double>(s.step()), at::kDouble));
    }
    return out;
  }
};

double lr_of(zero::ZeroOptimizer& opt, int group) { return opt.param_groups()[group].options().get_lr(); }

// A user's class that LibTorch's own serialisation is written for: state per element, a count, and a small tensor.
struct SlideOptions : torch::optim::OptimizerCloneableOptions<SlideOptions> {
  explicit SlideOptions(double l = 0.01) : lr(l) {}
  double lr;
  double get_lr() const override { return lr; }
  void set_lr(double l) override { lr = l; }
  void serialize(torch::serialize::OutputArchive& archive) const override { archive.write("lr", c10::IValue(lr)); }
  void serialize(torch::serialize::InputArchive& archive) override {
    c10::IValue value;
    archive.read("lr", value);
    lr = value.toDouble();
  }
};
struct SlideParamState : torch::optim::OptimizerCloneableParamState<SlideParamState> {
  at::Tensor mean;
  at::Tensor decay = at::scalar_tensor(1.0, at::kDouble);
  std::int64_t count = 0;
  void serialize(torch::serialize::OutputArchive& archive) const override {
    archive.write("mean", c10::IValue(mean));
    archive.write("decay", c10::IValue(decay));
    archive.write("count", c10::IValue(count));
  }
  void serialize(torch::serialize::InputArchive& archive) override {
    c10::IValue value;
    archive.read("mean", value), mean = value.toTensor();
    archive.read("decay", value), decay = value.toTensor();
    archive.read("count", value), count = value.toInt();
  }
};
class Slide : public torch::optim::Optimizer {
 public:
  explicit Slide(Params params, double lr = 0.01)
      : Optimizer({torch::optim::OptimizerParamGroup(std::move(params))}, std::make_unique<SlideOptions>(lr)) {}
  at::Tensor step(LossClosure = nullptr) override {
    for (auto& group : param_groups_) {
      for (auto& p : group.params()) {
        if (!p.grad().defined()) continue;
        auto& entry = state_[p.unsafeGetTensorImpl()];
        if (!entry) {
          auto fresh = std::make_unique<SlideParamState>();
          fresh->mean = at::zeros_like(p);
          entry = std::move(fresh);
        }
        auto& s = static_cast<SlideParamState&>(*entry);
        s.count += 1;
        s.decay = s.decay * 0.9;
        s.mean.mul_(0.8).add_(p.grad());
        p.data().sub_(group.options().get_lr() * (1 + s.decay) / static_cast<double>(s.count) * s.mean);
      }
    }
    return {};
  }
  void save(torch::serialize::OutputArchive& archive) const override {
    torch::optim::serialize<SlideParamState, SlideOptions>(archive, *this);
  }
  void load(torch::serialize::InputArchive& archive) override {
    torch::optim::serialize<SlideParamState, SlideOptions>(archive, *this);
  }
};

}  // namespace

TEST_CASE("B44 a checkpoint of 57 elements loads on any number of ranks, bit for bit") {
  const auto resident = GENERATE(4, 2);
  for (int stage = 1; stage <= 3; ++stage) {
    const test::Folder folder;
    Params saved;
    REQUIRE_NOTHROW(on_ranks(resident, [&](const Communicator& comm) {
      MlpTrainer it(comm, stage);
      it.steps(0, 3);
      zero::save(folder.path(), it.named(), it.opt);
      auto all = it.everything();
      if (comm.rank() == 0) saved = std::move(all);
    }));
    // The run that never stopped, in one process.
    Mlp plain_model;
    auto plain = plain_model.optimizer();
    for (int s = 0; s < 8; ++s) {
      plain->zero_grad();
      plain_model.loss(s, 0, 1).backward();
      plain->step();
    }
    for (int new_stage = 1; new_stage <= 3; ++new_stage) {
      for (const int ranks : {1, 2, 3, 6}) {
        INFO("stage " << stage << " on " << resident << " to stage " << new_stage << " on " << ranks);
        REQUIRE_NOTHROW(on_ranks(ranks, [&](const Communicator& comm) {
          MlpTrainer it(comm, new_stage, 64);
          zero::load(folder.path(), it.named(), it.opt);
          expect(same_bits(it.everything(), saved), "parameters, moments and counts are not those that were saved");
          it.steps(3, 8);
          const double d = distance(it.model.params, plain_model.params);
          expect(d < 1e-12, "five steps later differs by ", d);
        }));
      }
    }
  }
}

TEST_CASE("B46 files have their tensors' bytes and no more, the state once, and saving often costs no memory") {
  const auto resident_kib = [] {
    std::ifstream in("/proc/self/statm");
    std::int64_t total = 0, resident = 0;
    in >> total >> resident;
    return resident * 4;
  };
  for (int stage = 0; stage <= 3; ++stage) {
    INFO("stage " << stage);
    const test::Folder folder;
    REQUIRE_NOTHROW(on_ranks(2, [&](const Communicator& comm) {
      Params params;
      for (int i = 0; i < 32; ++i) params.push_back(values({1000}, i, at::kFloat).requires_grad_(true));
      auto opt = zero::wrap<AdamW>(params, AdamWOptions(0.01), suite::options_for(comm, stage, 1 << 20));
      for (auto& p : params) p.square().sum().backward();
      opt.step();
      std::int64_t after_two = 0;
      std::string path;
      for (int i = 0; i < 20; ++i) {
        path = zero::save(folder.path(), {}, opt, {}, zero::SaveOptions().keep(2));
        if (i == 1) after_two = resident_kib();
      }
      comm.barrier();
      const auto grown = resident_kib() - after_two;
      expect(kInstrumented || grown <= 1024, "resident memory has grown by ", grown, " KiB");
      const auto manifest = read_manifest(path);
      expect(manifest.files.size() == 2, "files");
      std::vector<std::int64_t> own(2, 0);
      std::int64_t state = 0;
      for (const auto& t : manifest.tensors)
        for (const auto& f : t.fragments) {
          own[f.file] += f.count * t.itemsize();
          if (t.kind == "state") state += f.count * t.itemsize();
        }
      expect(state == std::int64_t{2} * 32 * 1000 * 4, "the state has ", state, " bytes");
      for (int r = 0; r < 2; ++r) {
        expect(manifest.files[r].bytes <= own[r] * 11 / 10, "file ", r, " has ", manifest.files[r].bytes, " bytes for ",
               own[r]);
        expect(own[r] > 32 * 1000 * 4, "rank ", r, " has written ", own[r], " bytes: not in parallel");
      }
    }));
  }
}

TEST_CASE("B51 options of all groups come back; loading twice is loading once; a second save is the first") {
  for (int stage = 0; stage <= 3; ++stage) {
    INFO("stage " << stage);
    const test::Folder folder, again;
    REQUIRE_NOTHROW(on_ranks(3, [&](const Communicator& comm) {
      MlpTrainer one(comm, stage);
      one.opt.param_groups()[0].options().set_lr(0.037);
      one.opt.param_groups()[1].options().set_lr(0.0037);
      one.steps(0, 2);
      const auto path = zero::save(folder.path(), one.named(), one.opt);

      MlpTrainer two(comm, stage);
      for (auto& group : two.opt.param_groups()) group.options().set_lr(0.1);
      zero::load(path, two.named(), two.opt);
      expect(lr_of(two.opt, 0) == 0.037 && lr_of(two.opt, 1) == 0.0037, "learning rates ", lr_of(two.opt, 0));
      expect(static_cast<AdamWOptions&>(two.opt.param_groups()[1].options()).weight_decay() == 0.2, "weight decay");
      const auto first = two.everything();
      zero::load(path, two.named(), two.opt);
      expect(same_bits(two.everything(), first), "a second load has changed something");

      const auto second = zero::save(again.path(), two.named(), two.opt);
      const auto a = read_manifest(path), b = read_manifest(second);
      expect(a.tensors.size() == b.tensors.size() && a.states == b.states && a.options == b.options,
             "saved again: other contents");
      for (const auto& t : a.tensors) {
        if (t.kind == "options") continue;  // a zip archive with tensors' addresses in it
        const auto* u = b.find(t.kind, t.name, t.field);
        expect(u != nullptr && u->fragments.size() == t.fragments.size(), t.title(), " is missing or cut differently");
        for (std::size_t k = 0; k < t.fragments.size(); ++k)
          expect(t.fragments[k].checksum == u->fragments[k].checksum, t.title(), " is other bytes");
      }
      one.steps(2, 5), two.steps(2, 5);
      expect(same_bits(copies(one.model.params), copies(two.model.params)), "three steps later");
    }));
  }
}

TEST_CASE("16-bit parameters: masters come back to the bit, and masters and types of state may change") {
  const auto type = GENERATE(at::kBFloat16, at::kHalf);
  const auto make = [](Params p) { return std::make_unique<AdamW>(std::move(p), AdamWOptions(1e-3).weight_decay(0.1)); };
  for (int stage = 0; stage <= 3; ++stage) {
    INFO("stage " << stage);
    const test::Folder folder;
    Params saved, end;
    const auto options = [&](const Communicator& comm, int s) { return suite::options_for(comm, s).names({"a", "b"}); };
    const auto step = [](const Params& p, zero::ZeroOptimizer& opt, int s) {
      opt.zero_grad();
      ((p[0] * 0.01 * (1 + s)).sum() + (p[1] * p[1] * 0.02).sum()).backward();
      opt.step();
    };
    const auto fresh = [&](double seed) {
      return Params{values({23}, seed).to(type).requires_grad_(true), values({5}, seed + 1).to(type).requires_grad_(true)};
    };
    REQUIRE_NOTHROW(on_ranks(2, [&](const Communicator& comm) {
      const auto p = fresh(1);
      auto opt = zero::wrap(make(p), options(comm, stage));
      for (int s = 0; s < 5; ++s) step(p, opt, s);
      zero::save(folder.path(), {}, opt);
      const auto now = copies(p);
      for (int s = 5; s < 25; ++s) step(p, opt, s);
      const auto later = copies(p);
      if (comm.rank() == 0) saved = now, end = later;
    }));
    for (const int ranks : {2, 3}) {
      REQUIRE_NOTHROW(on_ranks(ranks, [&](const Communicator& comm) {
        for (int new_stage = 0; new_stage <= 3; ++new_stage) {
          const auto p = fresh(7);
          auto opt = zero::wrap(make(p), options(comm, new_stage));
          zero::load(folder.path(), {}, opt);
          // The losses are the same on every rank, so that the world size changes no bits; without the masters, small
          // steps would be lost.
          for (int s = 5; s < 25; ++s) step(p, opt, s);
          expect(same_bits(copies(p), end), "twenty steps later at stage ", new_stage);
        }
        const auto p = fresh(7), q = fresh(8);
        auto bare = zero::wrap(make(p), options(comm, stage).master_weights(false, true));
        zero::load(folder.path(), {}, bare);
        expect(same_bits(copies(p), saved), "without masters");
        step(p, bare, 5);
        auto narrow = zero::wrap(make(q), options(comm, stage).state_dtype(at::kBFloat16));
        zero::load(folder.path(), {}, narrow);
        step(q, narrow, 5);
        const auto exact = fresh(9);
        auto wide = zero::wrap(make(exact), options(comm, stage));
        zero::load(folder.path(), {}, wide);
        step(exact, wide, 5);
        if (comm.rank() == 0) expect(narrow.memory().optimizer_state < wide.memory().optimizer_state, "the state is wide");
        expect(distance(copies(q), copies(exact)) < 1e-2 && narrow.last_step().number == 6,
               "with narrow state: ", distance(copies(q), copies(exact)));
      }));
    }
  }
}

TEST_CASE("a user's class with serialisation of LibTorch's kind comes back at any number of ranks") {
  for (int stage = 0; stage <= 3; ++stage) {
    INFO("stage " << stage);
    const test::Folder folder;
    const auto make = [](Params p) { return std::make_unique<Slide>(std::move(p)); };
    Params end;
    REQUIRE_NOTHROW(on_ranks(2, [&](const Communicator& comm) {
      Trainer it(comm, stage, make);
      it.opt.param_groups()[0].options().set_lr(0.02);
      it.steps(0, 2);
      it.save(folder.path());
      it.steps(2, 5);
      const auto now = it.values();
      if (comm.rank() == 0) end = now;
    }));
    for (const int ranks : {1, 2, 3, 4}) {
      REQUIRE_NOTHROW(on_ranks(ranks, [&](const Communicator& comm) {
        Trainer it(comm, 3 - stage, make, 512, at::kDouble, 9);
        it.load(folder.path());
        it.steps(2, 5);
        const auto now = it.values();
        expect(distance(now, end) < 1e-12, "differs by ", distance(now, end));
        if (ranks == 2) expect(same_bits(now, end), "not bit for bit");
      }));
    }
  }
  // One without: said before a file is made.
  const test::Folder folder;
  REQUIRE_NOTHROW(on_ranks(2, [&](const Communicator& comm) {
    Trainer it(comm, 1, [](Params p) { return std::make_unique<SignDescent>(std::move(p)); });
    it.steps(0, 1);
    expect_error({"rank 0"}, [&] { it.save(folder.path()); });
    it.steps(1, 2);
  }));
  REQUIRE(std::filesystem::is_empty(folder.path()));
}

namespace {

struct Net : torch::nn::Module {
  torch::nn::Conv2d conv{torch::nn::Conv2dOptions(2, 3, 3)};
  torch::nn::BatchNorm2d norm{torch::nn::BatchNorm2dOptions(3)};
  torch::nn::Linear head{torch::nn::LinearOptions(12, 5)};
  torch::nn::Linear frozen{torch::nn::LinearOptions(5, 3)};
  explicit Net(double seed, bool channels_last = false) {
    register_module("conv", conv), register_module("norm", norm), register_module("head", head);
    register_module("frozen", frozen);
    to(torch::kDouble);
    register_parameter("tied", head->weight);  // one tensor under two names
    const at::NoGradGuard no_grad;
    for (auto& p : unique_parameters()) p.copy_(values(p.sizes(), seed += 1));
    if (channels_last) conv->weight.set_data(conv->weight.contiguous(at::MemoryFormat::ChannelsLast));
    for (auto& p : frozen->parameters()) p.requires_grad_(false);
  }
  Params unique_parameters() {
    Params out;
    for (auto& p : parameters())
      if (std::none_of(out.begin(), out.end(), [&](const at::Tensor& q) { return q.is_same(p); })) out.push_back(p);
    return out;
  }
  at::Tensor loss(int step, int rank) {
    auto x = values({4, 2, 4, 4}, 3.0 * step + rank);
    x = norm->forward(conv->forward(x)).flatten(1);
    return frozen->forward(head->forward(x)).square().mean() + at::linear(x, head->weight).mean();
  }
};

std::unique_ptr<torch::optim::Optimizer> momentum(Params p) {
  return std::make_unique<SGD>(std::move(p), SGDOptions(0.05).momentum(0.9));
}

}  // namespace

TEST_CASE("a module: names, frozen and tied parameters, orders of dimensions, each rank's buffers") {
  for (int stage = 0; stage <= 3; ++stage) {
    for (const bool channels_last : {false, true}) {
      INFO("stage " << stage << ", channels last " << channels_last);
      const test::Folder folder;
      Params end;
      std::vector<Params> buffers(2);
      REQUIRE_NOTHROW(on_ranks(2, [&](const Communicator& comm) {
        Net net(1, channels_last);
        auto opt = zero::wrap(momentum(net.unique_parameters()), suite::options_for(comm, stage));
        const auto step = [&](int s) { opt.zero_grad(), net.loss(s, comm.rank()).backward(), opt.step(); };
        step(0), step(1);
        const auto path = zero::save(folder.path(), net, opt);
        const auto manifest = read_manifest(path);
        expect(manifest.find("parameter", "tied") != nullptr && manifest.find("parameter", "head.weight") == nullptr, "tied");
        expect(manifest.find("parameter", "frozen.bias") != nullptr, "frozen");
        expect(manifest.find("buffer", "norm.running_mean", "1") != nullptr, "rank 1's buffers are others");
        expect(manifest.find("buffer", "norm.num_batches_tracked", "1") == nullptr, "but not the counter");
        buffers[comm.rank()] = copies(net.buffers());
      }));
      // The run that never stopped.
      REQUIRE_NOTHROW(on_ranks(2, [&](const Communicator& comm) {
        Net net(1, channels_last);
        auto opt = zero::wrap(momentum(net.unique_parameters()), suite::options_for(comm, stage));
        for (int s = 0; s < 4; ++s) opt.zero_grad(), net.loss(s, comm.rank()).backward(), opt.step();
        const auto now = copies(net.unique_parameters());
        if (comm.rank() == 0) end = now;
      }));
      REQUIRE_NOTHROW(on_ranks(2, [&](const Communicator& comm) {
        Net net(50, !channels_last);  // the other order of dimensions
        auto opt = zero::wrap(momentum(net.unique_parameters()), suite::options_for(comm, 3 - stage));
        const auto loaded = zero::load(folder.path(), net, opt);
        expect(loaded.skipped.empty() && loaded.step == 2, "loaded");
        expect(same_bits(copies(net.buffers()), buffers[comm.rank()]), "buffers");
        for (int s = 2; s < 4; ++s) opt.zero_grad(), net.loss(s, comm.rank()).backward(), opt.step();
        const double d = distance(net.unique_parameters(), end);
        expect(d < 1e-12, "two steps later differs by ", d);
      }));
      REQUIRE_NOTHROW(on_ranks(3, [&](const Communicator& comm) {
        Net net(50);
        for (auto& p : net.frozen->parameters()) p.requires_grad_(true);  // learns from now on
        auto opt = zero::wrap(momentum(net.unique_parameters()), suite::options_for(comm, stage));
        zero::load(folder.path(), net, opt);
        expect(same_bits(copies(net.buffers()), buffers[0]), "with another number of ranks, rank 0's buffers");
        opt.zero_grad(), net.loss(2, comm.rank()).backward(), opt.step();
      }));
    }
  }
}

TEST_CASE("the user's values, random numbers and loss scale come back") {
  const test::Folder folder;
  const auto table = values({3, 4}, 5).t();
  at::Tensor next;
  on_ranks(2, [&](const Communicator& comm) {
    const auto p = values({23}, 1).to(at::kHalf).requires_grad_(true);
    auto opt = zero::wrap<AdamW>(Params{p}, AdamWOptions(0.01), suite::options_for(comm, 2));
    const zero::LossScaler scaler(opt, zero::LossScalerOptions().initial(8).growth_interval(4));
    for (int s = 0; s < 3; ++s) opt.zero_grad(), scaler.scale(p.sum()).backward(), opt.step();
    zero::save(folder.path(), {}, opt,
               {{"epoch", 3},
                {"third", 1.0 / 3},
                {"shuffled", true},
                {"file", "a.txt"},
                {"table", table},
                {"seen", at::tensor({1, 2, 3}, at::kLong)},
                {"nothing", at::empty({0, 2})},
                {"scalar", at::scalar_tensor(2.5)}});
    comm.barrier();
    if (comm.rank() == 0) next = at::rand({5});
  });
  on_ranks(2, [&](const Communicator& comm) {
    const auto p = values({23}, 2).to(at::kHalf).requires_grad_(true);
    auto opt = zero::wrap<AdamW>(Params{p}, AdamWOptions(0.5), suite::options_for(comm, 1));
    const zero::LossScaler scaler(opt, zero::LossScalerOptions().initial(1).growth_interval(4));
    const auto loaded = zero::load(folder.path(), {}, opt);
    expect(scaler.current() == 8 && scaler.clean_steps() == 3, "the loss scale is ", scaler.current());
    expect(loaded.integer("epoch") == 3 && loaded.number("epoch") == 3 && loaded.number("third") == 1.0 / 3, "numbers");
    expect(loaded.text("file") == "a.txt" && at::equal(loaded.tensor("table"), table), "text and tensor");
    expect(at::equal(loaded.tensor("seen"), at::tensor({1, 2, 3}, at::kLong)) && loaded.tensor("nothing").numel() == 0,
           "tensors");
    expect(loaded.tensor("scalar").dim() == 0 && loaded.tensor("scalar").item<double>() == 2.5, "a scalar tensor");
    expect(loaded.has("shuffled") && !loaded.has("x"), "has()");
    expect_error({"no extra value 'x'"}, [&] { (void)loaded.integer("x"); });
    expect_error({"'file'", "is no integer"}, [&] { (void)loaded.integer("file"); });
    comm.barrier();
    if (comm.rank() == 0) expect(at::equal(at::rand({5}), next), "random numbers");
  });
}

TEST_CASE("a checkpoint before the first step, with groups that come later, and in a world of one") {
  for (int stage = 0; stage <= 3; ++stage) {
    INFO("stage " << stage);
    const test::Folder folder;
    REQUIRE_NOTHROW(on_ranks(2, [&](const Communicator& comm) {
      MlpTrainer one(comm, stage), two(comm, stage);
      zero::save(folder.path(), one.named(), one.opt);
      two.steps(0, 2);
      const auto loaded = zero::load(folder.path(), two.named(), two.opt);  // back to the beginning
      expect(loaded.step == 0 && two.opt.last_step().number == 0, "steps");
      one.steps(0, 3), two.steps(0, 3);
      expect(same_bits(copies(one.model.params), copies(two.model.params)), "a state that should be gone has an effect");

      // A group that was added after the last step.
      auto late = values({9}, 3).requires_grad_(true), late_too = values({9}, 4).requires_grad_(true);
      one.opt.add_param_group(torch::optim::OptimizerParamGroup({late}));
      two.opt.add_param_group(torch::optim::OptimizerParamGroup({late_too}));
      auto names = one.named(), names_too = two.named();
      names.emplace_back("late", late), names_too.emplace_back("late", late_too);
      const auto path = zero::save(folder.path(), names, one.opt);
      zero::load(path, names_too, two.opt);
      expect(at::equal(late.detach().clone(), late_too.detach().clone()), "the late parameter");
    }));
  }
}
