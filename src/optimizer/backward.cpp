// What happens between the start of a backward and the step: the ranks agree on what each backward has brought, and on what an
// operator is going to gather.
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <chrono>
#include <map>
#include <mutex>
#include <thread>

#include "core/check.h"
#include "optimizer/impl.h"
#include "zero/no_sync.h"

namespace zero {
namespace {

// The optimizers of one communicator on this rank, in the order in which they were made: the same on every rank. After a backward all
// of them agree, in this order, whichever of them it has brought gradients to: a loss may fill another optimizer's gradients too,
// and not on every rank.
struct Registry {
  std::mutex mutex;
  std::map<const CommunicatorImpl*, std::vector<ZeroOptimizer::Impl*>> of;
};

Registry& registry() {
  static Registry it;
  return it;
}

}  // namespace

void ZeroOptimizer::Impl::connect() {
  const std::lock_guard<std::mutex> lock(registry().mutex);
  auto& all = registry().of[comm.impl().get()];
  if (std::find(all.begin(), all.end(), this) == all.end()) all.push_back(this);
}

void ZeroOptimizer::Impl::disconnect() {
  if (!comm.defined()) return;
  const std::lock_guard<std::mutex> lock(registry().mutex);
  const auto found = registry().of.find(comm.impl().get());
  if (found == registry().of.end()) return;
  auto& all = found->second;
  all.erase(std::remove(all.begin(), all.end(), this), all.end());
  if (all.empty()) registry().of.erase(found);
}

void ZeroOptimizer::Impl::end_of_backward() {
  std::vector<Impl*> all;
  {
    const std::lock_guard<std::mutex> lock(registry().mutex);
    all = registry().of[comm.impl().get()];
  }
  for (auto* optimizer : all)
    if (optimizer->gradients && !optimizer->gradients->deferring() && optimizer->averages()) optimizer->agree_on_gradients();
}

void ZeroOptimizer::Impl::agree_on_gradients() {
  const at::NoGradGuard no_grad;
  const Counted counted(comm, pending);
  ++backwards;
  for (;;) {
    const auto all = meet(gradient_message(Call::kBackward));
    agreed(all);
    if (std::none_of(all.begin(), all.end(), [](const Message& m) { return m.header.needs_set_up != 0; })) return;
    follow_changes(all);
  }
}

// The model has been converted, or parameters have been added or unfrozen: their gradients of this backward lie where LibTorch put
// them, and nobody may take them for averages.
void ZeroOptimizer::Impl::follow_changes(const std::vector<Message>& all) {
  const auto* before = gradients.get();
  std::vector<char> placed(parameters.size()), with_gradient(parameters.size());
  const auto told = agreement(all);
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    placed[i] = layout->slot(static_cast<int>(i)).space >= 0;
    with_gradient[i] = told.any(static_cast<int>(i), kOurs | kForeign);
  }
  const auto keep = gradients;  // its hooks may be on their way
  set_up(with_gradient);
  if (gradients.get() != before) placed.clear();
  placed.resize(parameters.size(), 0);
  gradients->take_new(placed);
}

void ZeroOptimizer::Impl::agreed(const std::vector<Message>& all) {
  reducer->set_kept(false);
  gradients->finish(agreement(all));
}

void ZeroOptimizer::Impl::announce(int unit) {
  if (comm.size() == 1) return;
  const Counted counted(comm, pending);
  Message mine;
  mine.header = call_of(Call::kRead);
  mine.header.unit = unit;
  (void)agreement(meet(mine));  // weights
}

void ZeroOptimizer::Impl::write_back() {
  const at::NoGradGuard no_grad;
  const Counted counted(comm, pending);
  Message mine;
  mine.header = call_of(Call::kWriteBack);
  (void)meet(mine);
  paged->write_back("step " + std::to_string(report.number + 1));
}

void ZeroOptimizer::Impl::reduce_gradients() {
  const at::NoGradGuard no_grad;
  const Counted counted(comm, pending);
  enter(call_of(Call::kReduce));
  gradients->gather_all();
}

namespace {

template <typename Lock>
bool take(Lock& lock, std::chrono::milliseconds timeout) {
#if defined(__SANITIZE_THREAD__)
  // GCC's runtime doesn't see what this calls, pthread_rwlock_clockwrlock, and would report all that it orders.
  const auto end = std::chrono::steady_clock::now() + timeout;
  for (; !lock.try_lock(); std::this_thread::sleep_for(std::chrono::microseconds(100)))
    if (std::chrono::steady_clock::now() > end) return false;
  return true;
#else
  return lock.try_lock_for(timeout);
#endif
}

}  // namespace

std::unique_lock<std::shared_timed_mutex> ZeroOptimizer::Impl::lock_out_readers() {
  std::unique_lock<std::shared_timed_mutex> lock(readers, std::defer_lock);
  const auto timeout = comm.wait_policy().timeout;
  ZERO_CHECK(take(lock, timeout), "step ", report.number + 1, ": a zero::ReadGuard of another thread has been held for ",
             timeout.count(), " ms; a reader has to let go of it between its reads");
  return lock;
}

NoSync::NoSync(ZeroOptimizer& optimizer) : impl_(&optimizer.impl()) {
  ZERO_CHECK(impl_->attached() && impl_->gradients, "NoSync: the optimizer has no communicator yet; call attach(comm) first");
  before_ = impl_->gradients->deferring();
  impl_->gradients->defer(true);
}

NoSync::~NoSync() {
  if (impl_->gradients) impl_->gradients->defer(before_);
}

ReadGuard::ReadGuard(ZeroOptimizer& optimizer) : lock_(optimizer.impl().readers, std::defer_lock) {
  const auto timeout = optimizer.comm().defined() ? optimizer.comm().wait_policy().timeout : WaitPolicy().timeout;
  ZERO_CHECK(take(lock_, timeout), "ReadGuard: step() has been writing parameters for ", timeout.count(),
             " ms; is another rank missing?");
}

}  // namespace zero
