// Segment tables in a device's memory, made once per layout: a step that finds the same segments takes what is there.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <map>
#include <vector>

#include "kernels/cuda/segments.h"

namespace zero {

class SegmentTables {
 public:
  explicit SegmentTables(c10::Device device) : device_(device) {}

  using Key = std::array<int, 3>;  ///< whose table it is: space, bucket, and which part of it

  /// The table of a stretch of `elements` elements with these segments.
  kernels::cuda::SegmentTable of(Key key, const std::vector<kernels::cuda::Segment>& segments, std::int64_t elements);

 private:
  struct Table {
    std::vector<kernels::cuda::Segment> segments;
    std::int64_t elements = -1;
    at::Tensor segments_there, first_there;
  };
  c10::Device device_;
  std::map<Key, Table> tables_;
};

}  // namespace zero
