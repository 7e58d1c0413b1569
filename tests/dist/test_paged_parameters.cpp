// Stage 3: parameters that are whole only while operators use them. What a trainer may do with them, what it costs, and what is refused.
#include <torch/csrc/autograd/autograd.h>
#include <torch/nn/utils/convert_parameters.h>
#include <torch/serialize.h>
#include <torch/serialize/archive.h>

#include <cstdio>
#include <fstream>
#include <optional>

#include "support/contract.h"

using namespace contract;

namespace {

Options stage3(const Communicator& comm, std::int64_t budget = 0, std::int64_t bucket = 256) {
  return suite::options_for(comm, 3, bucket).memory_budget(budget).names(Model::names());
}

bool refuses_pointer(const at::Tensor& t) {
  try {
    (void)t.const_data_ptr();
  } catch (const c10::Error&) {
    return true;
  }
  return false;
}

}  // namespace

TEST_CASE("S3 parameters are released at construction, and a raw pointer says what to do") {
  on_threads({2, 3}, [](const Communicator& comm) {
    Model model;
    auto opt = zero::wrap(adamw(model.params), stage3(comm));
    for (const int i : {0, 1, 2, 5, 6}) {
      const auto message =
          expect_error({"not resident", Model::names()[i], "GatherGuard"}, [&] { (void)model.params[i].data_ptr(); });
    }
    expect_error({"not resident", "'w1'"}, [&] { (void)model.params[0].accessor<double, 2>(); });
    expect_error({"not resident", "'w1'"}, [&] { (void)model.params[0].view({-1}).data_ptr(); });
    expect(model.params[0].sizes() == at::IntArrayRef({7, 5}) && model.params[0].is_leaf() && model.params[0].requires_grad(),
           "a released parameter is still what it was");
    const auto memory = opt.memory();
    expect(memory.parameters <= opt.padded_numel() * 8 / comm.size(), "keeps ", memory.parameters, " bytes of parameters");
    expect(memory.buffers <= opt.memory_plan().buffers, "keeps ", memory.buffers, " bytes of buffers");
  });
}

TEST_CASE("S3 edits between steps, of every kind, with little room and with much") {
  on_threads({1, 2, 3}, [](const Communicator& comm) {
    for (const std::int64_t budget : {std::int64_t{0}, std::int64_t{900}, std::int64_t{1} << 20}) {
      Twins twins(stage3(comm, budget).exceed_budget());
      auto &plain_model = twins.plain_model, &model = twins.model;
      Model average_model, plain_average;
      for (int s = 0; s < 4; ++s) {
        twins.step(s);
        const at::NoGradGuard no_grad;
        for (auto* m : twins.both()) {
          m->params[0].mul_(0.5);                         // an operator
          m->params[2].detach()[1].fill_(0.125 + s);      // through a view of an alias
          m->params[6].copy_(values({11, 3}, 40.0 + s));  // overwritten
          m->params[1].data().clamp_(-0.2, 0.2);          // through data()
          m->params[5].index_put_({at::tensor({0, 2})}, at::tensor({0.5, 0.25}, at::kDouble));
          at::add_out(m->params[3], at::scalar_tensor(0.5, at::kDouble),
                      at::scalar_tensor(0.25, at::kDouble));  // an out argument
        }
        // A moving average, copied in at the end: reads of everything, then writes of everything.
        for (std::size_t i = 0; i < model.params.size(); ++i) {
          plain_average.params[i].data().mul_(0.9).add_(plain_model.params[i], 0.1);
          average_model.params[i].data().mul_(0.9).add_(model.params[i], 0.1);
        }
        if (s == 2)
          for (std::size_t i = 0; i < model.params.size(); ++i)
            plain_model.params[i].copy_(plain_average.params[i]), model.params[i].copy_(average_model.params[i]);
      }
      twins.expect_alike("edited");
    }
  });
}

