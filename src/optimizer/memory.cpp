// What the optimizer keeps: measured from its tensors, and by formula for any stage and number of ranks.
#include <algorithm>

#include "optimizer/impl.h"

namespace zero {

Memory ZeroOptimizer::Impl::memory() const {
  Memory m;
  if (!attached()) return m;
  m.parameters = residents->parameter_bytes();
  m.gradients = gradients->bytes();
  m.buffers = reducer->bytes() + gradients->buffer_bytes() + residents->buffer_bytes();
  for (const auto& item : *state)
    if (item.second)
      for_each_state_tensor(kind, *item.second,
                            [&](at::Tensor& t) { m.optimizer_state += static_cast<std::int64_t>(t.nbytes()); });
  m.optimizer_state += masters.bytes();
  return m;
}

Memory ZeroOptimizer::Impl::plan(Stage stage, int world_size) const {
  Layout as(world_size, options.bucket_bytes(), options.mapped_shard_bytes());
  std::vector<ParameterSpec> specs;
  std::vector<int> indices;
  Memory m;
  const bool sharded = stage != Stage::kReplicated && world_size > 1;
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const auto& p = parameters[i];
    const bool placed = layout->slot(static_cast<int>(i)).space >= 0;
    if (placed) {
      specs.push_back(p.spec());
      indices.push_back(static_cast<int>(i));
    }
    if (!placed || !sharded) m.parameters += static_cast<std::int64_t>(p.tensor.nbytes());
  }
  as.append(specs, indices);
  const bool shards = stage >= Stage::kGradients && world_size > 1;
  const Layout reduced = precision.gradient_layout(as);
  m.gradients = reduced.padded_bytes() / (shards ? world_size : 1);
  const bool pages = stage >= Stage::kParameters && world_size > 1;
  if (sharded) m.parameters += as.padded_bytes() / (pages ? world_size : 1);
  bool at_once = skips_nonfinite() || options.record_grad_norm();
  for (const auto& space : as.spaces()) {
    const auto type = static_cast<at::ScalarType>(space.dtype);
    const bool is_fused = fused_knows(kind, type), has_master = precision.has_master(type);
    const auto state_bytes = static_cast<std::int64_t>(is_fused     ? c10::elementSize(precision.state(type))
                                                       : has_master ? sizeof(float)
                                                                    : c10::elementSize(type));
    const auto held = sharded ? space.shard : space.size;
    m.optimizer_state += held * state_tensors_per_element(kind, (*groups)[space.group].options()) * state_bytes;
    if (has_master) m.optimizer_state += held * static_cast<std::int64_t>(sizeof(float));
    at_once = at_once || !is_fused;
  }
  const bool averages = world_size > 1 || (options.divisor() != 0 && options.divisor() != 1);
  if (shards) {
    m.buffers = reduced.largest_buckets_bytes(2);
    if (pages)
      m.buffers += std::min(options.memory_budget() > 0 ? options.memory_budget() : default_budget(as), as.padded_bytes());
  } else if (averages) {
    m.buffers = reduced.largest_bucket_bytes() / (stage == Stage::kReplicated ? 1 : world_size);
    if (at_once) m.buffers += reduced.padded_bytes() / world_size;
  }
  return m;
}

}  // namespace zero
