// What an operator does with the memory of each of its tensors, from its schema.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <cstdint>
#include <vector>

namespace zero {

enum class Access : std::uint8_t {
  looks,       ///< shape, strides, aliases: the memory need not be there (view(), detach_(), ...)
  reads,       ///< reads values
  writes,      ///< reads and writes in place, or writes some of it
  overwrites,  ///< writes all of it whatever was there (zero_, fill_)
};

struct OperatorAccess {
  std::vector<Access> arguments;  ///< by position in the schema; meaningful where the argument holds tensors
  /// In place, element by element, with nothing but scalars or 0-dim tensors besides self (mul_, div_, clamp_, …): it may run on
  /// parts of self one after the other. True for overwrites too.
  bool in_parts = false;
};

/// Thread-safe; computed once per operator.
const OperatorAccess& access_of(const c10::OperatorHandle& op);

}  // namespace zero
