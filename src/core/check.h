// ZERO_CHECK and its family: the one way in which this library reports an error, a c10::Error whose message names the failed
// expression and the values that were compared. Used by every folder; callers add the rank and what the thing was for.
#pragma once

#include <c10/util/Exception.h>

#include <sstream>
#include <string>
#include <utility>

namespace zero::detail {

/// All parts, streamed one after the other.
template <typename... Parts>
std::string text(const Parts&... parts) {
  std::ostringstream out;
  out.precision(17);
  (void)(out << ... << parts);
  return out.str();
}

/// Throws without the C++ backtrace that c10 would add: these messages are for the user of a trainer.
[[noreturn]] inline void throw_error(const std::string& message) { throw c10::Error(message); }

template <typename A, typename B, typename... Parts>
[[noreturn]] void throw_comparison(const char* expression, const A& a, const B& b, const Parts&... parts) {
  throw_error(text(parts..., sizeof...(parts) > 0 ? " " : "", "(check failed: ", expression, ", with ", a, " and ", b, ")"));
}

}  // namespace zero::detail

/// Throws c10::Error with the streamed parts.
#define ZERO_FAIL(...) ::zero::detail::throw_error(::zero::detail::text(__VA_ARGS__))

/// Throws c10::Error with the streamed parts and the expression unless `condition` holds.
#define ZERO_CHECK(condition, ...)                                               \
  do {                                                                           \
    if (!(condition)) ZERO_FAIL(__VA_ARGS__, " (check failed: " #condition ")"); \
  } while (false)

#define ZERO_CHECK_COMPARE_(op, a, b, ...)                                                                         \
  do {                                                                                                             \
    const auto& zero_a_ = (a);                                                                                     \
    const auto& zero_b_ = (b);                                                                                     \
    if (!(zero_a_ op zero_b_)) ::zero::detail::throw_comparison(#a " " #op " " #b, zero_a_, zero_b_, __VA_ARGS__); \
  } while (false)

/// The same, printing both values.
#define ZERO_CHECK_EQ(a, b, ...) ZERO_CHECK_COMPARE_(==, a, b, __VA_ARGS__)
#define ZERO_CHECK_NE(a, b, ...) ZERO_CHECK_COMPARE_(!=, a, b, __VA_ARGS__)
#define ZERO_CHECK_LE(a, b, ...) ZERO_CHECK_COMPARE_(<=, a, b, __VA_ARGS__)
#define ZERO_CHECK_LT(a, b, ...) ZERO_CHECK_COMPARE_(<, a, b, __VA_ARGS__)
#define ZERO_CHECK_GE(a, b, ...) ZERO_CHECK_COMPARE_(>=, a, b, __VA_ARGS__)
#define ZERO_CHECK_GT(a, b, ...) ZERO_CHECK_COMPARE_(>, a, b, __VA_ARGS__)
