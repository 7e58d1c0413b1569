// The float32 values behind 16-bit parameters, of the part that this rank updates. They begin as zeros: the update starts from the
// parameter wherever it isn't its master's rounding (kernels/float16.h, start_of), so that a first step, an edit through any alias and
// loaded weights are one case.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <unordered_map>

#include "core/parameter.h"
#include "update/flat_state.h"
#include "update/piece.h"

namespace zero {

class MasterWeights {
 public:
  /// Of a piece, in the shape of piece_tensor().
  const at::Tensor& of(const Piece& piece, const Parameter& parameter);
  /// Null before the first step.
  const at::Tensor* find(int parameter) const;
  /// The parameter's values count from now on, each of them.
  void forget(int parameter);
  void forget_all();
  /// As if of() had never been called.
  void drop(int parameter) { masters_.erase(parameter); }
  /// Values for the next of(): the same elements, of a state that was saved.
  void set(int parameter, at::Tensor values) { masters_.insert_or_assign(parameter, std::move(values)); }
  /// Takes in what has been written into a 16-bit parameter: for updates that know masters only.
  static void take_edits(const at::Tensor& master, const at::Tensor& parameter);

  std::int64_t bytes() const;

 private:
  FlatState flat_;
  std::unordered_map<int, at::Tensor> masters_;  ///< by parameter
};

}  // namespace zero
