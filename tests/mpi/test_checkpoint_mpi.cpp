// Checkpoints by processes: saved by all ranks of the job, loaded by all at every other stage, and by a world of one on each.
#include <cstdlib>
#include <filesystem>

#include "support/catch.h"
#include "support/checkpoints.h"

using namespace checkpoints;
using torch::optim::AdamW;
using torch::optim::AdamWOptions;

TEST_CASE("processes save together, and load at another stage or alone") {
  const auto comm = zero::make_communicator();
  const auto make = [](Params p) { return std::make_unique<AdamW>(std::move(p), AdamWOptions(0.01).weight_decay(0.1)); };
  const test::Folder own;
  const auto folder = comm.exchange(own.path(), "whose folder")[0];
  for (int stage = 0; stage <= 3; ++stage) {
    for (const bool background : {false, true}) {
      INFO("stage " << stage << ", in the background " << background);
      Trainer it(comm, stage, make), other(comm, 3 - stage, make, 1000, at::kDouble, 5);
      it.steps(0, 2);
      const auto path = it.save(folder, {{"table", at::ones({3})}}, zero::SaveOptions().async(background).keep(1));
      const auto saved = it.values();
      it.steps(2, 5);
      zero::wait_for_save(it.opt);
      const auto loaded = other.load(path);
      REQUIRE(loaded.random);
      REQUIRE(at::equal(loaded.tensor("table"), at::ones({3})));
      REQUIRE(same_bits(other.values(), saved));
      other.steps(2, 5);
      REQUIRE(same_bits(other.values(), it.values()));

      Trainer alone(zero::make_self_communicator(), stage, make, 64, at::kDouble, 6);
      REQUIRE_FALSE(alone.load(folder).random == (comm.size() > 1));
      REQUIRE(same_bits(alone.values(), saved));
      alone.steps(2, 5);
      REQUIRE(distance(alone.values(), it.values()) < 1e-12);
      comm.barrier();
    }
  }
}
