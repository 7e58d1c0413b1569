// Shapes, partition edges, element types.
#include "cases.h"

using namespace cases;

namespace {

at::Tensor x_of(int s, int r, std::int64_t columns) { return values({3, columns}, 17.0 * s + 3.0 * r + 0.5) * (1 + 0.7 * r); }

}  // namespace

TEST_CASE("B01 groups with fewer elements than ranks") {
  at_every_stage([](const Communicator& comm, Options options) {
    for (int variant = 0; variant < 3; ++variant) {
      Problem p;
      p.steps = 5;
      p.build = [&] {
        return Params{leaf(values({3, 5}, 1)), leaf(values({3}, 2)), leaf(values({2}, 3)), leaf(values({3}, 4))};
      };
      p.loss = [](const Params& w, int s, int r) {
        return (at::linear(x_of(s, r, 5), w[0], w[1]) * w[3]).square().mean() + (w[2] * x_of(s, r, 2)[0]).sum();
      };
      p.make = [&](const Params& w) {
        Groups groups;
        const auto add = [&](Params members, double lr, double decay) {
          groups.emplace_back(std::move(members), std::make_unique<AdamWOptions>(AdamWOptions(lr).weight_decay(decay)));
        };
        if (variant == 0) add({w[0], w[3]}, 0.01, 0.1), add({w[1]}, 0.02, 0), add({w[2]}, 0.03, 0.2);
        if (variant == 1)
          for (std::size_t i = 0; i < w.size(); ++i) add({w[i]}, 0.01 * (1.0 + static_cast<double>(i)), 0.1);
        if (variant == 2) add({w[0], w[1], w[2], w[3]}, 0.01, 0.1);  // 23 elements: nothing divides them
        return std::make_unique<AdamW>(groups, AdamWOptions(0.5));
      };
      trains_like_torch(comm, options, p);
    }
  });
}

TEST_CASE("B02 parameters without elements, first, in the middle, last, alone in a group") {
  at_every_stage(
      [](const Communicator& comm, Options options) {
        for (int at = 0; at < 4; ++at) {
          Problem p;
          p.build = [&] {
            Params w{leaf(values({4, 4}, 1)), leaf(values({4}, 2))};
            w.insert(w.begin() + std::min(at, 2), leaf(at::empty({0, 4}, at::kDouble)));
            return w;
          };
          p.loss = [&](const Params& w, int s, int r) {
            Params full;
            for (const auto& t : w)
              if (t.numel() > 0) full.push_back(t);
            const auto empty = w[std::min(at, 2)];
            auto l = at::linear(x_of(s, r, 4), full[0], full[1]).square().mean();
            return s == 1 ? l : l + at::linear(x_of(s, r, 4), empty).sum() * 0;
          };
          p.make = [&](const Params& w) {
            Groups groups;
            if (at == 3) {
              groups.emplace_back(Params{w[0], w[1]});
              groups.emplace_back(Params{w[2]});
            } else {
              groups.emplace_back(w);
            }
            return std::make_unique<AdamW>(groups, AdamWOptions(0.01).weight_decay(0.1));
          };
          const auto got = trains_like_torch(comm, options, p);
          expect(got[std::min(at, 2)].sizes() == at::IntArrayRef({0, 4}), "the empty parameter has lost its shape");
        }
      },
      {2, 3});
}

TEST_CASE("B04 parameters without dimensions") {
  at_every_stage([](const Communicator& comm, Options options) {
    Problem p;
    p.steps = 5;
    p.build = [] {
      return Params{leaf(at::full({}, 0.7, at::kDouble)), leaf(values({3, 5}, 1)), leaf(at::full({}, -0.2, at::kDouble))};
    };
    p.loss = [](const Params& w, int s, int r) { return (w[0] * at::linear(x_of(s, r, 5), w[1]) + w[2]).square().mean(); };
    p.max_norm = 0.1;
    const auto got = trains_like_torch(comm, options, p);
    expect(got[0].dim() == 0 && got[2].dim() == 0, "a dimension has been added");
  });
}

