// How fast the fused CUDA update moves memory, against the GPU's own copy and against ATen's fused AdamW: measured with events, in
// one run, the rows in turn, so that clocks and temperature hit all alike.
//
// GB/s count the bytes that an algorithm has to move: 28 per parameter for AdamW in f32 (read p, g, m, v; write p, m, v), 2 for each
// byte that is copied. A row shows the median of the repetitions with [lowest..highest]; its ratios are medians of the ratios within a
// repetition. Every row works on memory of its own that is larger than the caches.
//
// Exits with 77 where there is no CUDA device: nothing was measured.
#include <ATen/core/Tensor.h>
#include <ATen/ops/_fused_adamw.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "kernels/cuda/cuda_kernels.h"
#include "kernels/cuda/decide_body.h"

namespace {

using namespace zero::kernels;

constexpr int kNoDevice = 77;
constexpr double kLearningRate = 1e-3, kBeta1 = 0.9, kBeta2 = 0.95, kEps = 1e-8, kWeightDecay = 0.1;
const char* const kCopy = "device copy";
const char* const kFused = "at::_fused_adamw_ f32";

void ok(cudaError_t code) {
  if (code != cudaSuccess) throw std::runtime_error(cudaGetErrorString(code));
}

struct Row {
  std::string name;
  double bytes_per_element;
  std::function<void()> run;
  std::vector<double> seconds;
};

at::Tensor on_device(const at::Tensor& host) { return host.to(at::Device(at::kCUDA)); }

/// A plain struct or array of them, as bytes in device memory.
template <class T>
at::Tensor table_of(const std::vector<T>& host) {
  at::Tensor bytes = at::empty({static_cast<std::int64_t>(host.size() * sizeof(T))}, at::kByte);
  std::memcpy(bytes.data_ptr(), host.data(), host.size() * sizeof(T));
  return on_device(bytes);
}

DType type_of(const at::Tensor& t) {
  return t.scalar_type() == at::kFloat ? DType::f32 : t.scalar_type() == at::kHalf ? DType::f16 : DType::bf16;
}
Span span_of(const at::Tensor& t) { return {t.defined() ? t.data_ptr() : nullptr, t.defined() ? type_of(t) : DType::f32}; }

/// A shard of AdamW, cut into parameters of `segment` elements, with its tables.
struct Shard {
  Shard(std::int64_t n, std::int64_t segment, at::ScalarType parameter, at::ScalarType gradient, at::ScalarType moments,
        bool masters)
      : p(on_device(at::randn({n})).to(parameter)),
        g(on_device(at::randn({n}).mul_(1e-2)).to(gradient)),
        m(on_device(at::zeros({n})).to(moments)),
        v(on_device(at::zeros({n})).to(moments)) {
    if (masters) master = p.to(at::kFloat);
    std::vector<cuda::Segment> list;
    for (std::int64_t begin = 0; begin < n; begin += segment) {
      const auto number = static_cast<std::int32_t>(list.size());
      list.push_back({begin, std::min(n, begin + segment), number, number});
    }
    segments = table_of(list);
    first = table_of(cuda::make_tile_map(list, n));
    const cuda::AdamGroup group{kLearningRate, kBeta1, kBeta2, kEps, kWeightDecay, 1, 0};
    const std::vector<cuda::AdamPlan<float>> all(list.size(),
                                                 cuda::plan_of(group, cuda::ParameterStep{10, 0, 0, 0}, 1.0, 0.0f));
    plans = table_of(all);
    tables = {{static_cast<cuda::Segment*>(segments.data_ptr()), static_cast<std::int32_t*>(first.data_ptr()),
               static_cast<std::int32_t>(list.size()), n},
              static_cast<cuda::AdamPlan<float>*>(plans.data_ptr()),
              nullptr,
              nullptr};
  }

  double bytes_per_element() const {
    return static_cast<double>(2 * p.element_size() + g.element_size() + 2 * (m.element_size() + v.element_size()) +
                               (master.defined() ? 8 : 0));
  }
  void step() const {
    cuda::adam({span_of(p), span_of(g), span_of(m), span_of(v), {}, span_of(master)}, tables,
               c10::cuda::getCurrentCUDAStream().stream());
  }

