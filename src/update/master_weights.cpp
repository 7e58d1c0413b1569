#include "update/master_weights.h"

#include <ATen/ops/where.h>

namespace zero {

const at::Tensor& MasterWeights::of(const Piece& piece, const Parameter& parameter) {
  auto& master = masters_[piece.parameter];
  flat_.place(0, piece, parameter, master, at::kFloat);
  return master;
}

const at::Tensor* MasterWeights::find(int parameter) const {
  const auto it = masters_.find(parameter);
  return it == masters_.end() || !it->second.defined() ? nullptr : &it->second;
}

void MasterWeights::forget(int parameter) {
  if (const auto it = masters_.find(parameter); it != masters_.end() && it->second.defined()) it->second.zero_();
}

void MasterWeights::forget_all() {
  for (auto& [parameter, master] : masters_) forget(parameter);
}

void MasterWeights::take_edits(const at::Tensor& master, const at::Tensor& parameter) {
  // By bits: NaN differs from NaN otherwise.
  const auto edited = master.to(parameter.scalar_type()).view(at::kShort).ne(parameter.view(at::kShort));
  master.copy_(at::where(edited, parameter.to(at::kFloat), master));
}

std::int64_t MasterWeights::bytes() const {
  std::int64_t sum = 0;
  for (const auto& [parameter, master] : masters_)
    if (master.defined()) sum += static_cast<std::int64_t>(master.nbytes());
  return sum;
}

}  // namespace zero
