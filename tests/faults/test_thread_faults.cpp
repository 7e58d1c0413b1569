// As test_faults, with threads as ranks: nobody can die, but a rank can throw or be late. And what an optimizer is good for after
// an error that all ranks have had.
#include <array>
#include <chrono>
#include <mutex>
#include <stdexcept>
#include <thread>

#include "faults/trainer.h"
#include "support/catch.h"
#include "support/training.h"
#include "zero/thread.h"

using namespace faults;
using training::expect;
using Clock = std::chrono::steady_clock;

namespace {

constexpr int kRanks = 3;
constexpr auto kTimeout = std::chrono::seconds(2);

/// A program's own exception, nothing that LibTorch knows.
struct Trouble : std::runtime_error {
  Trouble() : std::runtime_error("no more data on this rank's disk") {}
};

zero::WaitPolicy policy() {
  zero::WaitPolicy out;
  out.timeout = kTimeout;
  return out;
}

double seconds_since(Clock::time_point begin) { return std::chrono::duration<double>(Clock::now() - begin).count(); }

struct Outcome {
  std::array<std::string, kRanks> messages;  // c10::Errors only
  std::array<double, kRanks> after{};        // the incident
  std::string rethrown;
  bool was_trouble = false;
};

/// Trains until `incident` on rank 1 has had its consequences.
Outcome run(int stage, Place chosen, const std::function<void()>& incident) {
  Outcome out;
  std::mutex mutex;
  Clock::time_point began;
  const auto body = [&](const zero::Communicator& comm) {
    const int rank = comm.rank();
    Trainer trainer(comm, stage, [&](int step, Place place) {
      if (rank != 1 || step != kIncidentStep || place != chosen) return;
      {
        const std::lock_guard<std::mutex> lock(mutex);
        began = Clock::now();
      }
      incident();
    });
    try {
      for (int s = 0; s < kSteps; ++s) trainer.step();
    } catch (const c10::Error& error) {
      const std::lock_guard<std::mutex> lock(mutex);
      out.messages[rank] = first_line(error.msg());
      out.after[rank] = seconds_since(began);
      throw;
    }
  };
  try {
    zero::run_ranks(kRanks, policy(), body);
  } catch (const Trouble& error) {
    out.was_trouble = true;
    out.rethrown = error.what();
  } catch (const c10::Error& error) {
    out.rethrown = first_line(error.msg());
  } catch (const std::exception& error) {
    out.rethrown = error.what();
  }
  return out;
}

std::string name_of(Place place) {
  for (const auto& [name, its] : places())
    if (its == place) return name;
  return "?";
}

/// Names rank 1 as somebody else.
void check_names_rank_1(const Outcome& out, int rank) {
  auto text = out.messages[rank];
  const auto own = "rank " + std::to_string(rank) + " of 3 (thread): ";
  INFO("rank " << rank << " after " << out.after[rank] << " s: " << text);
  REQUIRE(text.compare(0, own.size(), own) == 0);
  text = text.substr(own.size());
  CHECK(text.find("rank 1") != std::string::npos);
}

}  // namespace

TEST_CASE("B66: run_ranks rethrows what one rank threw, and the others name it") {
  for (int stage : {0, 1, 2, 3}) {
    for (Place place : {Place::forward, Place::backward, Place::collective, Place::fault}) {
      INFO("stage " << stage << ", " << name_of(place));
      const auto out = run(stage, place, [] { throw Trouble(); });
      CHECK(out.was_trouble);
      CHECK(out.rethrown == Trouble().what());
      for (int rank : {0, 2}) {
        check_names_rank_1(out, rank);
        CHECK(out.messages[rank].find("no more data") != std::string::npos);
        CHECK(out.after[rank] < 2);
      }
    }
  }
}

TEST_CASE("B66: a rank that is late is named at the timeout") {
  for (Place place : {Place::forward, Place::backward, Place::fault}) {
    const int stage = place == Place::forward ? 0 : 2;
    INFO("stage " << stage << ", " << name_of(place));
    const auto out = run(stage, place, [] { std::this_thread::sleep_for(2 * kTimeout); });
    CHECK(!out.was_trouble);
    CHECK(out.rethrown.find("the timeout, for rank 1") != std::string::npos);
    for (int rank : {0, 2}) {
      check_names_rank_1(out, rank);
      CHECK(out.after[rank] > 1.9);
      CHECK(out.after[rank] < 4);
    }
    INFO(out.messages[1]);
    CHECK(out.messages[1].find("waited 2 s, the timeout, for rank 1") != std::string::npos);  // when it goes on, it hears of it
  }
}

