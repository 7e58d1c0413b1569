// Archives in the wrapped class's own layout, written and read by the wrapped class itself.
#include <ATen/ops/tensor.h>
#include <torch/serialize/archive.h>

#include "core/check.h"
#include "optimizer/impl.h"
#include "precision/loss_scaling.h"

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

// What the wrapped class knows nothing of lies beside its own entries, where plain torch::optim doesn't look.
constexpr const char* kExtras = "zero";

}  // namespace

void ZeroOptimizer::Impl::save_extras(torch::serialize::OutputArchive& archive) const {
  torch::serialize::OutputArchive ours;
  for (std::size_t i = 0; i < parameters.size(); ++i)
    if (const auto* master = whole_master(static_cast<int>(i)))
      ours.write("master" + std::to_string(i), *master, /*is_buffer=*/true);
  if (scaling) {
    const auto& s = scaling->state;
    const double numbers[] = {s.scale, static_cast<double>(s.clean), static_cast<double>(s.tolerated),
                              static_cast<double>(s.skipped_in_a_row)};
    ours.write("loss_scale", at::tensor(at::ArrayRef<double>(numbers), at::kDouble), /*is_buffer=*/true);
  }
  archive.write(kExtras, ours);
}

void ZeroOptimizer::Impl::load_extras(torch::serialize::InputArchive& archive) {
  masters.forget_all();  // a plain archive: the parameters' values count
  torch::serialize::InputArchive ours;
  if (!archive.try_read(kExtras, ours)) return;
  for (std::size_t k = 0; k < parameters.size(); ++k) {
    const int i = static_cast<int>(k);
    at::Tensor whole;
    if (!ours.try_read("master" + std::to_string(k), whole, /*is_buffer=*/true)) continue;
    ZERO_CHECK(whole.numel() == parameters[k].tensor.numel(), "loading an optimizer: the master weights of ",
               parameters[k].name, " have ", whole.numel(), " elements in the archive; the parameter has ",
               parameters[k].tensor.numel());
    const auto mine = held_of(i);
    if (mine.numel > 0 && precision.has_master(parameters[k].tensor.scalar_type()))
      masters.set(i, cut(whole, parameters[k], mine.in_parameter, mine.numel));
  }
  at::Tensor numbers;
  if (!scaling || !ours.try_read("loss_scale", numbers, /*is_buffer=*/true)) return;
  const auto* x = numbers.const_data_ptr<double>();
  auto& s = scaling->state;
  s = {x[0], static_cast<std::int64_t>(x[1]), static_cast<std::int32_t>(x[2]), static_cast<std::int32_t>(x[3])};
}

void ZeroOptimizer::save(torch::serialize::OutputArchive& archive) const {
  auto& impl = *impl_;
  impl.read_step();
  impl.with_whole_state([&](StateMap& state) {
    const Lent lent(*impl.inner, param_groups_);
    std::swap(impl.inner->state(), state);
    try {
      impl.inner->save(archive);
    } catch (...) {
      std::swap(impl.inner->state(), state);
      throw;
    }
    std::swap(impl.inner->state(), state);
  });
  impl.save_extras(archive);
}

void ZeroOptimizer::load(torch::serialize::InputArchive& archive) {
  auto& impl = *impl_;
  impl.read_step();  // what is loaded counts, not what a device comes to know later
  impl.consolidated.reset();
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
    impl.load_extras(archive);
  }
}

}  // namespace zero