TEST_CASE("S3 ranks that write different values: each element is its owner's") {
  on_threads({2, 3}, [](const Communicator& comm) {
    Params params{at::zeros({24}, at::kDouble).requires_grad_(true)};
    auto opt = zero::wrap(std::make_unique<SGD>(params, SGDOptions(1.0)), stage3(comm).names({"p"}));
    const auto shards = opt.local_shards();
    {
      const at::NoGradGuard no_grad;
      params[0].fill_(1.0 + comm.rank());
    }
    params[0].mutable_grad() = at::zeros({24}, at::kDouble);
    opt.step();
    expect_equal_on_ranks(comm, params);
    for (const auto& shard : shards)
      expect(at::equal(shard.values, at::full_like(shard.values, 1.0 + comm.rank())), "my slice is what I have written");
  });
}

TEST_CASE("S3 local_shards: a moving average without a gather, and edits in place") {
  everywhere([](const Communicator& comm, Options options) {
    Twins twins(options);
    auto &plain_model = twins.plain_model, &model = twins.model;
    auto& opt = twins.opt;
    std::vector<at::Tensor> average;
    for (const auto& shard : opt.local_shards()) average.push_back(shard.values.clone());
    auto plain_average = copies(plain_model.params);
    for (int s = 0; s < 3; ++s) {
      twins.step(s);
      const at::NoGradGuard no_grad;
      const auto before = comm.traffic().data_bytes;
      const auto shards = opt.local_shards();
      for (std::size_t i = 0; i < shards.size(); ++i) average[i].mul_(0.9).add_(shards[i].values, 0.1);
      expect(comm.traffic().data_bytes == before, "statistics sent bytes");
      for (std::size_t i = 0; i < plain_average.size(); ++i) plain_average[i].mul_(0.9).add_(plain_model.params[i], 0.1);
      if (s == 1) {
        for (auto& p : plain_model.params) p.mul_(0.5).add_(0.01);
        opt.edit_local_shards([](zero::LocalShard& shard) { shard.values.mul_(0.5).add_(0.01); });
        expect_close(model.params, plain_model.params, "edited shards");
      }
    }
    // The average becomes the model.
    std::size_t n = 0;
    opt.edit_local_shards([&](zero::LocalShard& shard) { shard.values.copy_(average[n++]); });
    expect_close(model.params, plain_average, "the average");
    expect_equal_on_ranks(comm, model.params);
    std::int64_t elements = 0;
    for (const auto& shard : opt.local_shards()) {
      const auto whole = shard.parameter.detach().clone().reshape({-1});
      expect(at::equal(whole.narrow(0, shard.begin, shard.values.numel()), shard.values), shard.name, " isn't its range");
      elements += shard.values.numel();
    }
    const auto counts = comm.exchange(std::to_string(elements), "elements");
    std::int64_t sum = 0;
    for (const auto& count : counts) sum += std::stoll(count);
    expect(sum == (options.stage() == Stage::kReplicated ? comm.size() : 1) * (35 + 7 + 21 + 1 + 3 + 33), "elements ", sum);
    expect_error({"no more noise", comm.size() > 1 ? "rank 0" : ""},
                 [&] { opt.edit_local_shards([&](zero::LocalShard&) { TORCH_CHECK(comm.rank() != 0, "no more noise"); }); });
  });
}

