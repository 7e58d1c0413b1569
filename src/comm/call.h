// What a rank is about to do on a communicator: one record per collective. The ranks show each other these records on entry,
// so that a difference (another collective, another size) is an error that names both, not a hang or wrong numbers.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <string>
#include <type_traits>

#include "kernels/kernels.h"

namespace zero {

enum class Op : std::uint8_t {
  reduce_scatter,
  all_gather,
  all_reduce,
  broadcast,
  exchange,
  barrier,
  allocate,
  split,
  duplicate,
  open_queue,
  queued,
  refuse
};

const char* name_of(Op op);

/// Plain data: it lies in shared memory and travels between nodes.
struct Call {
  Op op = Op::barrier;
  c10::ScalarType dtype = c10::ScalarType::Undefined;
  kernels::DType real = kernels::DType::f32;  ///< how the arithmetic sees it
  std::int32_t item_bytes = 1;                ///< of `real`; 1 where bytes are moved
  std::int32_t root = 0;                      ///< allocate: the Backing
  std::int64_t count = 0;                     ///< of `real`: per slice (reduce_scatter, all_gather) or in all
  double divisor = 1;
  std::int64_t number = 0;   ///< how many collectives this rank has begun on this communicator; queued: the ticket
  std::int64_t staging = 0;  ///< size of a rank's staging memory, which decides how large the chunks are
  std::int64_t window = -1;  ///< the Buffer in which this rank's memory lies, -1: none
  std::int64_t offset = 0;   ///< where in it, in bytes
  char what[104] = {};

  void set_what(const std::string& text);
  std::int64_t bytes() const { return count * item_bytes; }
  /// What has to be equal on all ranks. (Windows may differ; `what` is for people, and compared where the ranks may be far
  /// apart in what they do: in a queue, and in the gathers of stage 3, two operations of one size are easily exchanged.)
  bool agrees_with(const Call& other) const;
};
static_assert(std::is_trivially_copyable_v<Call>);

/// For messages: "reduce_scatter #12 of 5 Float, 'bucket 3'".
std::string describe(const Call& call);

}  // namespace zero
