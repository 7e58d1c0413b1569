// The losses of examples/gpt on two ranks against PyTorch's (gpt_losses.json, made by gpt_reference.py), and the stages against each other.
//
//   gpt_losses MODEL REFERENCE_JSON FOLDER GPT MPIRUN...
//
// Runs `MPIRUN... GPT` for both texts at all stages, with files in FOLDER. The licence text is left out where this machine's
// is another one. Losses must be as near to the reference as another processor or BLAS may bring them: within 1e-5 relative and ten
// times what a rounding error in the initial weights does to them (`spread` of the reference). The stages must give the same bits.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <exception>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "command.h"
#include "text.h"

namespace {

using nlohmann::json;

json read_json(const std::string& path) {
  std::ifstream file(path);
  if (!file) throw std::runtime_error("can't read " + path);
  return json::parse(file);
}

json train(const std::string& launcher, const std::string& text, const std::string& model, int stage, const std::string& out) {
  std::filesystem::remove(out);
  const std::string command = launcher + " --text " + quoted(text) + " --model " + model + " --stage " + std::to_string(stage) +
                              " --steps 20 --micro-batch 4 --quiet --json " + quoted(out);
  const Finished run = run_command(command);
  if (run.status != 0)
    throw std::runtime_error(command + "\nends with status " + std::to_string(run.status) + ":\n" + run.output);
  return read_json(out);
}

bool compare(const std::string& name, const std::vector<double>& ours, const json& test) {
  const auto reference = test["losses"].get<std::vector<double>>(), spread = test["spread"].get<std::vector<double>>();
  bool good = ours.size() == reference.size() && spread.size() == reference.size();
  double worst = 0, of_tolerance = 0;
  for (std::size_t i = 0; good && i < ours.size(); ++i) {
    const double difference = std::abs(ours[i] - reference[i]) / std::abs(reference[i]);
    const double tolerance = 1e-5 + 10 * spread[i];
    worst = std::max(worst, difference);
    of_tolerance = std::max(of_tolerance, difference / tolerance);
    good = difference <= tolerance;  // false for NaN
  }
  std::printf("%s: %zu losses, largest relative difference %.2e, %.0f %% of what rounding explains%s\n", name.c_str(),
              ours.size(), worst, 100 * of_tolerance, good ? "" : ": TOO MUCH");
  return good;
}

}  // namespace

int main(int argc, char** argv) try {
  if (argc < 6) throw std::runtime_error("usage: gpt_losses MODEL REFERENCE_JSON FOLDER GPT MPIRUN...");
  const std::string model = argv[1];
  const json reference = read_json(argv[2]);
  const std::string folder = argv[3];
  std::string launcher;
  for (int i = 5; i < argc; ++i) launcher += quoted(argv[i]) + " ";
  launcher += quoted(argv[4]);

  std::filesystem::create_directories(folder);
  const std::string pseudo = folder + "/pseudo.txt";
  std::ofstream(pseudo, std::ios::binary) << gpt::pseudo_text(reference["texts"]["pseudo"]["bytes"]);

  bool good = true;
  for (const auto& test : reference["cases"]) {
    if (test["model"] != model) continue;
    const std::string text = test["text"];
    const std::string path = text == "pseudo" ? pseudo : "/usr/share/common-licenses";
    if (!std::filesystem::exists(path)) {
      std::printf("%s %s: left out, there is no %s\n", model.c_str(), text.c_str(), path.c_str());
      continue;
    }
    const auto name = [&](int stage) { return model + " on " + text + ", stage " + std::to_string(stage); };
    std::vector<json> runs;
    for (int stage = 0; stage < 4; ++stage)
      runs.push_back(
          train(launcher, path, model, stage, folder + "/" + model + "." + text + "." + std::to_string(stage) + ".json"));
    const std::string sha = runs[0]["text_sha256"];
    const std::string expected = reference["texts"][text]["sha256"];
    if (sha != expected) {
      std::printf("%s %s: another text, %s (reference: %s)\n", model.c_str(), text.c_str(), sha.c_str(), expected.c_str());
      if (text == "pseudo") good = false;  // made here: a difference is a mistake
    } else {
      for (int stage = 0; stage < 4; ++stage)
        good &= compare(name(stage), runs[static_cast<std::size_t>(stage)]["losses"], test);
    }
    if (std::any_of(runs.begin(), runs.end(), [&](const json& run) { return run["losses"] != runs[0]["losses"]; })) {
      std::printf("%s on %s: stages differ\n", model.c_str(), text.c_str());
      good = false;
    }
  }
  return good ? 0 : 1;
} catch (const std::exception& e) {
  std::fprintf(stderr, "gpt_losses: %s\n", e.what());
  return 1;
}
