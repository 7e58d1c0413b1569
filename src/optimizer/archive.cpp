// Archives in the wrapped class's own layout, written and read by the wrapped class itself.
#include <torch/serialize/archive.h>

#include "core/check.h"
#include "optimizer/impl.h"

namespace zero {
namespace {

// Lends the groups (and state) to the wrapped object while it saves or loads.
class Lent {
 public:
  Lent(torch::optim::Optimizer& inner, const Groups& groups) : inner_(inner) {
    inner_.param_groups().clear();
    for (const auto& group : groups) inner_.param_groups().push_back(group);
  }
  ~Lent() {
    for (auto& group : inner_.param_groups()) group.params().clear();
  }
  Lent(const Lent&) = delete;
  Lent& operator=(const Lent&) = delete;

 private:
  torch::optim::Optimizer& inner_;
};

}  // namespace

void ZeroOptimizer::save(torch::serialize::OutputArchive& archive) const {
  auto& impl = *impl_;
  ZERO_CHECK(!impl.attached() || impl.replicated(),
             "saving a sharded optimizer: this rank has only its part of the state, and "
             "sharded checkpoints are not there yet. Save at stage 0, or in a world of one");
  auto& state = const_cast<ZeroOptimizer*>(this)->state_;
  const Lent lent(*impl.inner, param_groups_);
  std::swap(impl.inner->state(), state);
  try {
    impl.inner->save(archive);
  } catch (...) {
    std::swap(impl.inner->state(), state);
    throw;
  }
  std::swap(impl.inner->state(), state);
}

void ZeroOptimizer::load(torch::serialize::InputArchive& archive) {
  auto& impl = *impl_;
  {
    const Lent lent(*impl.inner, param_groups_);
    impl.inner->state().clear();
    impl.inner->load(archive);
    for (std::size_t g = 0; g < param_groups_.size(); ++g)
      param_groups_[g].set_options(impl.inner->param_groups()[g].options().clone());
  }
  if (impl.attached()) {
    state_.clear();
    impl.take_state();
  }
}

}  // namespace zero