TEST_CASE("S3 GatherGuard: raw pointers read and written, whoever writes") {
  everywhere([](const Communicator& comm, Options options) {
    Model model;
    const auto expected = copies(model.params);
    auto opt = zero::wrap(momentum(model.params), options.names(Model::names()));
    if (comm.rank() == 0) {  // reading is for one rank alone, too
      const zero::GatherGuard guard(opt, {model.params[0], model.params[6]});
      expect(model.params[0].data_ptr<double>()[3] == expected[0].data_ptr<double>()[3], "a raw pointer reads something else");
      if (options.stage() == Stage::kParameters && comm.size() > 1)
        expect(refuses_pointer(model.params[2]), "another is whole, too");
    }
    if (options.stage() == Stage::kParameters && comm.size() > 1)
      expect(refuses_pointer(model.params[3]), "still whole after the guard");
    const int writer = comm.size() - 1;
    {
      const zero::GatherGuard guard(opt, {model.params[0], model.params[2]}, writer);
      auto* memory = model.params[0].data_ptr<double>();
      for (int i = 0; i < 35; ++i) memory[i] = comm.rank() == writer ? 0.5 * i : -7;
    }
    expect(at::equal(model.params[0].detach().flatten(), at::arange(35, at::kDouble) * 0.5), "not what the writer wrote");
    expect(at::equal(model.params[2], expected[2]), "what nobody wrote has changed");
    for (auto& p : model.params) p.mutable_grad() = at::zeros_like(p);
    opt.step();
    expect_equal_on_ranks(comm, model.params);
    expect_error({"GatherGuard", "not a parameter"}, [&] { const zero::GatherGuard guard(opt, {at::zeros({3})}); });
    // A step in the scope would change what the pointers point to.
    if (options.stage() == Stage::kParameters && comm.size() > 1) {
      const zero::GatherGuard guard(opt);
      expect_error({"GatherGuard", "let it end"}, [&] { opt.step(); });
    }
    opt.step();
  });
}

TEST_CASE("S3 torch::save writes everything or throws") {
  on_threads({2, 3}, [](const Communicator& comm) {
    Model model;
    const auto expected = copies(model.params);
    auto opt = zero::wrap(std::make_unique<SGD>(model.params, SGDOptions(0.1)), stage3(comm));
    const auto path = "/tmp/zero_test_save_" + std::to_string(comm.size()) + "_" + std::to_string(comm.rank()) + ".pt";
    std::remove(path.c_str());
    expect_error({"not resident", "GatherGuard"}, [&] { torch::save(model.params, path); });
    Params loaded;
    bool readable = true;
    try {
      torch::load(loaded, path);
    } catch (const std::exception&) {
      readable = false;
    }
    expect(!readable, "a file without all parameters can be read");
    {
      const zero::GatherGuard guard(opt);
      torch::save(model.params, path);
    }
    loaded.clear();
    torch::load(loaded, path);
    expect(same_bits(loaded, expected), "the file has other values");
    // What was loaded is ordinary; into the model: taken in by the next step.
    for (std::size_t i = 0; i < loaded.size(); ++i) {
      const at::NoGradGuard no_grad;
      model.params[i].copy_(loaded[i] * 2);
    }
    for (auto& p : model.params) p.mutable_grad() = at::zeros_like(p);
    opt.step();
    for (std::size_t i = 0; i < loaded.size(); ++i)
      expect(at::equal(model.params[i], expected[i] * 2), "loaded values are lost");
    std::remove(path.c_str());
  });
}

TEST_CASE("S3 parameters_to_vector and vector_to_parameters") {
  everywhere([](const Communicator&, Options options) {
    Twins twins(options);
    for (int s = 0; s < 4; ++s) {
      twins.step(s);
      const at::NoGradGuard no_grad;
      for (auto* m : twins.both())
        torch::nn::utils::vector_to_parameters(torch::nn::utils::parameters_to_vector(m->params) * 0.75, m->params);
    }
    twins.expect_alike("vectors");
  });
}

TEST_CASE("S3 unshard: ordinary parameters, and sharded again by the next step") {
  everywhere([](const Communicator&, Options options) {
    std::optional<Twins> twins(std::in_place, options);
    for (int s = 0; s < 4; ++s) {
      twins->step(s);
      if (s != 1) continue;
      const at::NoGradGuard no_grad;
      for (auto* m : twins->both()) m->params[0].mul_(0.5);
      twins->opt.unshard();
      for (auto* m : twins->both()) m->params[6].data_ptr<double>()[0] = 0.25;
    }
    twins->opt.unshard();
    twins->expect_alike("unsharded");
    Model last = twins->model;
    twins.reset();
    for (auto& p : last.params) {
      expect(p.numel() == 0 || p.data_ptr() != nullptr, "no pointer");
      p.mutable_grad().reset();
    }
    (last.loss(batch(9, 0)) * 2).backward();
  });
  // However little room there is: what the user asks for whole needs no budget.
  on_threads({2}, [](const Communicator& comm) {
    Model model;
    const auto expected = copies(model.params);
    auto opt = zero::wrap(adamw(model.params), stage3(comm, 1));
    { const zero::GatherGuard whole(opt); }
    opt.unshard();
    expect(same_bits(model.params, expected), "other values");
  });
}

