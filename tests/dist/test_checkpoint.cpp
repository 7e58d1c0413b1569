// Saved at any stage on any number of ranks, loaded at any other: the run goes on as if nothing had happened.
#include "support/catch.h"
#include "support/checkpoints.h"
#include "zero/checkpoint.h"

using namespace checkpoints;
using torch::optim::AdamW;
using torch::optim::AdamWOptions;

namespace {

constexpr int kBefore = 2, kAfter = 3;

// The run that never stopped, on so many ranks: what it has when a checkpoint is made, and at the end. All stages have the same bits.
struct Undisturbed {
  Params at_save, at_end;
};

Undisturbed undisturbed(const Factory& make, int ranks) {
  Undisturbed out;
  on_ranks(ranks, [&](const Communicator& comm) {
    Trainer it(comm, 1, make);
    it.steps(0, kBefore);
    const auto saved = it.values();
    it.steps(kBefore, kBefore + kAfter);
    const auto end = it.values();
    if (comm.rank() == 0) out = {saved, end};
  });
  return out;
}

void save_and_load(const Factory& make, const std::vector<Undisturbed>& expected, int stage, int ranks, int new_stage,
                   int new_ranks) {
  INFO("saved at stage " << stage << " on " << ranks << " ranks, loaded at stage " << new_stage << " on " << new_ranks);
  const test::Folder folder;
  REQUIRE_NOTHROW(on_ranks(ranks, [&](const Communicator& comm) {
    Trainer it(comm, stage, make);
    it.steps(0, kBefore);
    it.save(folder.path());
    // What was saved is what is there, and a save disturbs nothing.
    expect(same_bits(it.values(), expected[ranks].at_save), "saving has changed parameters");
    if (stage == new_stage && ranks == new_ranks) {
      it.steps(kBefore, kBefore + kAfter);
      expect(same_bits(it.values(), expected[ranks].at_end), "a run that saves is another run");
    }
  }));
  REQUIRE_NOTHROW(on_ranks(new_ranks, [&](const Communicator& comm) {
    Trainer it(comm, new_stage, make, 1000, at::kDouble, 31);
    const auto loaded = it.load(folder.path());
    expect(loaded.step == kBefore && it.opt.last_step().number == kBefore, "the number of steps is ", loaded.step);
    expect(loaded.random == (ranks == new_ranks), "random state");
    expect(same_bits(it.values(), expected[ranks].at_save), "parameters are other ones");
    it.steps(kBefore, kBefore + kAfter);
    const auto values = it.values();
    expect_equal_on_ranks(comm, values);
    const double d = distance(values, expected[ranks].at_end);
    expect(d < 1e-12, "after three more steps differs from the run that never stopped by ", d);
    if (ranks == new_ranks) expect(same_bits(values, expected[ranks].at_end), "not bit for bit, by ", d);
    expect(it.opt.last_step().number == kBefore + kAfter, "the number of steps");
  }));
}

void matrix(const Factory& make, const std::function<bool(int)>& chosen) {
  std::vector<Undisturbed> expected(5);
  for (int ranks = 1; ranks <= 4; ++ranks) expected[ranks] = undisturbed(make, ranks);
  int number = 0;
  for (int stage = 0; stage <= 3; ++stage)
    for (int ranks = 1; ranks <= 4; ++ranks)
      for (int new_stage = 0; new_stage <= 3; ++new_stage)
        for (int new_ranks = 1; new_ranks <= 4; ++new_ranks)
          if (chosen(number++)) save_and_load(make, expected, stage, ranks, new_stage, new_ranks);
}

}  // namespace

TEST_CASE("loading continues the run, at every stage and number of ranks") {
  matrix([](Params p) { return std::make_unique<AdamW>(std::move(p), AdamWOptions(0.01).weight_decay(0.1).amsgrad(true)); },
         [](int number) { return number % 5 == 0; });
}

TEST_CASE("loading continues the run, whatever the class") {
  for (const auto& [name, make] : optimizers()) {
    if (name == "a user's class") continue;  // this one can't be saved; the next test's can
    INFO(name);
    std::vector<Undisturbed> expected(5);
    for (const int ranks : {2, 3}) expected[ranks] = undisturbed(make, ranks);
    save_and_load(make, expected, 1, 2, 1, 2);
    save_and_load(make, expected, 2, 3, 3, 2);
    save_and_load(make, expected, 3, 2, 0, 3);
  }
}

TEST_CASE("loading continues the run: all pairs, all classes", "[.full]") {
  for (const auto& [name, make] : optimizers()) {
    if (name == "a user's class") continue;
    INFO(name);
    matrix(make, [](int) { return true; });
  }
}
