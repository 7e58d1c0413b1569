// How fast a checkpoint is saved and loaded, against `cp` followed by `sync` of the same files on the same disk, interleaved in one run.
//
//   build/benchmarks/bench_checkpoint --mib 1024 --rounds 5 --folder /var/tmp
//
// Ranks are threads. Both write into a fresh folder and end when everything is on the disk. Prints medians with [least .. most], and how
// much faster a save is than the copy (1: as fast).
#include <ATen/ATen.h>
#include <torch/optim/adamw.h>
#include <zero/zero.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace {

double seconds(const std::function<void()>& f) {
  const auto start = std::chrono::steady_clock::now();
  f();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

struct Series {
  const char* name;
  std::vector<double> values;
  double median() const {
    auto v = values;
    std::sort(v.begin(), v.end());
    return v.size() % 2 == 1 ? v[v.size() / 2] : (v[v.size() / 2 - 1] + v[v.size() / 2]) / 2;
  }
  double least() const { return *std::min_element(values.begin(), values.end()); }
  double most() const { return *std::max_element(values.begin(), values.end()); }
};

struct Arguments {
  std::int64_t mib = 512;
  int rounds = 5, ranks = 2, stage = 1;
  std::string folder = "/var/tmp", json;
};

std::int64_t bytes_in(const std::string& folder) {
  std::int64_t sum = 0;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) sum += static_cast<std::int64_t>(entry.file_size());
  return sum;
}

void copy_and_sync(const std::string& from, const std::string& to) {
  const auto command = "cp -r '" + from + "' '" + to + "' && sync '" + to + "'/* '" + to + "'";
  if (std::system(command.c_str()) != 0) throw std::runtime_error("failed: " + command);  // NOLINT(concurrency-mt-unsafe)
}

void measure(const zero::Communicator& comm, const Arguments& args) {
  const auto root = args.folder + "/zero-bench-checkpoint";
  // 12 bytes per element: the parameter and two moments.
  const std::int64_t count = 16, elements = (args.mib << 20) / 12 / count;
  std::vector<at::Tensor> params;
  for (int i = 0; i < count; ++i) params.push_back(at::rand({elements}).requires_grad_(true));
  auto opt = zero::wrap<torch::optim::AdamW>(params, torch::optim::AdamWOptions(1e-3),
                                             zero::Options(comm).stage(static_cast<zero::Stage>(args.stage)));
  for (auto& p : params) p.square().sum().backward();
  opt.step();
  opt.zero_grad();
  Series save{"save", {}}, copy{"cp, sync", {}}, ratio{"save's speed / cp's", {}}, load{"load", {}};
  std::int64_t bytes = 0;
  for (int round = 0; round <= args.rounds; ++round) {  // the first warms up
    if (comm.rank() == 0) std::filesystem::remove_all(root);
    comm.barrier();
    std::string path;
    const double saving = seconds([&] { path = zero::save(root, {}, opt); });
    comm.barrier();
    double copying = 0;
    if (comm.rank() == 0) {
      bytes = bytes_in(path);
      copying = seconds([&] { copy_and_sync(path, root + "/copy"); });
      std::filesystem::remove_all(root + "/copy");
    }
    comm.barrier();
    const double loading = seconds([&] { zero::load(path, {}, opt); });
    if (round == 0) continue;
    save.values.push_back(saving), copy.values.push_back(copying), load.values.push_back(loading);
    ratio.values.push_back(copying / saving);
  }
  if (comm.rank() != 0) return comm.barrier();
  std::filesystem::remove_all(root);
  std::printf("%d ranks, stage %d, %.0f MiB\n", comm.size(), args.stage, static_cast<double>(bytes) / (1 << 20));
  for (const auto* s : {&save, &copy, &load})
    std::printf("%-22s %7.3f s [%.3f .. %.3f]  %6.2f GB/s\n", s->name, s->median(), s->least(), s->most(),
                static_cast<double>(bytes) / s->median() * 1e-9);
  std::printf("%-22s %7.2f   [%.2f .. %.2f]\n", ratio.name, ratio.median(), ratio.least(), ratio.most());
  if (!args.json.empty())
    std::ofstream(args.json) << nlohmann::json{{"bytes", bytes},         {"ranks", comm.size()}, {"stage", args.stage},
                                               {"save", save.values},    {"copy", copy.values},  {"load", load.values},
                                               {"ratio", ratio.median()}}
                                    .dump(1);
  comm.barrier();
}

}  // namespace

int main(int argc, char** argv) {
  Arguments args;
  CLI::App app{"Saving and loading checkpoints against cp and sync"};
  app.add_option("--mib", args.mib, "Size of the checkpoint")->check(CLI::PositiveNumber)->capture_default_str();
  app.add_option("--rounds", args.rounds)->check(CLI::PositiveNumber)->capture_default_str();
  app.add_option("--ranks", args.ranks)->check(CLI::PositiveNumber)->capture_default_str();
  app.add_option("--stage", args.stage)->check(CLI::Range(0, 3))->capture_default_str();
  app.add_option("--folder", args.folder, "On the disk that is measured")->capture_default_str();
  app.add_option("--json", args.json);
  CLI11_PARSE(app, argc, argv);
  zero::run_ranks(args.ranks, [&](const zero::Communicator& comm) { measure(comm, args); });
  return 0;
}