TEST_CASE("S3 a destructor doesn't communicate: what was released says so afterwards") {
  on_threads({2, 3}, [](const Communicator& comm) {
    Model model;
    at::Tensor kept;
    {
      auto opt = zero::wrap(adamw(model.params), stage3(comm));
      kept = model.params[0].detach().clone();
    }
    int refused = 0;
    for (const auto& p : model.params) refused += p.numel() > 0 && refuses_pointer(p);
    expect(refused > 0, "everything is still there");
    for (const auto& p : model.params)
      if (p.numel() > 0 && refuses_pointer(p)) expect_error({"optimizer was destroyed", "unshard()"}, [&] { (void)p.sum(); });
    // Given values, it is an ordinary parameter again.
    model.params[0].set_data(kept);
    expect(at::equal(model.params[0], kept), "set_data");
  });
}

TEST_CASE("S3 what doesn't fit: the budget, two optimizers, shared memory", "[bytes]") {
  on_threads({2, 3}, [](const Communicator& comm) {
    // Each error names a budget with which the operator works; the last one is enough for the whole step.
    std::int64_t budget = 1;
    for (int tries = 0;; ++tries) {
      Model model;
      auto opt = zero::wrap(adamw(model.params), stage3(comm, budget));
      std::string message;
      try {
        model.loss(batch(0, comm.rank())).backward();
        opt.step();
        expect(opt.last_step().peak_resident_parameter_bytes <= budget, "over the budget");
      } catch (const c10::Error& e) {
        message = e.msg();
      }
      if (message.empty()) break;
      for (const auto* part : {"step 1: operator aten::", "memory_budget, ", "least budget", "bucket_bytes", "exceed_budget"})
        expect(message.find(part) != std::string::npos, "no '", part, "' in: ", message);
      const auto least = std::stoll(message.substr(message.find("works here is ") + 14));
      expect(least > budget && tries < 5, "after ", budget, ": ", message);
      budget = least;
    }
    expect(budget > 1 && budget < 2048, "needs ", budget, " bytes");
    {
      Model model;
      auto opt = zero::wrap(adamw(model.params), stage3(comm));
      for (int stage : {0, 3})
        expect_error({"'w1'", "another optimizer at stage 3", "unshard()"},
                     [&] { (void)zero::wrap(adamw(model.params), suite::options_for(comm, stage).names(Model::names())); });
      (void)model.loss(batch(0, comm.rank()));
    }
    {
      Model model;
      model.params.push_back(model.params[0].detach().view({5, 7}).requires_grad_(true));
      expect_error({"shares its memory with", "'w1'"}, [&] { (void)zero::wrap(adamw(model.params), stage3(comm)); });
    }
    {  // resized, on one rank
      Model model;
      auto opt = zero::wrap(adamw(model.params), stage3(comm));
      model.loss(batch(0, comm.rank())).backward();
      if (comm.rank() == 1) model.params[5].set_data(at::zeros({4}, at::kDouble));
      expect_error({"'b2'", "has shape [4]"}, [&] { opt.step(); });
    }
  });
}

