// What scripts/quickstart.sh shows: memory and traffic at every stage, two minutes of training, and what came of it.
#include <cstdio>
#include <string>

#include "generate.h"
#include "model.h"
#include "sha256.h"
#include "train.h"

namespace gpt {

void quickstart(const Settings& settings, const std::string& text, const zero::Communicator& comm) {
  const bool speaks = comm.rank() == 0;
  const auto say = [&](const std::string& line) {
    if (!speaks) return;
    std::printf("%s\n", line.c_str());
    std::fflush(stdout);
  };
  say("text: " + with_commas(static_cast<double>(text.size())) + " bytes; model " + settings.model + "; " +
      std::to_string(comm.size()) + (comm.size() == 1 ? " rank" : " ranks") + ", " +
      std::to_string(settings.micro_batch * settings.accumulate) + " sequences each per step");

  // Stages other than the one that trains: a few steps, for the table.
  constexpr int kStages = 4;
  std::vector<Measurements> stages(kStages);
  for (int stage = 0; stage < kStages; ++stage) {
    if (stage == settings.stage) continue;
    say("measuring stage " + std::to_string(stage));
    Settings few = settings;
    few.stage = stage;
    few.steps = 4;
    few.seconds = 0;
    few.quiet = true;
    stages[static_cast<std::size_t>(stage)] = train(few, text, comm).measured;
  }

  say("training at stage " + std::to_string(settings.stage));
  Run run = train(settings, text, comm);
  stages[static_cast<std::size_t>(settings.stage)] = run.measured;
  if (!speaks) return;
  run.measured.text_sha256 = sha256_hex(text);
  run.measured.text_bytes = static_cast<std::int64_t>(text.size());
  print_summary(run.measured);
  print_stage_table(stages);
  std::printf("\nWhat the model writes now, after \"%s\":\n\n%s\n", settings.prompt.c_str(),
              generate(*run.model, settings.prompt, settings.generate).c_str());
  if (!settings.json.empty()) write_json(settings.json, run.measured, stages);
}

}  // namespace gpt
