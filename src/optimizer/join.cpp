// A rank that is out of data does what the others do, without gradients of its own. It learns from each exchange what that is.
#include "zero/join.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>

#include "core/check.h"
#include "optimizer/impl.h"
#include "precision/loss_scaling.h"

namespace zero {

void ZeroOptimizer::Impl::shadow() {
  const at::NoGradGuard no_grad;
  if (gradients->unfinished()) agree_on_gradients();
  joined = true;
  const struct Back {
    bool& joined;
    ~Back() { joined = false; }
  } back{joined};
  for (;;) {
    const Counted counted(comm, pending);
    Facts options_now;
    const auto all = meet(entry_message(call_of(Call::kJoined), options_now));
    const auto first = std::find_if(all.begin(), all.end(), [](const Message& m) { return m.header.call != Call::kJoined; });
    if (first == all.end()) return;
    ZERO_CHECK_EQ(first->header.step, report.number, "Join: a rank that has joined and one that works are at different steps");
    std::vector<std::vector<std::uint8_t>> others;
    for (const auto& m : all)
      if (m.header.call != Call::kJoined) others.push_back(m.flags), others.back().resize(parameters.size(), 0);
    const auto call = first->header.call;
    if (call == Call::kWriteBack) {
      paged->write_back("step " + std::to_string(report.number + 1));
      continue;
    }
    if (call != Call::kRead) gradients->follow(others);
    if (scaling && first->header.unscaled) scaling->unscale();
    if (call == Call::kBackward) {
      ++backwards;
      agreed(all);
      if (std::any_of(all.begin(), all.end(), [](const Message& m) { return m.header.needs_set_up != 0; })) follow_changes(all);
    } else if (call == Call::kRead) {
      (void)agreement(all);
      gradients->gather_for_others(first->header.unit);
    } else if (entered(all, options_now)) {
      if (call == Call::kStep) step_entered();
      if (call == Call::kNorm) reduce_for_norm();
      if (call == Call::kClip) clip_entered(first->header.value);
    }
  }
}

Join::Join(ZeroOptimizer& optimizer) : optimizer_(&optimizer) {
  auto& impl = optimizer.impl();
  ZERO_CHECK(impl.attached() && impl.gradients, "Join: the optimizer has no communicator yet; call attach(comm) first");
  impl.gradients->hold_back(true);
}

Join::~Join() {
  if (optimizer_->impl().gradients) optimizer_->impl().gradients->hold_back(false);
}

std::int64_t Join::wait() {
  auto& impl = optimizer_->impl();
  const auto before = impl.report.number;
  impl.shadow();
  return impl.report.number - before;
}

}  // namespace zero
