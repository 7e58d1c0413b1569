// Stage 3 in time: what is whole when, what is gathered, and what a reader sees meanwhile.
#include <atomic>
#include <cmath>
#include <cstdlib>
#include <thread>

#include "support/contract.h"

using namespace contract;

namespace {

Options stage3(const Communicator& comm, std::int64_t budget = 0, std::int64_t bucket = 256) {
  return suite::options_for(comm, 3, bucket).memory_budget(budget);
}

/// A chain of equal layers, one bucket each.
struct Chain {
  static constexpr std::int64_t kWidth = 8, kBytes = kWidth * kWidth * 8;
  Params params;
  explicit Chain(int layers) {
    for (int i = 0; i < layers; ++i) params.push_back((values({kWidth, kWidth}, 3.0 * i) * 0.5).requires_grad_(true));
  }
  at::Tensor forward(at::Tensor x, const std::vector<int>& order) const {
    for (const int i : order) x = at::tanh(at::matmul(x, params[i].t()));
    return x;
  }
  at::Tensor loss(int s, int rank, const std::vector<int>& order) const {
    return forward(values({3, kWidth}, 1.0 + s + 10.0 * rank), order).square().mean();
  }
  std::vector<int> all() const {
    std::vector<int> order(params.size());
    for (std::size_t i = 0; i < order.size(); ++i) order[i] = static_cast<int>(i);
    return order;
  }
};

}  // namespace

TEST_CASE("S3 a chain within the least budget: what goes, what is sent, and what was predicted") {
  on_threads({2, 3, 4}, [](const Communicator& comm) {
    constexpr int kLayers = 8;
    for (const bool prefetch : {false, true}) {
      for (const int buckets : {1, 2, 3, 8}) {
        Chain own(kLayers);
        // A bucket, with what alignment adds for this number of ranks.
        const auto padded = zero::wrap(momentum(Chain(kLayers).params), stage3(comm, 0, 1)).padded_numel() * 8 / kLayers;
        auto limited = zero::wrap(momentum(own.params), stage3(comm, buckets * padded, 1).prefetch(prefetch));
        const auto once = padded * kLayers / comm.size() * (comm.size() - 1);
        for (int s = 0; s < 4; ++s) {
          limited.zero_grad();
          own.loss(s, comm.rank(), own.all()).backward();
          limited.step();
          const auto& report = limited.last_step();
          expect(report.peak_resident_parameter_bytes <= buckets * padded,
                 "over the budget: ", report.peak_resident_parameter_bytes);
          // Backward needs all weights but the first; those at the turn stay.
          const auto expected = once + once / kLayers * std::max(0, kLayers - 1 - buckets);
          expect(report.bytes_gathered <= expected, "gathered ", report.bytes_gathered, " bytes, not ", expected);
          if (s > 0) {
            expect(report.bytes_gathered == expected, "gathered ", report.bytes_gathered, " bytes, not ", expected);
            expect(report.predicted_bytes == expected, "predicted ", report.predicted_bytes, " bytes, not ", expected);
            expect(report.deviations == 0, "the same step as before deviates");
            expect(report.bytes_sent == once + expected, "sent ", report.bytes_sent);
            const auto fetches = report.faults + report.prefetch_hits;
            expect(fetches == kLayers + std::max(0, kLayers - 1 - buckets), "fetched ", fetches, " buckets");
            if (!prefetch) expect(report.prefetch_hits == 0, "hits without a thread");
            if (!prefetch) expect(report.seconds_gather > 0, "the trainer has gathered in no time");
          }
        }
        expect(limited.explain().find("gathers " + std::to_string(kLayers + std::max(0, kLayers - 1 - buckets)) + " times") !=
                   std::string::npos,
               limited.explain());
      }
    }
  });
}

TEST_CASE("S3 ranks may take different paths, skip layers, or evaluate alone") {
  on_threads({2, 3}, [](const Communicator& comm) {
    Chain plain_chain(6), chain(6);
    auto plain = momentum(plain_chain.params);
    auto opt = zero::wrap(momentum(chain.params), stage3(comm, 0, 1));
    const auto path = [&](int s, int rank) -> std::vector<int> {
      if ((s + rank) % 3 == 0) return {0, 1, 2, 3, 4, 5};
      if ((s + rank) % 3 == 1) return {5, 0, 3};
      return {2, 2, 2, 1, 4, 4, 0};
    };
    for (int s = 0; s < 7; ++s) {
      plain->zero_grad(), opt.zero_grad();
      for (int r = 0; r < comm.size(); ++r) (plain_chain.loss(s, r, path(s, r)) / comm.size()).backward();
      chain.loss(s, comm.rank(), path(s, comm.rank())).backward();
      plain->step(), opt.step();
      if (comm.rank() == s % comm.size()) {  // this rank alone, while the others are in the next step or wait there
        const at::NoGradGuard no_grad;
        std::this_thread::sleep_for(std::chrono::milliseconds(20));
        for (int n = 0; n < 3; ++n) {
          const auto got = chain.loss(n, 0, chain.all()), expected = plain_chain.loss(n, 0, chain.all());
          expect(at::allclose(got, expected, 1e-12, 1e-14), "an evaluation of step ", s, " gives ", got, ", not ", expected);
        }
      }
    }
    expect_close(chain.params, plain_chain.params, "paths");
    expect_equal_on_ranks(comm, chain.params);
  });
}

