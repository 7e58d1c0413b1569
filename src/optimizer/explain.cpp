// ZeroOptimizer::explain(): what a step is going to send and to keep, in words.
#include <algorithm>
#include <iomanip>
#include <sstream>

#include "optimizer/impl.h"

namespace zero {
namespace {

std::string mib(std::int64_t bytes) {
  std::ostringstream out;
  out << std::fixed << std::setprecision(2) << static_cast<double>(bytes) / 0x1p20 << " MiB";
  return out.str();
}

// "0 1 2 3 2 1 0", shortened.
std::string order_of(const Plan& plan) {
  constexpr std::size_t kMost = 60;
  std::ostringstream out;
  for (std::size_t i = 0; i < plan.trace.size(); ++i) {
    if (i == kMost) {
      out << " … (" << plan.trace.size() - kMost << " more)";
      break;
    }
    out << (i > 0 ? " " : "") << plan.trace[i].unit;
  }
  return out.str();
}

}  // namespace

std::string ZeroOptimizer::Impl::explain() const {
  if (!attached() || !layout) return "not attached to any ranks yet";
  std::ostringstream out;
  const auto n = comm.size();
  const auto whole = layout->padded_bytes(), part = whole / n * (n - 1);
  const auto gradient_part = gradient_layout->padded_bytes() / n * (n - 1);
  out << "stage " << static_cast<int>(options.stage()) << ", " << n << (n == 1 ? " rank" : " ranks") << ": "
      << parameters.size() << " parameters in " << layout->units() << " buckets, " << mib(whole) << " with padding";
  if (n == 1) {
    out << "\nnothing is sent";
    return out.str();
  }
  out << "\ngradients: each rank sends " << mib(gradient_part) << " per backward"
      << (options.stage() < Stage::kGradients ? " that is averaged" : "");
  if (!paged) {
    out << (options.stage() == Stage::kReplicated ? "\naverages: each rank sends " : "\nparameters: each rank sends ")
        << mib(options.stage() == Stage::kReplicated ? gradient_part : part) << " per step, "
        << (options.stage() == Stage::kReplicated ? "before the update" : "after the update");
    return out.str();
  }
  out << "\nparameters: " << mib(whole / n) << " here; whole at a time at most " << mib(paged->budget()) << " (memory_budget)";
  const auto plan = paged->plan();
  if (plan.trace.empty()) {
    out << "\nno step has been made yet that shows in which order buckets are used";
    return out.str();
  }
  const auto gathered = plan.bytes / n * (n - 1);
  std::size_t evictions = 0;
  for (const auto& fetch : plan.fetches) evictions += fetch.victims.size();
  out << "\na step touches buckets " << plan.trace.size() << " times and gathers " << plan.fetches.size()
      << " times: " << mib(gathered) << ", " << std::fixed << std::setprecision(2)
      << (whole > 0 ? static_cast<double>(plan.bytes) / static_cast<double>(whole) : 0) << " Ψ′(N−1)/N, from other ranks; "
      << evictions << " releases for room, at most " << mib(plan.peak_bytes) << " whole"
      << "\nof the buckets " << mib(paged->mapped_bytes()) << " are read where they lie, in the ranks' shards, "
      << mib(whole - paged->mapped_bytes()) << " are copied"
      << "\norder: " << order_of(plan);
  if (!plan.fits)
    out << "\nthe budget doesn't suffice for what operators use at a time: no plan, buckets come when they are touched";
  return out.str();
}

}  // namespace zero
