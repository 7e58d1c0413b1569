#include "checkpoints.h"

#include <algorithm>
#include <csignal>
#include <cstdio>

namespace gpt {
namespace {

volatile std::sig_atomic_t asked_to_end = 0;

}  // namespace

Checkpoints::Checkpoints(const Settings& settings, const Model& model, zero::ZeroOptimizer& optimizer)
    : settings_(settings), model_(model), optimizer_(optimizer) {
  if (!settings.save.empty()) std::signal(SIGTERM, [](int) { asked_to_end = 1; });
}

std::int64_t Checkpoints::resume() {
  if (settings_.resume.empty()) return 0;
  // One rank looks, so that all have the same answer.
  const bool speaks = optimizer_.comm().rank() == 0;
  const auto newest = speaks ? zero::latest(settings_.resume).value_or("") : std::string();
  const auto path = optimizer_.comm().exchange(newest, "--resume")[0];
  if (path.empty()) return 0;
  const auto loaded = zero::load(path, model_, optimizer_);
  if (speaks && !settings_.quiet)
    std::printf("resumed from %s, step %lld\n", path.c_str(), static_cast<long long>(loaded.step));
  TORCH_CHECK(loaded.has("seed") && loaded.integer("seed") == static_cast<std::int64_t>(settings_.seed), "--resume: ", path,
              " was made with another --seed, and would go on with other data");
  TORCH_CHECK(settings_.seconds > 0 || loaded.step < settings_.steps, "--resume: ", path, " has made ", loaded.step,
              " steps already; --steps ", settings_.steps, " asks for no more");
  return loaded.step;
}

bool Checkpoints::end_step(bool more) {
  if (settings_.save.empty()) return more;
  // Ranks get the signal at different moments: one that has it ends the step for all.
  const auto asked = optimizer_.comm().exchange(asked_to_end != 0 ? "1" : "0", "--save: is the run to end");
  const bool ends = !more || std::count(asked.begin(), asked.end(), "1") > 0;
  const auto every = settings_.save_every;
  if (ends || (every > 0 && optimizer_.last_step().number % every == 0))
    zero::save(settings_.save, model_, optimizer_, {{"seed", static_cast<std::int64_t>(settings_.seed)}},
               zero::SaveOptions().keep(static_cast<int>(settings_.keep)).async(!ends));
  if (ends) zero::wait_for_save(optimizer_);
  return !ends;
}

}  // namespace gpt
