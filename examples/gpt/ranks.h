// Small things that all ranks do together: means and maxima of their numbers, and work that fails on all of them if it fails on one.
#pragma once

#include <c10/util/Exception.h>
#include <zero/communicator.h>

#include <algorithm>
#include <cstring>
#include <exception>
#include <stdexcept>
#include <string>
#include <vector>

namespace gpt {

/// First line of an exception's message, without the C++ stack that LibTorch adds.
inline std::string one_line(const std::exception& e) {
  const auto* error = dynamic_cast<const c10::Error*>(&e);
  const std::string message = error != nullptr ? error->what_without_backtrace() : e.what();
  return message.substr(0, message.find('\n'));
}

/// Collective. Every rank's numbers, in rank order; as many on every rank.
inline std::vector<std::vector<double>> gather_numbers(const zero::Communicator& comm, const std::vector<double>& mine,
                                                       const char* what) {
  std::string bytes(mine.size() * sizeof(double), '\0');
  std::memcpy(bytes.data(), mine.data(), bytes.size());
  std::vector<std::vector<double>> all;
  for (const auto& theirs : comm.exchange(bytes, what)) {
    TORCH_CHECK(theirs.size() == bytes.size(), what, ": ranks have ", theirs.size(), " and ", bytes.size(), " bytes");
    all.emplace_back(mine.size());
    std::memcpy(all.back().data(), theirs.data(), theirs.size());
  }
  return all;
}

/// Collective. Element by element; added in rank order, so every rank has the same bits.
inline std::vector<double> mean_over_ranks(const zero::Communicator& comm, const std::vector<double>& mine, const char* what) {
  std::vector<double> mean(mine.size());
  for (const auto& theirs : gather_numbers(comm, mine, what))
    for (std::size_t i = 0; i < mean.size(); ++i) mean[i] += theirs[i];
  for (double& value : mean) value /= comm.size();
  return mean;
}

/// Collective. Element by element.
inline std::vector<double> max_over_ranks(const zero::Communicator& comm, const std::vector<double>& mine, const char* what) {
  std::vector<double> max = mine;
  for (const auto& theirs : gather_numbers(comm, mine, what))
    for (std::size_t i = 0; i < max.size(); ++i) max[i] = std::max(max[i], theirs[i]);
  return max;
}

/// Collective. Runs `work` here; if it throws on any rank, the first such rank's message is thrown on all of them.
template <typename Work>
void on_every_rank(const zero::Communicator& comm, const char* what, Work&& work) {
  std::string problem;
  try {
    work();
  } catch (const std::exception& e) {
    problem = one_line(e);
    if (problem.empty()) problem = "unknown error";
  }
  const auto all = comm.exchange(problem, what);
  for (std::size_t rank = 0; rank < all.size(); ++rank) {
    if (all[rank].empty()) continue;
    const bool everywhere = std::all_of(all.begin(), all.end(), [&](const std::string& p) { return p == all[rank]; });
    throw std::runtime_error(everywhere ? all[rank] : "rank " + std::to_string(rank) + ": " + all[rank]);
  }
}

}  // namespace gpt
