#include "update/flat_state.h"

#include <ATen/ops/zeros.h>

namespace zero {

void FlatState::place(int kind, const Piece& piece, const Parameter& parameter, at::Tensor& tensor, at::ScalarType type) {
  auto& flat = flat_[{piece.space, piece.bucket, kind}];
  if (!flat.defined()) flat = at::zeros({piece.held}, at::TensorOptions().dtype(type).device(parameter.tensor.device()));
  char* memory = static_cast<char*>(flat.data_ptr()) + piece.in_held * static_cast<std::int64_t>(flat.element_size());
  if (tensor.defined() && tensor.data_ptr() == memory) return;
  auto placed = piece_tensor(piece, parameter, memory, std::make_shared<at::Tensor>(flat), type);
  if (tensor.defined())
    placed.copy_(tensor.reshape(placed.sizes()));
  else
    placed.zero_();  // may be memory of a state that was dropped
  tensor = std::move(placed);
}

at::Tensor piece_tensor(const Piece& piece, const Parameter& parameter, void* memory, std::shared_ptr<void> keep_alive,
                        at::ScalarType dtype) {
  const auto& t = parameter.tensor;
  const bool all = piece.numel == t.numel();
  const auto strides = layout_strides(t);
  return all ? tensor_over(memory, std::move(keep_alive), t.sizes(), strides, dtype, t.device())
             : tensor_over(memory, std::move(keep_alive), {piece.numel}, {1}, dtype, t.device());
}

}  // namespace zero