TEST_CASE("S3 exceptions in the middle of forward and backward leave a usable optimizer", "[bytes]") {
  on_threads({2, 3}, [](const Communicator& comm) {
    Twins twins(stage3(comm, 2000));
    auto& model = twins.model;
    for (int s = 0; s < 4; ++s) {
      try {
        (void)at::matmul(model.params[0], model.params[0]);  // shapes don't fit: thrown while the parameter is pinned
        expect(false, "no exception");
      } catch (const c10::Error&) {
      }
      try {
        const auto y = model.loss(batch(s, 9));
        throw std::runtime_error("given up");
      } catch (const std::runtime_error&) {
      }
      twins.step(s);
    }
    twins.expect_alike("after exceptions");
  });
}

TEST_CASE("S3 double backward, retained graphs, evaluation and inference between steps", "[bytes]") {
  on_threads({2, 3}, [](const Communicator& comm) {
    Model plain_model, model;
    auto plain = adamw(plain_model.params);
    auto opt = zero::wrap(adamw(model.params), stage3(comm, 2000));
    for (int s = 0; s < 4; ++s) {
      plain->zero_grad(), opt.zero_grad();
      const auto penalised = [&](const Model& m, int rank) {
        const auto loss = m.loss(batch(s, rank));
        const auto g = torch::autograd::grad({loss}, {m.params[0], m.params[2]}, {}, true, true);
        return loss + 0.1 * (g[0].square().sum() + g[1].square().sum());
      };
      for (int r = 0; r < comm.size(); ++r) {
        const auto loss = penalised(plain_model, r) / comm.size();
        loss.backward({}, true);
        loss.backward();
      }
      const auto loss = penalised(model, comm.rank());
      loss.backward({}, true);
      loss.backward();
      plain->step(), opt.step();
      {
        const c10::InferenceMode inference;
        const auto got = model.loss(batch(s, 5)), expected = plain_model.loss(batch(s, 5));
        expect(at::allclose(got, expected, 1e-12, 1e-14), "inference gives ", got.item<double>(), ", not ",
               expected.item<double>());
      }
      const at::NoGradGuard no_grad;
      expect(at::allclose(model.loss(batch(s, 6)), plain_model.loss(batch(s, 6)), 1e-12, 1e-14), "evaluation");
    }
    expect_close(model.params, plain_model.params, "double backward");
  });
}

TEST_CASE("S3 a graph of old weights can't be differentiated after the step") {
  everywhere([](const Communicator& comm, Options options) {
    Model model;
    auto opt = zero::wrap(adamw(model.params), options);
    const auto old = model.loss(batch(0, comm.rank()));
    model.loss(batch(1, comm.rank())).backward();
    opt.step();
    expect_error({"modified by an inplace operation"}, [&] { old.backward(); });
    comm.barrier();
  });
}

TEST_CASE("S3 edited buckets have as much room again as the budget, and are written back when that is used up", "[bytes]") {
  on_threads({2, 3}, [](const Communicator& comm) {
    const auto make = [] {
      Params params;
      for (int i = 0; i < 6; ++i) params.push_back(values({64}, i).requires_grad_(true));
      return params;
    };
    Params expected = make(), params = make();
    auto opt = zero::wrap(std::make_unique<SGD>(params, SGDOptions(1.0)), stage3(comm, 1, 1).names({}).memory_budget(2048));
    const auto bucket = opt.padded_numel() * 8 / 6;
    expect(2048 / bucket >= 2, "a bucket has ", bucket, " bytes");
    for (int s = 0; s < 3; ++s) {
      const at::NoGradGuard no_grad;
      for (auto* of : {&expected, &params}) {
        for (auto& p : *of) p.mul_(0.5).add_(0.25 * s);
        for (auto& p : *of) p.mutable_grad() = at::zeros_like(p);
      }
      double sum = 0;
      for (const auto& p : params) sum += p.sum().item<double>();  // reads have the budget that edits don't take
      opt.step();
      const auto& report = opt.last_step();
      expect(report.write_backs == 6, report.write_backs, " buckets were written back");
      expect(report.peak_resident_parameter_bytes <= 2 * 2048, "whole at a time: ", report.peak_resident_parameter_bytes);
      expect(std::isfinite(sum), "sum");
    }
    expect(same_bits(params, expected), "edits are lost");
  });
}
