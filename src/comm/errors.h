// The kinds of c10::Error that communicators throw. Users see c10::Error; the kinds decide what becomes of the communicator.
#pragma once

#include <c10/util/Exception.h>

#include <string>

namespace zero {

/// Every rank throws this in the same call (a mismatch, too little room): the ranks are still in step, the communicator works.
struct AgreedError : c10::Error {
  explicit AgreedError(const std::string& message) : c10::Error(message) {}
};

/// A peer failed, left or died: a consequence, not a cause. run_ranks() looks for the cause.
struct PeerFailure : c10::Error {
  PeerFailure(const std::string& message, int peer, std::string reason)
      : c10::Error(message), origin(peer), why(std::move(reason)) {}
  int origin;       ///< the rank where it began
  std::string why;  ///< what happened there: "failed: …", "has died …"
};

}  // namespace zero
