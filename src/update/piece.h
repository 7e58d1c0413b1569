// What an update works on: one contiguous run of one parameter, with the averaged gradient of the same run.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>

#include "core/parameter.h"

namespace zero {

struct Piece {
  int parameter = 0;
  int space = 0, bucket = 0;
  std::int64_t in_parameter = 0;  ///< first element
  std::int64_t in_held = 0;       ///< the same, from the start of what this rank updates of the bucket
  std::int64_t held = 0;          ///< elements of the bucket that this rank updates (state is allocated for them together)
  std::int64_t numel = 0;
  void* param = nullptr;
  void* grad = nullptr;  ///< may be this rank's own gradient memory: read only
  at::ScalarType grad_type = at::kFloat;
};

/// A tensor over a piece of state or parameter: in the parameter's own shape if the piece is all of it, else 1-D.
at::Tensor piece_tensor(const Piece& piece, const Parameter& parameter, void* memory, std::shared_ptr<void> keep_alive,
                        at::ScalarType dtype);

}  // namespace zero