  at::Tensor p, g, m, v, master, segments, first, plans;
  cuda::AdamTables tables{};
};

Row row_of(const std::string& name, const std::shared_ptr<Shard>& shard) {
  return {name, shard->bytes_per_element(), [shard] { shard->step(); }, {}};
}

std::vector<Row> rows_of(std::int64_t n) {
  const auto shard = [n](std::int64_t segment, at::ScalarType p, at::ScalarType g, at::ScalarType s, bool masters) {
    return std::make_shared<Shard>(n, segment, p, g, s, masters);
  };
  std::vector<Row> rows;
  const at::Tensor from = on_device(at::randn({n})), to = from.clone();
  rows.push_back({kCopy, 8, [=] { to.copy_(from, true); }, {}});
  const auto theirs = shard(n, at::kFloat, at::kFloat, at::kFloat, false);
  const at::Tensor step = on_device(at::ones({}));
  rows.push_back({kFused,
                  28,
                  [=] {
                    at::_fused_adamw_({theirs->p}, {theirs->g}, {theirs->m}, {theirs->v}, {}, {step}, kLearningRate, kBeta1,
                                      kBeta2, kWeightDecay, kEps, /*amsgrad=*/false, /*maximize=*/false);
                  },
                  {}});
  rows.push_back(row_of("zero AdamW f32", shard(n, at::kFloat, at::kFloat, at::kFloat, false)));
  rows.push_back(row_of("the same, segments of 1001", shard(1001, at::kFloat, at::kFloat, at::kFloat, false)));
  rows.push_back(row_of("bf16, f32 masters and moments", shard(n, at::kBFloat16, at::kBFloat16, at::kFloat, true)));
  rows.push_back(row_of("f16, f32 masters and moments", shard(n, at::kHalf, at::kHalf, at::kFloat, true)));
  rows.push_back(row_of("bf16, all of it", shard(n, at::kBFloat16, at::kBFloat16, at::kBFloat16, false)));
  return rows;
}

double median(std::vector<double> v) {
  std::sort(v.begin(), v.end());
  const std::size_t half = v.size() / 2;
  return v.size() % 2 == 1 ? v[half] : (v[half - 1] + v[half]) / 2;
}

/// Median over repetitions of a row's GB/s by that of the row with the name.
double ratio(const Row& a, const std::vector<Row>& rows, const char* name) {
  const Row& b = *std::find_if(rows.begin(), rows.end(), [&](const Row& r) { return r.name == name; });
  std::vector<double> ratios;
  for (std::size_t i = 0; i < a.seconds.size(); ++i)
    ratios.push_back(a.bytes_per_element / a.seconds[i] / (b.bytes_per_element / b.seconds[i]));
  return median(ratios);
}

void measure(std::vector<Row>& rows, int repeats, int launches) {
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream().stream();
  cudaEvent_t begin = nullptr, end = nullptr;
  ok(cudaEventCreate(&begin));
  ok(cudaEventCreate(&end));
  for (Row& r : rows) r.run();
  ok(cudaStreamSynchronize(stream));
  for (int i = 0; i < repeats; ++i) {
    for (std::size_t k = 0; k < rows.size(); ++k) {
      Row& r = rows[(k + static_cast<std::size_t>(i)) % rows.size()];
      ok(cudaEventRecord(begin, stream));
      for (int j = 0; j < launches; ++j) r.run();
      ok(cudaEventRecord(end, stream));
      ok(cudaEventSynchronize(end));
      float milliseconds = 0;
      ok(cudaEventElapsedTime(&milliseconds, begin, end));
      r.seconds.push_back(static_cast<double>(milliseconds) * 1e-3 / launches);
    }
  }
  ok(cudaEventDestroy(begin));
  ok(cudaEventDestroy(end));
}

nlohmann::json report(const std::vector<Row>& rows, std::int64_t n) {
  std::printf("\n%.0fM parameters\n%-30s %8s %20s %9s %9s %9s\n", static_cast<double>(n) / (1 << 20), "", "GB/s", "[low..high]",
              "ms", "/ copy", "/ fused");
  nlohmann::json out = nlohmann::json::array();
  for (const Row& r : rows) {
    std::vector<double> gbs;
    for (const double s : r.seconds) gbs.push_back(r.bytes_per_element * static_cast<double>(n) / s / 1e9);
    const auto [low, high] = std::minmax_element(gbs.begin(), gbs.end());
    const double by_copy = ratio(r, rows, kCopy), by_fused = ratio(r, rows, kFused);
    std::printf("%-30s %8.1f   [%7.1f..%7.1f] %9.3f %9.2f %9.2f\n", r.name.c_str(), median(gbs), *low, *high,
                median(r.seconds) * 1e3, by_copy, by_fused);
    out.push_back({{"name", r.name},
                   {"parameters", n},
                   {"bytes_per_element", r.bytes_per_element},
                   {"gb_per_s", {{"median", median(gbs)}, {"min", *low}, {"max", *high}}},
                   {"seconds", r.seconds},
                   {"ratio", {{"device_copy", by_copy}, {"aten_fused", by_fused}}}});
  }
  std::fflush(stdout);
  return out;
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("The fused CUDA update against the GPU's own copy and ATen's fused AdamW. Exits with 77 without a CUDA device.");
  std::vector<std::int64_t> sizes = {64, 256};
  int repeats = 9, launches = 10;
  std::string json_file;
  app.add_option("--sizes", sizes, "millions (2^20) of parameters")->delimiter(',')->check(CLI::PositiveNumber);
  app.add_option("--repeats", repeats, "repetitions of every row, at least 7")->check(CLI::Range(7, 1000));
  app.add_option("--launches", launches, "launches in a row per repetition")->check(CLI::PositiveNumber);
  app.add_option("--json", json_file, "write the figures to this file");
  CLI11_PARSE(app, argc, argv);

  int devices = 0;
  const cudaError_t code = cudaGetDeviceCount(&devices);
  if (code != cudaSuccess || devices == 0) {
    std::fprintf(stderr, "bench_update_cuda: no CUDA device (%s): nothing was measured\n",
                 code == cudaSuccess ? "none found" : cudaGetErrorString(code));
    return kNoDevice;
  }
  cudaDeviceProp device{};
  ok(cudaGetDeviceProperties(&device, 0));
  std::printf("%s, %d repetitions of %d launches\n", device.name, repeats, launches);
  nlohmann::json results = nlohmann::json::array();
  for (const std::int64_t millions : sizes) {
    std::vector<Row> rows = rows_of(millions << 20);
    measure(rows, repeats, launches);
    for (auto& row : report(rows, millions << 20)) results.push_back(row);
  }
  if (!json_file.empty()) {
    std::ofstream out(json_file);
    out << nlohmann::json{{"benchmark", "update_cuda"},
                          {"device", device.name},
                          {"repeats", repeats},
                          {"launches", launches},
                          {"results", results}}
               .dump(2)
        << '\n';
    if (!out.flush()) {
      std::fprintf(stderr, "bench_update_cuda: can't write %s\n", json_file.c_str());
      return 1;
    }
  }
  return 0;
}
