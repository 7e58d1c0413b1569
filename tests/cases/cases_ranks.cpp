// Ranks that disagree.
#include "cases.h"

using namespace cases;

namespace {

at::Tensor x_of(int s, int r) { return values({3, 4}, 17.0 * s + 3.0 * r + 0.5) * (1 + 0.7 * r); }
Params build() { return {leaf(values({3, 4}, 1)), leaf(values({3}, 2)), leaf(values({5, 3}, 3))}; }
at::Tensor loss(const Params& w, int s, int r) { return at::linear(at::linear(x_of(s, r), w[0], w[1]), w[2]).square().mean(); }

}  // namespace

TEST_CASE("B65 models and options that differ are named on every rank") {
  at_every_stage(
      [](const Communicator& comm, Options options) {
        const bool other = comm.rank() == 1;
        const auto refused = [&](const std::vector<std::string>& parts, const Params& params, Options with, double lr = 0.1) {
          expect_error(parts, [&] { zero::wrap<SGD>(params, SGDOptions(lr), with); });
        };
        options.names({"a", "b", "c"});
        auto w = build();
        w[1] = leaf(values({other ? 4 : 3}, 2));
        refused({"'b'", "shape"}, w, options);
        w = build();
        w[0] = other ? leaf(values({4, 3}, 1)) : w[0];
        refused({"'a'", "[3, 4]", "[4, 3]"}, w, options);
        w = build();
        if (other) w.pop_back();
        refused({"number of parameters"}, w, options);
        w = build();
        w[2] = leaf(values({5, 3}, 3, other ? at::kFloat : at::kDouble));
        refused({"'c'", "type"}, w, options);
        w = build();
        w[0].set_requires_grad(!other);
        refused({"'a'", "requires_grad"}, w, options);
        refused({"lr"}, build(), options, other ? 0.2 : 0.1);
        refused({"stage"}, build(),
                Options(options).stage(other                                   ? Stage::kReplicated
                                       : options.stage() == Stage::kReplicated ? Stage::kOptimizerState
                                                                               : options.stage()));
        // And afterwards everything works.
        Problem p;
        p.build = build;
        p.loss = loss;
        trains_like_torch(comm, options, p);
      },
      {2, 3});
}

TEST_CASE("B65 accumulation counts that differ are named") {
  at_every_stage(
      [](const Communicator& comm, Options options) {
        auto w = build();
        auto opt = zero::wrap(adamw(w), options);
        loss(w, 0, comm.rank()).backward();
        opt.step();
        expect_error({"different calls", "backward", "step()"}, [&] {
          loss(w, 1, comm.rank()).backward();
          if (comm.rank() == 1) loss(w, 2, comm.rank()).backward();
          opt.step();
        });
      },
      {2, 3});
}

TEST_CASE("B67 one rank uses a layer more often, or in another order") {
  at_every_stage([](const Communicator& comm, Options options) {
    for (int way = 0; way < 2; ++way) {
      Problem p;
      p.build = [] { return Params{leaf(values({4, 4}, 1)), leaf(values({4, 4}, 2)), leaf(values({4, 4}, 3))}; };
      p.loss = [&](const Params& w, int s, int r) {
        auto x = at::tanh(at::linear(x_of(s, r), w[0]));
        if (way == 0) {
          for (int i = 0; i <= 2 * (r % 2); ++i) x = at::tanh(at::linear(x, w[1]));
        } else {
          x = at::linear(at::tanh(at::linear(x, w[r % 2 == 0 ? 1 : 2])), w[r % 2 == 0 ? 2 : 1]);
        }
        return at::linear(x, w[2]).square().mean();
      };
      options.bucket_bytes(128);  // each weight has a bucket of its own
      trains_like_torch(comm, options, p);
    }
  });
}

TEST_CASE("B67 a rank with one batch more: an error that names both, or Join") {
  at_every_stage([](const Communicator& comm, Options options) {
    auto w = build();
    auto opt = zero::wrap(adamw(w), options);
    {
      zero::Join join(opt);
      for (int s = 0; s < (comm.rank() == 0 ? 3 : 2); ++s) {
        opt.zero_grad();
        loss(w, s, comm.rank()).backward();
        opt.step();
      }
      join.wait();
    }
    expect_equal_on_ranks(comm, w);
  });
}

TEST_CASE("B65 a gradient that is cleared on one rank only between backwards is named") {
  at_every_stage(
      [](const Communicator& comm, Options options) {
        options.names({"a", "b", "c"});
        auto w = build();
        auto opt = zero::wrap(adamw(w), options);
        loss(w, 0, comm.rank()).backward();
        if (comm.rank() == 1) w[0].mutable_grad().reset();
        expect_error({"'a'", "cleared on one rank"}, [&] { loss(w, 1, comm.rank()).backward(); });
      },
      {2, 3});
}
