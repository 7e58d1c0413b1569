// Whole models in one file, and archives in torch::optim's and torch::nn's own layout, at every stage.
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/linear.h>
#include <torch/serialize.h>

#include <filesystem>
#include <sstream>

#include "checkpoint/file.h"
#include "checkpoint/safetensors.h"
#include "support/catch.h"
#include "support/checkpoints.h"

using namespace checkpoints;
using torch::optim::AdamW;
using torch::optim::AdamWOptions;
using zero::checkpoint::File;
using zero::checkpoint::read_header;
using zero::checkpoint::StoredFile;

namespace {

struct Net : torch::nn::Module {
  torch::nn::Conv2d conv{torch::nn::Conv2dOptions(2, 3, 3)};
  torch::nn::BatchNorm2d norm{torch::nn::BatchNorm2dOptions(3)};
  torch::nn::Linear head{torch::nn::LinearOptions(12, 5)};
  explicit Net(double seed = 1) {
    register_module("conv", conv), register_module("norm", norm), register_module("head", head);
    register_parameter("zz", head->weight);  // one tensor under two names
    const at::NoGradGuard no_grad;
    for (auto& p : unique_parameters()) p.copy_(values(p.sizes(), seed += 1, at::kFloat));
    conv->weight.set_data(conv->weight.contiguous(at::MemoryFormat::ChannelsLast));
    head->bias.requires_grad_(false);
  }
  Params unique_parameters() {
    Params out;
    for (auto& p : parameters())
      if (std::none_of(out.begin(), out.end(), [&](const at::Tensor& q) { return q.is_same(p); })) out.push_back(p);
    return out;
  }
  at::Tensor loss(int step, int rank) {
    const auto x = values({4, 2, 4, 4}, 3.0 * step + rank, at::kFloat).to(conv->weight.scalar_type());
    return head->forward(norm->forward(conv->forward(x)).flatten(1)).square().mean();
  }
};

at::Tensor read(const StoredFile& stored, const std::string& path, const std::string& name, at::ScalarType type) {
  const auto* t = stored.find(name);
  expect(t != nullptr, "no tensor '", name, "' in the file");
  auto out = at::empty(t->shape, type);
  expect(static_cast<std::int64_t>(out.nbytes()) == t->bytes(), name, " has ", t->bytes(), " bytes");
  File::open_to_read(path).read(out.data_ptr(), t->bytes(), t->begin);
  return out;
}

std::unique_ptr<torch::optim::Optimizer> adamw(Params p) { return std::make_unique<AdamW>(std::move(p), AdamWOptions(0.01)); }

}  // namespace

TEST_CASE("export_model writes every tensor once, in rows, in the type that is asked for") {
  for (int stage = 0; stage <= 3; ++stage) {
    for (const auto& [type, name] :
         {std::pair(at::kFloat, "F32"), std::pair(at::kHalf, "F16"), std::pair(at::kBFloat16, "BF16")}) {
      INFO("stage " << stage << ", " << name);
      const test::Folder folder;
      const auto path = folder.path() + "/model.safetensors";
      REQUIRE_NOTHROW(on_ranks(3, [&, type = type, name = std::string(name)](const Communicator& comm) {
        Net net;
        auto opt = zero::wrap(adamw(net.unique_parameters()), suite::options_for(comm, stage));
        net.loss(0, comm.rank()).backward();
        opt.step();
        zero::export_model(path, net, opt, type);
        const auto file = read_header(path);
        expect(zero::checkpoint::names_in(folder.path()).size() == 1, "something else remains");
        expect(file.metadata.at("format") == "pt" && file.metadata.at("head.weight") == "zz", "metadata");
        expect(file.find("head.weight") == nullptr, "a tied weight is there twice");
        std::size_t n = 0;
        for (const auto& item : net.named_parameters()) {
          if (item.key() == "head.weight") continue;
          ++n;
          expect(file.find(item.key()) != nullptr && file.find(item.key())->dtype == name, item.key());
          expect(at::equal(read(file, path, item.key(), type), item.value().detach().clone().to(type)), item.key(),
                 " is another");
        }
        for (const auto& item : net.named_buffers()) {
          ++n;
          if (comm.rank() == 0)
            expect(at::equal(read(file, path, item.key(), item.value().scalar_type()), item.value()), item.key(),
                   " is another");
        }
        expect(n == file.tensors.size(), "the file has ", file.tensors.size(), " tensors");
        opt.zero_grad(), net.loss(1, comm.rank()).backward(), opt.step();
      }));
    }
  }
}