namespace {

std::vector<at::Tensor> undisturbed(const zero::Communicator& comm, int stage) {
  Trainer trainer(comm, stage, [](int, Place) {});
  for (int s = 0; s < kSteps; ++s) trainer.step();
  return training::copies(trainer.params());
}

/// Every rank catches what `disturb` makes of step 3 and does the step again. Parameters as if nothing had happened.
void recovers(int stage, Place where, const std::function<bool(int rank)>& throws) {
  zero::run_ranks(kRanks, policy(), [&](const zero::Communicator& comm) {
    bool armed = true;
    Trainer trainer(comm, stage, [&](int step, Place place) {
      if (!armed || step != kIncidentStep || place != where || !throws(comm.rank())) return;
      armed = false;
      throw Trouble();
    });
    int caught = 0;
    for (int s = 0; s < kSteps; ++s) {
      try {
        trainer.step();
      } catch (const Trouble&) {
        ++caught;
        --s;
        trainer.back_one_step();
      }
    }
    expect(caught == 1, "nothing was thrown");
    const auto got = training::copies(trainer.params());
    expect(training::same_bits(got, undisturbed(comm, stage)), "stage ", stage, ", ", name_of(where),
           ": the parameters aren't those of a run without the exception");
    training::expect_equal_on_ranks(comm, got);
  });
}

}  // namespace

TEST_CASE("training goes on after an exception that every rank has caught") {
  for (int stage : {0, 1, 2, 3}) {
    for (Place place : {Place::forward, Place::backward, Place::collective, Place::fault}) {
      INFO("stage " << stage << ", " << name_of(place));
      CHECK_NOTHROW(recovers(stage, place, [](int) { return true; }));
    }
  }
}

TEST_CASE("training goes on after an exception in different layers' backward on each rank") {
  for (int stage : {0, 1, 2, 3}) {
    INFO("stage " << stage);
    const auto body = [&](const zero::Communicator& comm) {
      Trainer trainer(comm, stage, [](int, Place) {});
      bool armed = false;
      const auto parameter = static_cast<std::size_t>(2 * (1 + 2 * comm.rank()));  // layers 1, 3 and 5
      trainer.params()[parameter].register_hook([&](const at::Tensor&) {
        if (armed) throw Trouble();
      });
      for (int s = 0; s < kSteps; ++s) {
        if (s + 1 == kIncidentStep) {
          armed = true;
          bool caught = false;
          try {
            trainer.begin_step();
            trainer.backward();
          } catch (const Trouble&) {
            caught = true;
          }
          expect(caught, "nothing was thrown");
          armed = false;
          trainer.back_one_step();
        }
        trainer.step();
      }
      expect(training::same_bits(training::copies(trainer.params()), undisturbed(comm, stage)), "stage ", stage,
             ": the parameters aren't those of a run without the exception");
    };
    CHECK_NOTHROW(zero::run_ranks(kRanks, policy(), body));
  }
}

TEST_CASE("training goes on after an error that the ranks agreed on: options that differ") {
  for (int stage : {0, 1, 2, 3}) {
    INFO("stage " << stage);
    const auto body = [&](const zero::Communicator& comm) {
      Trainer trainer(comm, stage, [](int, Place) {});
      for (int s = 0; s < kSteps; ++s) {
        trainer.begin_step();
        trainer.backward();
        if (s + 1 == kIncidentStep) {
          auto& options = trainer.optimizer().param_groups()[0].options();
          if (comm.rank() == 1) options.set_lr(0.02);
          training::expect_error({"options differ", "step 3", "rank"}, [&] { trainer.optimizer().step(); });
          options.set_lr(0.01);
        }
        trainer.end_step();
      }
      expect(training::same_bits(training::copies(trainer.params()), undisturbed(comm, stage)), "stage ", stage,
             ": the parameters aren't those of a run without the error");
    };
    CHECK_NOTHROW(zero::run_ranks(kRanks, policy(), body));
  }
}

TEST_CASE("a rank whose loss leaves out the last layers doesn't stop the others") {
  for (int stage : {0, 1, 2, 3}) {
    INFO("stage " << stage);
    const auto body = [&](const zero::Communicator& comm) {
      Trainer trainer(comm, stage, [](int, Place) {});
      for (int s = 0; s < kSteps; ++s) {
        trainer.begin_step();
        trainer.backward(s + 1 == kIncidentStep && comm.rank() == 1 ? 2 : kLayers);
        trainer.end_step();
      }
      training::expect_equal_on_ranks(comm, training::copies(trainer.params()));
    };
    CHECK_NOTHROW(zero::run_ranks(kRanks, policy(), body));
  }
}
