// Names and comparison of collective calls, see call.h.
#include "comm/call.h"

#include <algorithm>
#include <cstring>

#include "core/check.h"

namespace zero {

const char* name_of(Op op) {
  switch (op) {
    case Op::reduce_scatter:
      return "reduce_scatter";
    case Op::all_gather:
      return "all_gather";
    case Op::all_reduce:
      return "all_reduce";
    case Op::broadcast:
      return "broadcast";
    case Op::exchange:
      return "exchange";
    case Op::barrier:
      return "barrier";
    case Op::allocate:
      return "allocate";
    case Op::split:
      return "split";
    case Op::duplicate:
      return "duplicate";
    case Op::open_queue:
      return "open_queue";
    case Op::queued:
      return "queued reduce_scatter";
    case Op::refuse:
      return "a refused call";
  }
  return "unknown call";
}

void Call::set_what(const std::string& text) {
  const auto length = std::min(text.size(), sizeof what - 1);
  std::memcpy(what, text.data(), length);
  what[length] = '\0';
}

bool Call::agrees_with(const Call& other) const {
  return op == other.op && dtype == other.dtype && root == other.root && count == other.count && divisor == other.divisor &&
         number == other.number && ((op != Op::queued && op != Op::all_gather) || std::strcmp(what, other.what) == 0);
}

std::string describe(const Call& call) {
  std::string text = detail::text(name_of(call.op), " #", call.number);
  if (call.op == Op::allocate) text += detail::text(" of ", call.count, " bytes");
  if (call.dtype != c10::ScalarType::Undefined) {
    const auto values = c10::isComplexType(call.dtype) && call.op != Op::all_gather && call.op != Op::broadcast
                            ? call.count / 2
                            : call.count / (call.op == Op::all_gather || call.op == Op::broadcast
                                                ? static_cast<std::int64_t>(c10::elementSize(call.dtype))
                                                : 1);
    text += detail::text(" of ", values, ' ', c10::toString(call.dtype));
  }
  if (call.op == Op::broadcast) text += detail::text(" from rank ", call.root);
  if (call.divisor != 1) text += detail::text(" over ", call.divisor);
  if (call.what[0] != '\0') text += detail::text(", '", call.what, '\'');
  return text;
}

}  // namespace zero
