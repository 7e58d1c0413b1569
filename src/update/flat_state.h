// Memory of state per element: that of all pieces of a bucket lies in one allocation, in the order of the shard, so that one pass can
// run over many small parameters.
#pragma once

#include <ATen/core/Tensor.h>

#include <map>
#include <tuple>

#include "update/piece.h"

namespace zero {

class FlatState {
 public:
  /// The memory of `kind` (exp_avg, …) for the piece; existing values of `tensor` move there, and to the type.
  void place(int kind, const Piece& piece, const Parameter& parameter, at::Tensor& tensor, at::ScalarType type);

 private:
  std::map<std::tuple<int, int, int>, at::Tensor> flat_;
};

}  // namespace zero