TEST_CASE("B44 an export of 57 elements has 57; masters are exported in float32") {
  for (int stage = 0; stage <= 3; ++stage) {
    INFO("stage " << stage);
    const test::Folder folder;
    const auto path = folder.path() + "/model";
    REQUIRE_NOTHROW(on_ranks(2, [&](const Communicator& comm) {
      Params p;
      for (const auto& [size, seed] : {std::pair(30, 1), std::pair(6, 2), std::pair(18, 3), std::pair(3, 4)})
        p.push_back(values({size}, seed).to(at::kBFloat16).requires_grad_(true));
      auto opt = zero::wrap<AdamW>(p, AdamWOptions(1e-4), suite::options_for(comm, stage, 64).names({"a", "b", "c", "d"}));
      for (int s = 0; s < 3; ++s) {
        opt.zero_grad();
        for (auto& t : p) (t * t).sum().backward();
        opt.step();
      }
      zero::export_model(path, {}, opt);
      const auto file = read_header(path);
      std::int64_t elements = 0;
      for (const auto& t : file.tensors) elements += t.bytes() / 4;
      expect(elements == 57, "the export has ", elements);
      for (const auto& shard : opt.local_shards()) {
        const auto whole = read(file, path, shard.name, at::kFloat);
        const auto mine = whole.narrow(0, shard.begin, shard.values.numel());
        expect(at::equal(mine, shard.master.flatten()), shard.name, " isn't its master");
        expect(at::equal(mine.to(at::kBFloat16), shard.values), shard.name, " isn't what its parameter is the rounding of");
      }
      expect_error({"the type is Int"}, [&] { zero::export_model(path, {}, opt, at::kInt); });
      expect_error({"rank 0", "/proc/none"}, [&] { zero::export_model("/proc/none", {}, opt); });
      expect(read_header(path).tensors.size() == 4, "an export that failed has changed the file");
    }));
  }
}

TEST_CASE("consolidate_state makes archives of torch::optim at every stage, and the way back") {
  for (const auto& [name, make] : optimizers()) {
    if (name == "a user's class") continue;
    for (int stage = 0; stage <= 3; ++stage) {
      INFO(name << ", stage " << stage);
      std::string archive;
      Params parameters, end;
      REQUIRE_NOTHROW(on_ranks(3, [&, make = make](const Communicator& comm) {
        Trainer it(comm, stage, make);
        it.steps(0, 2);
        std::stringstream stream;
        if (stage > 0) expect_error({"consolidate_state()"}, [&] { torch::save(it.opt, stream); });
        it.opt.consolidate_state(comm.rank() == 0);
        if (comm.rank() == 0) {  // alone
          stream.str({});
          torch::save(it.opt, stream);
          archive = stream.str();
        } else if (stage > 0) {
          expect_error({"consolidate_state()"}, [&] { torch::save(it.opt, stream); });
        }
        const auto now = it.values();
        if (comm.rank() == 0) parameters = now;
        it.steps(2, 5);
        const auto later = it.values();
        if (comm.rank() == 0) end = later;
        if (stage > 0) expect_error({"after the last step"}, [&] { torch::save(it.opt, stream); });  // it is of another step
      }));
      const auto start = [&](Model& model) {
        const at::NoGradGuard no_grad;
        for (std::size_t i = 0; i < parameters.size(); ++i) model.params[i].copy_(parameters[i]);
      };
      {  // plain torch::optim goes on with it
        Model model;
        start(model);
        auto plain = make(model.params);
        std::stringstream stream(archive);
        torch::load(*plain, stream);
        for (int s = 2; s < 5; ++s) plain->zero_grad(), loss(model, s, 0, 1).backward(), plain->step();
        REQUIRE(distance(model.params, end) < 1e-12);
      }
      REQUIRE_NOTHROW(on_ranks(2, [&, make = make](const Communicator& comm) {
        Trainer it(comm, 3 - stage, make);
        start(it.model);
        std::stringstream stream(archive);
        torch::load(it.opt, stream);
        it.steps(2, 5);
        const double d = distance(it.values(), end);
        expect(d < 1e-12, "loaded into stage ", 3 - stage, " differs by ", d);
      }));
    }
  }
}

TEST_CASE("torch::save(model) and torch::load(model) have full weights at every stage") {
  for (int stage = 0; stage <= 3; ++stage) {
    INFO("stage " << stage);
    REQUIRE_NOTHROW(on_ranks(2, [&](const Communicator& comm) {
      const auto net = std::make_shared<Net>();
      auto opt = zero::wrap(adamw(net->unique_parameters()), suite::options_for(comm, stage));
      net->loss(0, comm.rank()).backward();
      opt.step();
      std::stringstream stream;
      if (stage == 3) {  // without a guard: everything, or an error; never a file that can be read and has less
        std::stringstream bare;
        std::string refusal;
        try {
          torch::save(net, bare);
        } catch (const c10::Error& e) {
          refusal = e.msg();
        }
        expect(refusal.empty() || refusal.find("GatherGuard") != std::string::npos, refusal);
        const auto read = std::make_shared<Net>(30);
        bool readable = true;
        try {
          torch::load(read, bare);
        } catch (const std::exception&) {
          readable = false;
        }
        expect(readable == refusal.empty(), "an error, and yet a file");
        if (readable)
          expect(same_bits(copies(read->unique_parameters()), copies(net->unique_parameters())), "the file has less");
      }
      {
        const zero::GatherGuard whole(opt);
        torch::save(net, stream);
      }
      const auto other = std::make_shared<Net>(9);
      torch::load(other, stream);
      expect(same_bits(copies(other->unique_parameters()), copies(net->unique_parameters())), "the file has other weights");

      // Into a model that is being trained: by the next step every rank has its part of the new values.
      const auto third = std::make_shared<Net>(20);
      auto third_opt = zero::wrap(adamw(third->unique_parameters()), suite::options_for(comm, stage));
      stream.clear(), stream.seekg(0);
      torch::load(third, stream);
      expect(same_bits(copies(third->unique_parameters()), copies(net->unique_parameters())), "loaded weights are others");
      third->loss(1, comm.rank()).backward();
      third_opt.step();
      expect_equal_on_ranks(comm, third->unique_parameters());
    }));
  }
}
