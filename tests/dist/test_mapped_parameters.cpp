// Stage 3 inside a node: large buckets are read where they lie, in the ranks' shards. The bits of copies, and edits that stay a rank's own
// until the fence. (With ZERO_TEST_MAPPED the tests of stage 3 run once more with all buckets mapped.)
#include "support/contract.h"

using namespace contract;

namespace {

constexpr std::int64_t kFrom = 64 << 10;

/// Two large layers, whose buckets are mapped, and their biases, which have too few bytes.
struct Wide {
  Params params{(values({300, 200}, 1) * 0.1).requires_grad_(true), values({300}, 2).requires_grad_(true),
                (values({200, 300}, 3) * 0.1).requires_grad_(true), values({200}, 4).requires_grad_(true)};
  at::Tensor loss(int s, int rank) const {
    const auto x = values({3, 200}, 1.0 + s + 10.0 * rank);
    return at::linear(at::tanh(at::linear(x, params[0], params[1])), params[2], params[3]).square().mean();
  }
};

Options options_at(const Communicator& comm, int stage, std::int64_t from = kFrom) {
  return suite::options_for(comm, stage, 1).mapped_shard_bytes(from).memory_budget(0);
}

struct Result {
  Params params;
  std::vector<double> losses;
};

/// What a rank wrote is in its own copy at once, and everywhere after the step.
Result train(const Communicator& comm, Options options, bool clips) {
  Wide model;
  auto opt = zero::wrap(adamw(model.params), options.names({"w1", "b1", "w2", "b2"}));
  Result out;
  for (int s = 0; s < 4; ++s) {
    opt.zero_grad();
    const auto loss = model.loss(s, comm.rank());
    loss.backward();
    if (clips) zero::clip_grad_norm_(opt, 0.05);
    opt.step();
    out.losses.push_back(loss.item<double>());
    const at::NoGradGuard no_grad;
    if (s == 1) {
      model.params[0][17].fill_(0.25);           // a few pages of a bucket, through a view
      model.params[2].detach().mul_(0.5);        // all of them
      model.params[2].select(1, 7).add_(0.125);  // on top
      out.losses.push_back(model.loss(7, 0).item<double>());
    }
    if (s == 2) {
      const zero::GatherGuard whole(opt, {model.params[0]}, 0);
      if (comm.rank() == 0) model.params[0].data_ptr<double>()[1234] = 0.5;
    }
    out.losses.push_back(model.loss(8, 0).item<double>());
  }
  out.params = copies(model.params);
  return out;
}

}  // namespace

TEST_CASE("S3 mapped buckets have the bits of copied ones, and of the other stages") {
  on_threads({1, 2, 3, 4}, [](const Communicator& comm) {
    for (const bool clips : {false, true}) {
      const auto expected = train(comm, options_at(comm, 0), clips);
      const auto check = [&](const Result& got, const char* what) {
        expect(got.losses == expected.losses, what, ": other losses");
        expect(same_bits(got.params, expected.params), what, ": other parameters, by ", distance(got.params, expected.params));
        expect_equal_on_ranks(comm, got.params);
      };
      check(train(comm, options_at(comm, 2), clips), "stage 2");
      check(train(comm, options_at(comm, 3), clips), "mapped");
      check(train(comm, options_at(comm, 3).memory_budget(1).exceed_budget(), clips), "mapped, least budget");
      check(train(comm, options_at(comm, 3).debug(true), clips), "debugged, thus copied");
      if (!clips) check(train(comm, options_at(comm, 3, 0), clips), "copied");
    }
  });
}

TEST_CASE("S3 mapped buckets take no memory and are named by explain()") {
  on_threads({2, 3, 4}, [](const Communicator& comm) {
    std::int64_t copied = 0;
    for (const std::int64_t from : {std::int64_t{0}, kFrom}) {
      Wide model;
      auto opt = zero::wrap(momentum(model.params), options_at(comm, 3, from));
      for (int s = 0; s < 3; ++s) {
        opt.zero_grad();
        model.loss(s, comm.rank()).backward();
        opt.step();
      }
      // Whole parameters until the next step.
      (void)model.loss(3, comm.rank());
      constexpr std::int64_t kLarge = (300 * 200 + 200 * 300) * 8;
      const auto buffers = opt.memory().buffers;
      if (from == 0) copied = buffers;
      if (from > 0) expect(buffers <= copied - kLarge + 8 * 4096, "keeps ", buffers, " bytes, with copies ", copied);
      expect((opt.explain().find(" 0.00 MiB are read where they lie") == std::string::npos) == (from > 0), opt.explain());
      const auto& report = opt.last_step();
      expect(report.bytes_gathered == report.predicted_bytes && report.bytes_gathered > 0, "gathered ", report.bytes_gathered);
    }
  });
}

TEST_CASE("S3 mapped buckets: an edit is the rank's own until the fence, then each element is its owner's") {
  on_threads({2, 3, 4}, [](const Communicator& comm) {
    Params params{at::zeros({100000}, at::kDouble).requires_grad_(true)};
    auto opt = zero::wrap(std::make_unique<SGD>(params, SGDOptions(1.0)), options_at(comm, 3).names({"p"}));
    const at::NoGradGuard no_grad;
    for (int s = 0; s < 3; ++s) {
      const auto before = params[0].clone();
      const auto buffers = opt.memory().buffers;
      comm.barrier();
      params[0].fill_(10.0 * s + 1.0 + comm.rank());
      comm.barrier();  // all have written
      expect(opt.memory().buffers >= buffers + 800000, "the pages of an edit aren't counted");
      expect(at::equal(params[0], at::full_like(before, 10.0 * s + 1.0 + comm.rank())), "another rank's edit is seen");
      for (const auto& shard : opt.local_shards())
        expect(at::equal(shard.values, before.narrow(0, shard.begin, shard.values.numel())), "an edit reached the shard early");
      comm.barrier();
      params[0].mutable_grad() = at::zeros({100000}, at::kDouble);
      opt.step();
      expect(opt.memory().buffers <= buffers, "the pages of an edit are still counted");
      expect_equal_on_ranks(comm, params);
      for (const auto& shard : opt.local_shards())
        expect(at::equal(shard.values, at::full_like(shard.values, 10.0 * s + 1.0 + comm.rank())), "my slice is what I wrote");
    }
    // What is written under a guard that only reads is lost, as with copies, on this rank too.
    const auto before = params[0].clone();
    {
      const zero::GatherGuard whole(opt, {params[0]});
      params[0].data_ptr<double>()[5] = 1e9;
    }
    params[0].mutable_grad() = at::zeros({100000}, at::kDouble);
    opt.step();
    expect(at::equal(params[0], before), "an undeclared write has stayed");
  });
}