TEST_CASE("S3 no torn weights: a slow rank, and a reader in another thread, see one step's values") {
  on_threads({2, 3}, [](const Communicator& comm) {
    // Every element of every parameter has one value, which each step changes everywhere by the same amount.
    Params params;
    for (int i = 0; i < 5; ++i) params.push_back(at::full({40}, 100.0, at::kDouble).requires_grad_(true));
    auto opt = zero::wrap(std::make_unique<SGD>(params, SGDOptions(1.0)), stage3(comm, 0, 64));
    std::atomic<bool> done{false};
    std::atomic<const char*> wrong{nullptr};
    std::thread reader([&] {
      const at::NoGradGuard no_grad;
      while (!done) {
        const zero::ReadGuard guard(opt);
        const auto first = params[0].select(0, 0).item<double>();
        for (const auto& p : params)
          if (!at::equal(p, at::full_like(p, first))) wrong = "a reader saw parts of two steps";
      }
    });
    try {
      for (int s = 0; s < 20; ++s) {
        opt.zero_grad();
        at::Tensor sum = params[0].sum();
        for (int i = 1; i < 5; ++i) sum = sum + params[i].sum();
        if (comm.rank() == s % comm.size()) std::this_thread::sleep_for(std::chrono::milliseconds(3));
        for (const auto& p : params)
          expect(at::equal(p, at::full_like(p, 100.0 - s)), "step ", s, ": parameters are ", p.detach().min(), " to ",
                 p.detach().max());
        sum.backward();
        opt.step();
      }
    } catch (...) {
      done = true;
      reader.join();
      throw;
    }
    done = true;
    reader.join();
    expect(wrong == nullptr, wrong.load());
  });
}

TEST_CASE("S3 training and evaluation that alternate: both orders are learned", "[bytes]") {
  on_threads({2}, [](const Communicator& comm) {
    Chain chain(6);
    auto opt = zero::wrap(momentum(chain.params), stage3(comm, 3 * Chain::kBytes, 1));
    std::int64_t deviations = 0;
    for (int s = 0; s < 12; ++s) {
      if (s % 2 == 1) {
        const at::NoGradGuard no_grad;
        (void)chain.loss(100 + s, comm.rank(), chain.all());
      }
      opt.zero_grad();
      chain.loss(s, comm.rank(), chain.all()).backward();
      opt.step();
      if (s >= 4) deviations += opt.last_step().deviations;
      expect(opt.last_step().peak_resident_parameter_bytes <= 3 * Chain::kBytes, "over the budget");
    }
    expect(deviations <= 8, "deviates ", deviations, " times: at most once where the other order begins to differ");
  });
}

TEST_CASE("S3 debug: different orders and different edits are said, and released memory is poisoned", "[bytes]") {
  struct Collector : c10::WarningHandler {
    std::vector<std::string> messages;
    void process(const c10::Warning& warning) override { messages.push_back(warning.msg()); }
  };
  on_threads({2, 3}, [](const Communicator& comm) {
    Collector collector;
    const c10::WarningUtils::WarningHandlerGuard guard(&collector);
    Chain chain(4);
    auto opt = zero::wrap(momentum(chain.params), stage3(comm, 2 * Chain::kBytes, 1).debug(true).prefetch(false));
    const auto said = [&](const char* what) {
      const auto& all = collector.messages;
      return std::any_of(all.begin(), all.end(), [&](const std::string& m) { return m.find(what) != std::string::npos; });
    };
    chain.loss(0, comm.rank(), chain.all()).backward();
    opt.step();
    expect(collector.messages.empty(), "a warning without a reason: ", collector.messages.empty() ? "" : collector.messages[0]);
    opt.zero_grad();
    chain.loss(1, comm.rank(), comm.rank() == 1 ? std::vector<int>{0, 2, 1, 3} : chain.all()).backward();
    opt.step();
    if (comm.rank() == 0) expect(said("ranks 0 and 1 touched buckets in different order; touch 1"), "no word of the order");
    {
      const at::NoGradGuard no_grad;
      chain.params[2].fill_(1.0 + comm.rank());
    }
    opt.zero_grad();
    chain.loss(2, comm.rank(), chain.all()).backward();
    opt.step();
    if (comm.rank() == 0) expect(said("written different values"), "no word of the edits");
    const double* kept = nullptr;
    {
      const zero::GatherGuard whole(opt, {chain.params[0]});
      kept = chain.params[0].data_ptr<double>();
      expect(!std::isnan(kept[5]), "a parameter is poisoned while it is whole");
    }
    for (auto& p : chain.params) p.mutable_grad() = at::zeros_like(p);
    opt.step();  // everything goes, and nothing comes before it is touched
    for (int i = 0; i < Chain::kWidth * Chain::kWidth; ++i) expect(std::isnan(kept[i]), "a kept pointer still reads ", kept[i]);
  });
}

TEST_CASE("S3 debug: ZERO_DEBUG is the default") {
  const char* before = std::getenv("ZERO_DEBUG");
  const std::string was = before != nullptr ? before : "";
  setenv("ZERO_DEBUG", "1", 1);
  REQUIRE((Options().debug() && !Options().debug(false).debug()));
  setenv("ZERO_DEBUG", "0", 1);
  REQUIRE((!Options().debug() && Options().debug(true).debug()));
  before != nullptr ? setenv("ZERO_DEBUG", was.c_str(), 1) : unsetenv("ZERO_DEBUG");
}
