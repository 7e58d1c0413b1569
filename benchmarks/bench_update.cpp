// How fast the fused optimizer update moves memory. Measured, interleaved in one run so that a noisy machine hits all alike:
// our fused float32 AdamW (also with bf16 and fp16 gradients), LibTorch's torch::optim::AdamW step, ATen's fused AdamW operator,
// and, as the machine's own speed, ATen's in-place a += b of the same size.
//
// GB/s count the bytes that an algorithm has to move: 28 per parameter for AdamW (read p, g, m, v; write p, m, v), 26 with a
// 16-bit gradient, 12 for a += b. A row shows the median of the repetitions with [lowest..highest]; its ratios are medians of
// the ratios within each repetition.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/_fused_adamw.h>
#include <ATen/ops/full.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>
#include <torch/optim/adamw.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <fstream>
#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "kernels/kernels.h"

namespace {

using zero::kernels::DType;

constexpr double kLearningRate = 1e-3, kBeta1 = 0.9, kBeta2 = 0.95, kEps = 1e-8, kWeightDecay = 0.1;

struct Row {
  std::string name;
  double bytes_per_element;
  std::function<void()> run;
  std::vector<double> seconds;
};

/// Names of the rows that others are compared with.
const char* const kOurs = "zero fused AdamW f32";
const char* const kTorch = "torch::optim::AdamW step";
const char* const kFused = "at::_fused_adamw_";
const char* const kAdd = "at a += b";

double median(std::vector<double> v) {
  std::sort(v.begin(), v.end());
  const std::size_t half = v.size() / 2;
  return v.size() % 2 == 1 ? v[half] : (v[half - 1] + v[half]) / 2;
}

double seconds_of(const std::function<void()>& f) {
  const auto begin = std::chrono::steady_clock::now();
  f();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

/// One size's tensors. All rows share the parameters and gradients; LibTorch's optimizer has state of its own.
struct Problem {
  explicit Problem(std::int64_t count)
      : n(count),
        p(at::randn({count})),
        g(at::randn({count}).mul_(1e-2)),
        g_bf16(g.to(at::kBFloat16)),
        g_f16(g.to(at::kHalf)),
        m(at::zeros({count})),
        v(at::zeros({count})),
        step(at::zeros({})),
        leaf(p.detach().clone().requires_grad_()),
        optimizer({leaf},
                  torch::optim::AdamWOptions(kLearningRate).betas({kBeta1, kBeta2}).eps(kEps).weight_decay(kWeightDecay)) {
    leaf.mutable_grad() = g;
  }

  void ours(const at::Tensor& grad, DType dtype, int threads) {
    zero::kernels::AdamArgs args;
    args.lr = kLearningRate;
    args.beta1 = kBeta1;
    args.beta2 = kBeta2;
    args.eps = kEps;
    args.weight_decay = kWeightDecay;
    args.decoupled = true;
    args.step = ++steps;
    zero::kernels::adam(
        {{p.data_ptr(), DType::f32}, {grad.data_ptr(), dtype}, {m.data_ptr(), DType::f32}, {v.data_ptr(), DType::f32}}, n, args,
        threads);
  }

  void fused() {
    step.add_(1);
    at::_fused_adamw_({p}, {g}, {m}, {v}, {}, {step}, kLearningRate, kBeta1, kBeta2, kWeightDecay, kEps, /*amsgrad=*/false,
                      /*maximize=*/false);
  }

  std::vector<Row> rows(int threads) {
    return {{kOurs, 28, [=] { ours(g, DType::f32, threads); }, {}},
            {"zero fused AdamW, bf16 grad", 26, [=] { ours(g_bf16, DType::bf16, threads); }, {}},
            {"zero fused AdamW, f16 grad", 26, [=] { ours(g_f16, DType::f16, threads); }, {}},
            {kTorch, 28, [=] { optimizer.step(); }, {}},
            {kFused, 28, [=] { fused(); }, {}},
            {kAdd, 12, [=] { p.add_(g); }, {}}};
  }

  std::int64_t n, steps = 0;
  at::Tensor p, g, g_bf16, g_f16, m, v, step, leaf;
  torch::optim::AdamW optimizer;
};

const Row& find(const std::vector<Row>& rows, const std::string& name) {
  return *std::find_if(rows.begin(), rows.end(), [&](const Row& r) { return r.name == name; });
}

/// Median over repetitions of a row's GB/s by another's.
double ratio(const Row& a, const Row& b) {
  std::vector<double> ratios;
  for (std::size_t i = 0; i < a.seconds.size(); ++i) {
    ratios.push_back(a.bytes_per_element / a.seconds[i] / (b.bytes_per_element / b.seconds[i]));
  }
  return median(ratios);
}

void measure(std::vector<Row>& rows, int repeats) {
  for (Row& r : rows) r.run();  // first touches and LibTorch's lazy state
  for (int i = 0; i < repeats; ++i) {
    for (std::size_t k = 0; k < rows.size(); ++k) {
      Row& r = rows[(k + static_cast<std::size_t>(i)) % rows.size()];
      r.seconds.push_back(seconds_of(r.run));
    }
  }
}

nlohmann::json report(const std::vector<Row>& rows, std::int64_t n, int threads) {
  std::printf("\n%.0fM parameters, %d thread%s\n", static_cast<double>(n) / (1 << 20), threads, threads == 1 ? "" : "s");
  std::printf("%-30s %8s %18s %10s %9s %9s %9s\n", "", "GB/s", "[low..high]", "ms", "/ a+=b", "/ torch", "/ fused");
  nlohmann::json out = nlohmann::json::array();
  for (const Row& r : rows) {
    std::vector<double> gbs;
    for (const double s : r.seconds) gbs.push_back(r.bytes_per_element * static_cast<double>(n) / s / 1e9);
    const auto [low, high] = std::minmax_element(gbs.begin(), gbs.end());
    const double by_add = ratio(r, find(rows, kAdd)), by_torch = ratio(r, find(rows, kTorch)),
                 by_fused = ratio(r, find(rows, kFused));
    std::printf("%-30s %8.2f   [%6.2f..%6.2f] %10.1f %9.2f %9.2f %9.2f\n", r.name.c_str(), median(gbs), *low, *high,
                median(r.seconds) * 1e3, by_add, by_torch, by_fused);
    out.push_back({{"name", r.name},
                   {"parameters", n},
                   {"threads", threads},
                   {"bytes_per_element", r.bytes_per_element},
                   {"gb_per_s", {{"median", median(gbs)}, {"min", *low}, {"max", *high}}},
                   {"seconds", r.seconds},
                   {"ratio", {{"in_place_add", by_add}, {"torch_optim", by_torch}, {"aten_fused", by_fused}}}});
  }
  std::fflush(stdout);
  return out;
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("The fused optimizer update against LibTorch's and against the machine's memory");
  std::vector<std::int64_t> sizes = {16, 64};
  std::vector<int> threads = {1, 2};
  int repeats = 9;
  std::string json_file;
  app.add_option("--sizes", sizes, "millions (2^20) of parameters")->delimiter(',')->check(CLI::PositiveNumber);
  app.add_option("--threads", threads, "threads")->delimiter(',')->check(CLI::PositiveNumber);
  app.add_option("--repeats", repeats, "repetitions of every row")->check(CLI::PositiveNumber);
  app.add_option("--json", json_file, "write the figures to this file");
  CLI11_PARSE(app, argc, argv);

  std::printf("instruction set %s, %d repetitions\n", zero::kernels::instruction_set(), repeats);
  nlohmann::json results = nlohmann::json::array();
  for (const std::int64_t millions : sizes) {
    Problem problem(millions << 20);  // freed before the next size
    for (const int t : threads) {
      at::set_num_threads(t);
      std::vector<Row> rows = problem.rows(t);
      measure(rows, repeats);
      for (auto& row : report(rows, problem.n, t)) results.push_back(row);
    }
  }
  if (!json_file.empty()) {
    std::ofstream out(json_file);
    out << nlohmann::json{{"benchmark", "update"},
                          {"instruction_set", zero::kernels::instruction_set()},
                          {"repeats", repeats},
                          {"results", results}}
               .dump(2)
        << '\n';
    if (!out.flush()) {
      std::fprintf(stderr, "bench_update: can't write %s\n", json_file.c_str());
      return 1;
    }
  }
  return 0;
}
