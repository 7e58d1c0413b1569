// Our collectives against MPI's own, in interleaved pairs: `mpirun -n 2 bench_collectives [--json FILE]`.
#include <ATen/core/Tensor.h>
#include <ATen/ops/from_blob.h>
#include <mpi.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <functional>
#include <string>
#include <vector>

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include "kernels/kernels.h"
#include "zero/mpi.h"

namespace {

struct Spread {
  double median = 0, low = 0, high = 0;
};

Spread spread_of(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const auto middle = values.size() / 2;
  const double median = values.size() % 2 == 1 ? values[middle] : (values[middle - 1] + values[middle]) / 2;
  return {median, values.front(), values.back()};
}

// Seconds per call, of the slowest rank.
double time_of(int calls, const std::function<void()>& action) {
  MPI_Barrier(MPI_COMM_WORLD);
  const double begin = MPI_Wtime();
  for (int i = 0; i < calls; ++i) action();
  double seconds = (MPI_Wtime() - begin) / calls;
  MPI_Allreduce(MPI_IN_PLACE, &seconds, 1, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
  return seconds;
}

struct Pair {
  const char* name;
  const char* theirs_name;
  double bytes_per_call;  // what the algorithm sends per rank
  std::function<void()> ours, theirs;
};

struct Options {
  std::vector<std::int64_t> sizes;
  int repeats = 9;
  std::string json;
};

nlohmann::json measure(const Pair& pair, std::int64_t bytes, int repeats, bool print) {
  const int calls = static_cast<int>(std::clamp<std::int64_t>((std::int64_t{32} << 20) / bytes, 1, 200));
  pair.ours();
  pair.theirs();
  std::vector<double> ours, theirs, ratios;
  for (int i = 0; i < repeats; ++i) {
    const double mine = time_of(calls, pair.ours);
    const double other = time_of(calls, pair.theirs);
    ours.push_back(pair.bytes_per_call / mine / 1e9);
    theirs.push_back(pair.bytes_per_call / other / 1e9);
    ratios.push_back(other / mine);
  }
  const Spread a = spread_of(ours), b = spread_of(theirs), r = spread_of(ratios);
  if (print) {
    std::printf("%-15s %8.4g MiB  %6.2f [%6.2f .. %6.2f]  %6.2f [%6.2f .. %6.2f]  %6.2f [%5.2f .. %5.2f]\n", pair.name,
                static_cast<double>(bytes) / (1 << 20), a.median, a.low, a.high, b.median, b.low, b.high, r.median, r.low,
                r.high);
    std::fflush(stdout);
  }
  return {{"collective", pair.name}, {"against", pair.theirs_name}, {"bytes", bytes},           {"ours_gb_per_s", a.median},
          {"ours_min", a.low},       {"ours_max", a.high},          {"mpi_gb_per_s", b.median}, {"mpi_min", b.low},
          {"mpi_max", b.high},       {"ratio", r.median},           {"ratio_min", r.low},       {"ratio_max", r.high}};
}

void run(const Options& options) {
  const auto comm = zero::make_communicator();
  const int n = comm.size();
  const bool print = comm.rank() == 0;
  if (print) {
    std::printf("Collectives of %d ranks on %d node(s), float32, %s, OMP_NUM_THREADS=%s.\n", n, comm.nodes(),
                zero::kernels::instruction_set(),
                std::getenv("OMP_NUM_THREADS") != nullptr ? std::getenv("OMP_NUM_THREADS") : "unset");
    std::printf(
        "GB/s: bytes that the algorithm sends per rank ((N-1)/N of the tensor, all-reduce twice that) over the time of the\n"
        "slowest rank; median [min .. max] of %d interleaved pairs. Size: the whole tensor. Both in zero::Buffer\n"
        "memory, warm; ours in place, as a bucket is reduced and gathered. Ratio: MPI's time over ours.\n\n",
        options.repeats);
    std::printf("%-15s %12s  %-25s  %-25s  %s\n", "", "size", "zero GB/s", "MPI GB/s", "ratio");
  }
  nlohmann::json results = nlohmann::json::array();
  for (const std::int64_t wanted : options.sizes) {
    const std::int64_t k = std::max<std::int64_t>(wanted / 4 / n, 1);
    const std::int64_t bytes = k * n * 4;
    const auto buffer = comm.allocate(bytes, "bench_collectives");
    const auto full = at::from_blob(buffer.data(), {k * n}, at::kFloat);
    const auto shard = at::from_blob(static_cast<float*>(buffer.data()) + comm.rank() * k, {k}, at::kFloat);
    const auto theirs = comm.allocate(2 * bytes, "bench_collectives");
    float* const input = static_cast<float*>(theirs.data());
    float* const output = input + k * n;
    const int count = static_cast<int>(k);
    const double share = static_cast<double>(bytes) * (n - 1) / n;
    const Pair pairs[] = {
        {"reduce_scatter", "MPI_Reduce_scatter_block", share, [&] { comm.reduce_scatter(full, shard, n); },
         [&] { MPI_Reduce_scatter_block(input, output, count, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD); }},
        {"all_gather", "MPI_Allgather", share, [&] { comm.all_gather(shard, full); },
         [&] { MPI_Allgather(MPI_IN_PLACE, 0, MPI_DATATYPE_NULL, output, count, MPI_FLOAT, MPI_COMM_WORLD); }},
        {"all_reduce", "MPI_Allreduce", 2 * share, [&] { comm.all_reduce(full, n); },
         [&] { MPI_Allreduce(MPI_IN_PLACE, output, count * n, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD); }},
    };
    for (const auto& pair : pairs) results.push_back(measure(pair, bytes, options.repeats, print));
  }
  if (!print || options.json.empty()) return;
  std::ofstream file(options.json);
  file << nlohmann::json{{"ranks", n},
                         {"nodes", comm.nodes()},
                         {"repeats", options.repeats},
                         {"instruction_set", zero::kernels::instruction_set()},
                         {"results", results}}
              .dump(2)
       << '\n';
  if (!file) throw std::runtime_error("cannot write " + options.json);
}

}  // namespace

int main(int argc, char* argv[]) {
  CLI::App app("reduce_scatter, all_gather and all_reduce against MPI's, under mpirun");
  Options options;
  std::vector<std::string> sizes = {"64KiB", "1MiB", "16MiB", "64MiB", "256MiB"};
  app.add_option("--sizes", sizes, "sizes of the whole tensor, as 64KiB or 16MiB")->capture_default_str();
  app.add_option("--repeats", options.repeats, "interleaved pairs of measurements")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--json", options.json, "write the results to this file");
  CLI11_PARSE(app, argc, argv);
  try {
    const CLI::AsSizeValue to_bytes(false);
    for (auto& size : sizes) {
      const auto error = to_bytes(size);  // rewrites it as a number of bytes
      if (!error.empty()) throw std::runtime_error("--sizes: " + error);
      options.sizes.push_back(std::stoll(size));
      if (options.sizes.back() < 4) throw std::runtime_error("--sizes: at least 4 bytes");
    }
    zero::init_mpi();
    run(options);
  } catch (const c10::Error& error) {
    std::fprintf(stderr, "bench_collectives: %s\n", error.msg().c_str());
    return 1;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "bench_collectives: %s\n", error.what());
    return 1;
  }
  return 0;
}
