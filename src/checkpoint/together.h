// Steps of a save or load that may fail on one rank: everybody hears of it before anybody goes on.
#pragma once

#include <c10/util/Exception.h>

#include <exception>
#include <string>
#include <vector>

#include "core/check.h"
#include "zero/communicator.h"

namespace zero::checkpoint {

/// Runs `body`. @returns what it threw, in words, or empty
template <typename Body>
std::string attempt(Body body) {
  try {
    body();
    return {};
  } catch (const c10::Error& e) {
    return e.what_without_backtrace();
  } catch (const std::exception& e) {  // bad_alloc, what a user's serialize() throws
    return e.what();
  }
}

struct Outcome {
  std::string problem;              ///< of the first rank that has one, the same on all; empty: none
  std::vector<std::string> values;  ///< every rank's
};

/// Collective. What each rank has to say, and whether all is well on all.
inline Outcome exchange(const Communicator& comm, const std::string& problem, const std::string& value, const char* what) {
  Outcome out;
  for (auto& message : comm.exchange(problem.empty() ? "+" + value : "-" + problem, what)) {
    const bool good = message.compare(0, 1, "+") == 0;
    message.erase(0, 1);
    if (!good && out.problem.empty())
      out.problem = (comm.size() > 1 ? "rank " + std::to_string(out.values.size()) + ": " : std::string()) + message;
    out.values.push_back(std::move(message));
  }
  return out;
}

/// The same; throws the problem.
inline std::vector<std::string> exchange_or_throw(const Communicator& comm, const std::string& problem,
                                                  const std::string& value, const char* what) {
  auto out = exchange(comm, problem, value, what);
  if (!out.problem.empty()) ZERO_FAIL(out.problem);
  return std::move(out.values);
}

}  // namespace zero::checkpoint
