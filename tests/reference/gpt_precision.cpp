// examples/gpt in bfloat16 and float16 at every stage on two ranks: the same bits at all stages, and as good as in float32.
//
//   gpt_precision MODEL STEPS FOLDER GPT MPIRUN...
//
// Compared is the mean loss of the last tenth of the steps: within 2 %. LibTorch's float16 on a CPU is some twenty times slower than its
// float32: stages after the first make a fifth of the steps, which have to be the first stage's.
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

double mean_of_last_tenth(const std::vector<double>& losses) {
  const auto count = std::max<std::ptrdiff_t>(1, static_cast<std::ptrdiff_t>(losses.size()) / 10);
  double sum = 0;
  for (auto it = losses.end() - count; it != losses.end(); ++it) sum += *it;
  return sum / static_cast<double>(count);
}

}  // namespace

int main(int argc, char** argv) try {
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  if (argc < 6) throw std::runtime_error("usage: gpt_precision MODEL STEPS FOLDER GPT MPIRUN...");
  const std::string model = argv[1], folder = argv[3];
  const int steps = std::stoi(argv[2]);
  std::string launcher;
  for (int i = 5; i < argc; ++i) launcher += ::quoted(argv[i]) + " ";
  launcher += ::quoted(argv[4]);
  std::filesystem::create_directories(folder);
  std::string text = "/usr/share/common-licenses";
  if (!std::filesystem::exists(text)) {
    text = folder + "/pseudo.txt";
    std::ofstream(text, std::ios::binary) << gpt::pseudo_text(200000);
  }
  const auto train = [&](const std::string& dtype, int stage, int count) {
    const std::string out = folder + "/" + dtype + ".json";
    std::filesystem::remove(out);
    const std::string command = launcher + " --text " + ::quoted(text) + " --model " + model + " --stage " +
                                std::to_string(stage) + " --dtype " + dtype + " --steps " + std::to_string(count) +
                                " --micro-batch 4 --clip 1 --bucket-bytes 300000 --quiet --json " + ::quoted(out);
    const Finished run = run_command(command);
    if (run.status != 0)
      throw std::runtime_error(command + "\nends with status " + std::to_string(run.status) + ":\n" + run.output);
    std::ifstream file(out);
    return json::parse(file);
  };

  bool good = true;
  const double expected = mean_of_last_tenth(train("float32", 1, steps)["losses"].get<std::vector<double>>());
  std::printf("%s, %d steps: float32 ends at %.5f\n", model.c_str(), steps, expected);
  for (const std::string dtype : {"bfloat16", "float16"}) {
    std::vector<double> first;
    for (int stage = 0; stage <= 3; ++stage) {
      const int count = dtype == "float16" && stage > 0 ? std::max(1, steps / 5) : steps;
      const json run = train(dtype, stage, count);
      const auto losses = run["losses"].get<std::vector<double>>();
      if (static_cast<int>(losses.size()) != count) throw std::runtime_error("not a loss for each step");
      if (stage == 0) first = losses;
      const bool same = std::equal(losses.begin(), losses.end(), first.begin());
      const double end = mean_of_last_tenth(losses);
      if (count < steps) {
        std::printf("%-8s stage %d: %d steps%s\n", dtype.c_str(), stage, count, same ? ", the same bits" : ", OTHER BITS");
        good = good && same;
        continue;
      }
      const double off = end / expected - 1;
      const bool near = std::abs(off) <= 0.02;  // false for NaN
      std::printf("%-8s stage %d: ends at %.5f (%+.2f %%), loss scale %g, %d steps skipped%s%s\n", dtype.c_str(), stage, end,
                  100 * off, run["loss_scale"].get<double>(), run["skipped_steps"].get<int>(), same ? "" : ", OTHER BITS",
                  near ? "" : ", TOO FAR");
      good = good && same && near;
    }
  }
  return good ? 0 : 1;
} catch (const std::exception& e) {
  std::fprintf(stderr, "gpt_precision: %s\n", e.what());
  return 1;
}
