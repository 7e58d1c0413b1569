// Progress, tables and JSON.
#include "report.h"

#include <c10/util/Exception.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <nlohmann/json.hpp>

namespace gpt {
namespace {

template <typename... Values>
std::string format(const char* pattern, Values... values) {
  std::array<char, 256> line{};
  std::snprintf(line.data(), line.size(), pattern, values...);
  return line.data();
}

/// mpirun gives its processes pseudo-terminals whatever its own output is: then it is the parent's that counts.
bool on_terminal() {
  if (isatty(STDOUT_FILENO) == 0) return false;
  if (std::getenv("OMPI_COMM_WORLD_SIZE") == nullptr) return true;
  std::array<char, 64> target{};
  const std::string link = "/proc/" + std::to_string(getppid()) + "/fd/1";
  const ssize_t n = readlink(link.c_str(), target.data(), target.size() - 1);
  return n > 0 &&
         (std::string(target.data()).rfind("/dev/pts/", 0) == 0 || std::string(target.data()).rfind("/dev/tty", 0) == 0);
}

nlohmann::ordered_json to_json(const Measurements& m) {
  const auto by_category = [](const zero::Memory& memory) {
    return nlohmann::ordered_json{{"parameters", memory.parameters},
                                  {"gradients", memory.gradients},
                                  {"optimizer_state", memory.optimizer_state},
                                  {"buffers", memory.buffers}};
  };
  return {{"model", m.model},
          {"optimizer", m.optimizer},
          {"dtype", m.dtype},
          {"stage", m.stage < 0 ? nlohmann::ordered_json("plain") : nlohmann::ordered_json(m.stage)},
          {"world_size", m.world_size},
          {"parameter_count", m.parameter_count},
          {"padded_count", m.padded_count},
          {"tokens_per_step", m.tokens_per_step},
          {"tokens_per_second", m.tokens_per_second()},
          {"bytes_sent_per_step", m.bytes_sent_per_step},
          {"faults", m.paging.faults},
          {"prefetch_hits", m.paging.prefetch_hits},
          {"late_prefetch_seconds", m.paging.late_prefetch_seconds},
          {"evictions", m.paging.evictions},
          {"bytes_gathered", m.paging.bytes_gathered},
          {"predicted_bytes", m.paging.predicted_bytes},
          {"peak_resident_parameter_bytes", m.paging.peak_resident_parameter_bytes},
          {"resident_bytes", by_category(m.kept)},
          {"planned_bytes", by_category(m.plan)},
          {"counted_bytes", m.counted_bytes},
          {"peak_resident_bytes", m.peak_resident_bytes},
          {"peak_rss_growth_bytes", m.peak_rss_growth_bytes},
          {"pss_growth_bytes", m.pss_growth_bytes},
          {"text_sha256", m.text_sha256},
          {"text_bytes", m.text_bytes},
          {"skipped_steps", m.skipped_steps},
          {"loss_scale", m.loss_scale},
          {"losses", m.losses},
          {"seconds", m.seconds}};
}

void print_memory_row(const char* stage, const char* what, double parameters, double gradients, double state, double buffers) {
  std::printf("  %-6s %-9s %11.2f %11.2f %11.2f %11.2f %11.2f\n", stage, what, parameters / 0x1p20, gradients / 0x1p20,
              state / 0x1p20, buffers / 0x1p20, (parameters + gradients + state + buffers) / 0x1p20);
}

void print_memory_row(const char* stage, const char* what, const zero::Memory& m) {
  print_memory_row(stage, what, static_cast<double>(m.parameters), static_cast<double>(m.gradients),
                   static_cast<double>(m.optimizer_state), static_cast<double>(m.buffers));
}

}  // namespace

double Measurements::tokens_per_second() const {
  if (seconds.empty()) return 0;
  std::vector<double> sorted(seconds.begin() + (seconds.size() > 2 ? 2 : 0), seconds.end());
  const auto middle = sorted.begin() + static_cast<std::ptrdiff_t>(sorted.size() / 2);
  std::nth_element(sorted.begin(), middle, sorted.end());
  return static_cast<double>(tokens_per_step) / *middle;
}

std::string mebibytes(double bytes) { return format("%.1f", bytes / 0x1p20); }

std::string with_commas(double number) {
  std::string digits = format("%.0f", number);
  for (auto at = static_cast<std::ptrdiff_t>(digits.size()) - 3; at > (digits[0] == '-' ? 1 : 0); at -= 3)
    digits.insert(static_cast<std::size_t>(at), 1, ',');
  return digits;
}

Progress::Progress(bool on, std::int64_t steps, double seconds)
    : on_(on), redraw_(on && on_terminal()), steps_(steps), seconds_(seconds), start_(std::chrono::steady_clock::now()) {}

Progress::~Progress() {
  if (on_ && redraw_ && next_ > 0) std::printf("\n");
  std::fflush(stdout);
}

double Progress::elapsed() const { return std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count(); }

void Progress::show(std::int64_t step, double loss, double tokens_per_second, std::int64_t resident_bytes) {
  const double now = elapsed();
  const double done = std::min(1.0, seconds_ > 0 ? now / seconds_ : static_cast<double>(step) / static_cast<double>(steps_));
  if (!on_ || (now < next_ && done < 1 && step > 1)) return;
  next_ = now + (redraw_ ? 0.1 : 5.0);

  const double left = std::max(0.0, std::ceil(now / done - now));
  const std::string count = seconds_ > 0
                                ? format("step %lld", static_cast<long long>(step))
                                : format("step %lld/%lld", static_cast<long long>(step), static_cast<long long>(steps_));
  const std::string facts = count + format("  loss %.4f", loss) + "  " + with_commas(tokens_per_second) + " tokens/s  " +
                            mebibytes(static_cast<double>(resident_bytes)) + " MiB/rank" +
                            format("  ETA %d:%02d", static_cast<int>(left) / 60, static_cast<int>(left) % 60);
  if (redraw_) {
    constexpr std::size_t kWidth = 20;
    std::string bar(static_cast<std::size_t>(done * kWidth), '#');
    bar.resize(kWidth, '.');
    std::printf("\r[%s] %s \033[K", bar.c_str(), facts.c_str());
  } else {
    std::printf("%s\n", facts.c_str());
  }
  std::fflush(stdout);
}

void write_json(const std::string& path, const Measurements& run, const std::vector<Measurements>& stages) {
  auto json = to_json(run);
  for (const auto& stage : stages) json["stages"].push_back(to_json(stage));
  std::ofstream file(path);
  file << json.dump(1) << '\n';
  file.close();
  TORCH_CHECK(file.good(), "--json: can't write ", path);
}

void print_summary(const Measurements& m) {
  const auto n = m.losses.size();
  if (n == 0) return;
  std::printf("%zu steps, loss %.4f -> %.4f, %s tokens/s, %s MiB kept per rank, %s bytes sent per rank and step\n", n,
              m.losses.front(), m.losses.back(), with_commas(m.tokens_per_second()).c_str(),
              mebibytes(static_cast<double>(m.kept.total())).c_str(),
              with_commas(static_cast<double>(m.bytes_sent_per_step)).c_str());
  if (m.loss_scale != 1 || m.skipped_steps > 0)
    std::printf("loss scale %g, %lld steps skipped\n", m.loss_scale, static_cast<long long>(m.skipped_steps));
}

void print_stage_table(const std::vector<Measurements>& stages) {
  if (stages.empty()) return;
  const double psi = static_cast<double>(stages.front().parameter_count);
  const int ranks = stages.front().world_size;
  std::printf("\nWhat each rank keeps between backward and step, MiB (%s parameters, %s, %d rank%s)\n",
              with_commas(psi).c_str(), stages.front().optimizer.c_str(), ranks, ranks == 1 ? "" : "s");
  std::printf("  %-6s %-9s %11s %11s %11s %11s %11s\n", "stage", "", "parameters", "gradients", "state", "buffers", "total");
  for (const auto& m : stages) {
    const std::string name = std::to_string(m.stage);
    // Bytes per parameter in float32: 4 for itself, 4 for its gradient, 8 for Adam's two moments, 4 for SGD's momentum. In 16 bits:
    // 2, 2, the same, and 4 for its master.
    const double own = m.dtype == "float32" ? 4 : 2, master = m.dtype == "float32" ? 0 : 4;
    const double state = (m.optimizer == "sgd" ? 4 + master : 8 + master) * psi / (m.stage >= 1 ? ranks : 1);
    print_memory_row(name.c_str(), "measured", m.kept);
    print_memory_row("", "planned", m.plan);
    print_memory_row("", "formula", own * psi / (m.stage >= 3 ? ranks : 1), own * psi / (m.stage >= 2 ? ranks : 1), state, 0);
    std::printf("  %-6s %-9s %59.2f\n", "", "counted", static_cast<double>(m.counted_bytes) / 0x1p20);
  }
  std::printf(
      "  planned: the formula with what alignment adds and the buffers the library declares; counted: all tensors' and shared\n"
      "  memory that came with the run, seen from outside the library\n");
  std::printf("\nBytes each rank sent per step\n  %-6s %15s   %s\n", "stage", "measured",
              "formula 2\xCE\xA8(N-1)/N, 4 bytes each; stage 3: 2 where the budget holds everything, at most 3");
  for (const auto& m : stages) {
    const double once = 4 * psi * (ranks - 1) / ranks;
    std::printf("  %-6d %15s   %s%s\n", m.stage, with_commas(static_cast<double>(m.bytes_sent_per_step)).c_str(),
                with_commas(2 * once).c_str(), m.stage == 3 ? (" to " + with_commas(3 * once)).c_str() : "");
  }
  const auto& last = stages.back();
  if (last.stage == 3 && ranks > 1)
    std::printf(
        "\nStage 3, a step: %lld buckets gathered before their use, %lld when they were touched, %lld released for room;\n"
        "  %s bytes gathered, %s predicted; at most %s MiB of parameters whole at a time\n",
        static_cast<long long>(last.paging.prefetch_hits), static_cast<long long>(last.paging.faults),
        static_cast<long long>(last.paging.evictions), with_commas(static_cast<double>(last.paging.bytes_gathered)).c_str(),
        with_commas(static_cast<double>(last.paging.predicted_bytes)).c_str(),
        mebibytes(static_cast<double>(last.paging.peak_resident_parameter_bytes)).c_str());
  std::fflush(stdout);
}

}  // namespace gpt
