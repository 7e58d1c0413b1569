// What paging costs an operator: the same small operators on ordinary parameters and on parameters of a stage 3 optimizer that are
// resident, interleaved in one run, and on tensors that nobody manages while there are managed ones. Two ranks, as threads; one works.
//
//   build/benchmarks/bench_paging --rounds 15
//
// Prints medians over rounds with [least .. most] and what managing adds; the count of fallback calls for unmanaged tensors, which has
// to be 0. With --once it runs one operator a few times and ends: for valgrind --tool=callgrind, whose counts don't depend on the
// machine's load (the difference of two runs with different --repeats).
#include <ATen/ATen.h>
#include <torch/optim/sgd.h>
#include <zero/zero.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <fstream>
#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "paging/fault.h"

namespace {

double median(std::vector<double> v) {
  std::sort(v.begin(), v.end());
  return v.size() % 2 == 1 ? v[v.size() / 2] : (v[v.size() / 2 - 1] + v[v.size() / 2]) / 2;
}

struct Tensors {
  at::Tensor w, b;
};

struct Row {
  const char* name;
  int touches;  ///< how many operators that use a parameter one call is made of
  std::function<void(const Tensors&)> run;
  std::vector<double> plain = {}, managed = {};
};

double nanoseconds(int repeats, const std::function<void()>& f) {
  const auto start = std::chrono::steady_clock::now();
  for (int i = 0; i < repeats; ++i) f();
  return std::chrono::duration<double, std::nano>(std::chrono::steady_clock::now() - start).count() / repeats;
}

void measure(const zero::Communicator& comm, int rounds, int repeats, const std::string& once, const std::string& json_path) {
  const auto make = [] {
    return Tensors{at::full({16, 16}, 0.01F).requires_grad_(true), at::full({16}, 0.02F).requires_grad_(true)};
  };
  const Tensors plain = make(), managed = make();
  const std::vector<at::Tensor> both{managed.w, managed.b};
  const auto opt = zero::wrap(std::make_unique<torch::optim::SGD>(both, torch::optim::SGDOptions(0.1)),
                              zero::Options(comm).stage(zero::Stage::kParameters));
  if (comm.rank() != 0) return comm.barrier("bench_paging");
  const auto x = at::full({4, 16}, 0.5F), out = at::empty({16}), other = at::full({16}, 2.0F);
  std::vector<Row> rows{
      {"add, no graph", 1,
       [&](const Tensors& t) {
         const at::NoGradGuard no_grad;
         auto to = out;
         at::add_out(to, t.b, other);
       }},
      {"sum, graph", 1, [&](const Tensors& t) { (void)t.b.sum(); }},
      {"linear, graph", 3, [&](const Tensors& t) { (void)at::linear(x, t.w, t.b); }},
  };
  if (!once.empty()) {
    for (int i = 0; i < repeats; ++i) rows[0].run(once == "managed" ? managed : plain);
    return comm.barrier("bench_paging");
  }
  std::vector<double> unmanaged;
  long stray = 0;
  for (auto& row : rows) row.run(managed);
  for (int round = 0; round < rounds; ++round) {
    for (auto& row : rows) {
      const bool first = round % 2 == 0;
      if (first) row.plain.push_back(nanoseconds(repeats, [&] { row.run(plain); }));
      row.managed.push_back(nanoseconds(repeats, [&] { row.run(managed); }));
      if (!first) row.plain.push_back(nanoseconds(repeats, [&] { row.run(plain); }));
    }
    const auto before = zero::faults_seen();
    unmanaged.push_back(nanoseconds(repeats, [&] { rows[0].run(plain); }));
    stray += zero::faults_seen() - before;
  }
  nlohmann::ordered_json json{{"benchmark", "bench_paging"}, {"rounds", rounds}, {"fallback_calls_for_others", stray}};
  std::printf("%-16s %10s %10s   %s\n", "ns per call", "ordinary", "managed", "added by each operator that uses a parameter");
  for (const auto& row : rows) {
    std::vector<double> added;
    for (std::size_t i = 0; i < row.plain.size(); ++i) added.push_back((row.managed[i] - row.plain[i]) / row.touches);
    const auto [least, most] = std::minmax_element(added.begin(), added.end());
    std::printf("%-16s %10.0f %10.0f   %.0f [%.0f .. %.0f]\n", row.name, median(row.plain), median(row.managed), median(added),
                *least, *most);
    json["operators"].push_back({{"name", row.name},
                                 {"ordinary_ns", median(row.plain)},
                                 {"managed_ns", median(row.managed)},
                                 {"added_ns", {{"median", median(added)}, {"min", *least}, {"max", *most}}}});
  }
  std::printf("fallback calls for tensors that nobody manages: %ld\n", stray);
  comm.barrier("bench_paging");
  TORCH_CHECK(stray == 0, "operators on other tensors reached the fallback");
  if (json_path.empty()) return;
  std::ofstream file(json_path);
  file << json.dump(1) << '\n';
  file.close();
  TORCH_CHECK(file.good(), "--json: can't write ", json_path);
}

}  // namespace

int main(int argc, char** argv) {
  int rounds = 15, repeats = 20000;
  std::string once;
  std::string json;
  CLI::App app{"What paging costs an operator that touches a resident parameter"};
  app.add_option("--rounds", rounds, "Interleaved measurements")->check(CLI::PositiveNumber)->capture_default_str();
  app.add_option("--repeats", repeats, "Calls per measurement")->check(CLI::PositiveNumber)->capture_default_str();
  app.add_option("--once", once, "Only call an operator on such a parameter, --repeats times")
      ->check(CLI::IsMember({"managed", "ordinary"}));
  app.add_option("--json", json, "Write results to this file");
  CLI11_PARSE(app, argc, argv);
  try {
    zero::run_ranks(2, [&](const zero::Communicator& comm) { measure(comm, rounds, repeats, once, json); });
    return 0;
  } catch (const std::exception& e) {
    std::fprintf(stderr, "bench_paging: %s\n", e.what());
    return 1;
  }
}
