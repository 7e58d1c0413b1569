// The losses of examples/gpt on two ranks against PyTorch's (gpt_losses.json, made by gpt_reference.py), and stage 0 against 1.
//
//   gpt_losses MODEL REFERENCE_JSON FOLDER GPT MPIRUN...
//
// Runs `MPIRUN... GPT` for both texts at both stages, with files in FOLDER. The licence text is left out where this machine's
// is another one. Losses must be within 1e-4 relative of the reference, which allows for another CPU or BLAS; the two stages must
// give the same bits.
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

constexpr double kTolerance = 1e-4;

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

bool compare(const std::string& name, const std::vector<double>& ours, const std::vector<double>& reference) {
  double worst = ours.size() == reference.size() ? 0 : 1;
  for (std::size_t i = 0; i < ours.size() && i < reference.size(); ++i) {
    const double difference = std::abs(ours[i] - reference[i]) / std::abs(reference[i]);
    if (!(difference <= worst)) worst = difference;  // a NaN is kept
  }
  const bool good = worst <= kTolerance;
  std::printf("%s: %zu losses, largest relative difference %.2e%s\n", name.c_str(), ours.size(), worst,
              good ? "" : ": TOO MUCH");
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
    for (int stage = 0; stage < 2; ++stage)
      runs.push_back(
          train(launcher, path, model, stage, folder + "/" + model + "." + text + "." + std::to_string(stage) + ".json"));
    const std::string sha = runs[0]["text_sha256"];
    const std::string expected = reference["texts"][text]["sha256"];
    if (sha != expected) {
      std::printf("%s %s: another text, %s (reference: %s)\n", model.c_str(), text.c_str(), sha.c_str(), expected.c_str());
      if (text == "pseudo") good = false;  // made here: a difference is a mistake
    } else {
      for (int stage = 0; stage < 2; ++stage)
        good &= compare(name(stage), runs[static_cast<std::size_t>(stage)]["losses"], test["losses"]);
    }
    if (runs[0]["losses"] != runs[1]["losses"]) {
      std::printf("%s on %s: stages 0 and 1 differ\n", model.c_str(), text.c_str());
      good = false;
    }
  }
  return good ? 0 : 1;
} catch (const std::exception& e) {
  std::fprintf(stderr, "gpt_losses: %s\n", e.what());
  return 1;
}