TEST_CASE("B05 parameters that are not contiguous: channels-last, a transposed square, gaps") {
  at_every_stage([](const Communicator& comm, Options options) {
    Problem p;
    p.steps = 5;
    p.build = [] {
      const auto wide = at::empty({4, 6}, at::kDouble);
      auto gaps = wide.narrow(1, 1, 3);
      gaps.copy_(values({4, 3}, 7));
      return Params{values({4, 3, 3, 3}, 1).to(at::MemoryFormat::ChannelsLast).requires_grad_(true),
                    values({4, 4}, 2).t().requires_grad_(true), gaps.requires_grad_(true)};
    };
    p.loss = [](const Params& w, int s, int r) {
      const auto image = values({2, 3, 5, 5}, 11.0 * s + r) * (1 + 0.5 * r);
      const auto y = at::conv2d(image, w[0]).mean({2, 3});
      return at::linear(at::linear(y, w[1]), w[2].t()).square().mean();
    };
    p.max_norm = 0.05;
    const auto got = trains_like_torch(comm, options, p);
    expect(got[0].is_contiguous(at::MemoryFormat::ChannelsLast) && !got[0].is_contiguous(), "no longer channels-last");
    expect(got[1].stride(0) == 1 && got[1].stride(1) == 4, "the transposed weight has other strides");
    expect(got[2].stride(0) == 6, "the weight with gaps has other strides");
  });
}

TEST_CASE("B08 several element types in one optimizer") {
  at_every_stage([](const Communicator& comm, Options options) {
    Problem p;
    p.bar = 2e-2;  // one of them has eight bits of mantissa
    p.build = [] {
      return Params{leaf(values({6, 6}, 1, at::kBFloat16)), leaf(values({2, 6}, 2, at::kFloat)),
                    leaf(values({6, 2}, 3, at::kFloat)), leaf(values({6}, 4, at::kDouble))};
    };
    p.loss = [](const Params& w, int s, int r) {
      const auto x = x_of(s, r, 6).to(at::kFloat);
      const auto base = at::linear(x, w[0].to(at::kFloat));
      return ((base + at::linear(at::linear(x, w[1]), w[2])).to(at::kDouble) * w[3]).square().mean();
    };
    p.make = [](const Params& w) { return std::make_unique<SGD>(w, SGDOptions(0.05).momentum(0.9)); };
    p.max_norm = 0.5;
    const auto got = trains_like_torch(comm, options, p);
    expect(got[0].scalar_type() == at::kBFloat16 && got[1].scalar_type() == at::kFloat && got[3].scalar_type() == at::kDouble,
           "a type has changed");
  });
}

TEST_CASE("B27 sparse gradients are refused on every rank, not left out") {
  at_every_stage([](const Communicator& comm, Options options) {
    Params params{leaf(values({10, 3}, 1)), leaf(values({2, 3}, 2))};
    options.names({"table", "out"});
    auto opt = zero::wrap<SGD>(params, SGDOptions(0.1), options);
    const auto before = copies(params);
    const auto rows = comm.rank() == 0 ? at::arange(0, 4) : at::arange(2, 7);
    // Whatever comes first: the end of backward or step().
    const auto message = expect_error({"'table'", "sparse"}, [&] {
      at::linear(at::embedding(params[0], rows, -1, false, true), params[1]).square().mean().backward();
      opt.step();
    });
    (void)message;
    expect(same_bits(before, params), "parameters have changed");
    opt.zero_grad();
    at::linear(at::embedding(params[0], rows), params[1]).square().mean().backward();
    opt.step();
    expect_equal_on_ranks(comm, params);
  });
}

TEST_CASE("B40 averages of 16-bit gradients neither overflow nor vanish") {
  at_every_stage([](const Communicator& comm, Options options) {
    for (const auto type : {at::kHalf, at::kBFloat16}) {
      Params params{at::zeros({37}, type).requires_grad_(true)};
      auto opt = zero::wrap<SGD>(params, SGDOptions(1.0), options);
      const double tiny = type == at::kHalf ? std::ldexp(1, -24) : std::ldexp(1, -133);
      for (const double value : {40000.0, tiny}) {
        // By backward: p's gradient is the factor.
        (params[0] * at::full({37}, value, type)).sum().backward();
        const auto expected = at::full({37}, value, type);
        expect(at::equal(params[0].grad(), expected), type, ": the mean of ", value, " is ",
               params[0].grad()[0].item<double>());
        opt.zero_grad();
      }
      (params[0] * at::full({37}, 1.0 + comm.rank(), type)).sum().backward();
      const auto mean = at::full({37}, (1.0 + comm.size()) / 2).to(type);
      expect(at::equal(params[0].grad(), mean), "mixed: ", params[0].grad()[0].item<double>());
      opt.step();
    }
  });
}
