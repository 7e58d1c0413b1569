#include "paging/fault.h"

#include <ATen/core/List.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "paging/page_table.h"
#include "paging/storage.h"

namespace zero {
namespace {

static_assert(kPagedKey == c10::DispatchKey::TESTING_ONLY_GenericWrapper, "the registration below names the key");

std::atomic<long> g_faults{0};

struct Touched {
  std::shared_ptr<PageOwner> owner;
  std::vector<Touch> touches;
};

Access stronger(Access a, Access b) {
  if (a == b) return a;
  if (a == Access::overwrites || b == Access::overwrites) {
    const auto other = a == Access::overwrites ? b : a;
    return other == Access::looks ? Access::overwrites : Access::writes;
  }
  return std::max(a, b);
}

class Walk {
 public:
  std::vector<Touched> owners;

  void tensor(const at::Tensor& t, Access access) {
    if (access == Access::looks || !t.defined() || !is_paged(t)) return;
    auto found = PageTable::global().find(t.storage().unsafeGetStorageImpl());
    if (!found) return;
    if (access == Access::overwrites && !is_whole(t)) access = Access::writes;  // the rest of the page is still wanted
    for (auto& touched : owners) {
      if (touched.owner != found->owner) continue;
      for (auto& touch : touched.touches)
        if (touch.page == found->page) return void(touch.access = stronger(touch.access, access));
      touched.touches.push_back({found->page, access});
      return;
    }
    owners.push_back({std::move(found->owner), {{found->page, access}}});
  }

  void value(const c10::IValue& value, Access access) {
    if (value.isTensor()) return tensor(value.toTensor(), access);
    if (value.isTensorList()) {
      for (const at::Tensor& t : value.toTensorList()) tensor(t, access);
    } else if (value.isList()) {  // of optional tensors
      for (const c10::IValue& item : value.toListRef())
        if (item.isTensor()) tensor(item.toTensor(), access);
    }
  }

  static bool is_paged(const at::Tensor& t) { return t.key_set().has(kPagedKey) && t.has_storage(); }
  /// All of its page, not a view of a part.
  static bool is_whole(const at::Tensor& t) {
    return t.storage_offset() == 0 && t.is_non_overlapping_and_dense() && t.nbytes() == t.storage().nbytes();
  }
};

// Ends what has begun, in the opposite order, also when something throws.
class Using {
 public:
  Using(std::vector<Touched>& owners, const std::string& op) : owners_(owners) {
    try {
      for (; begun_ < owners_.size(); ++begun_) owners_[begun_].owner->begin(owners_[begun_].touches, op);
    } catch (...) {
      end();
      throw;
    }
  }
  ~Using() { end(); }
  Using(const Using&) = delete;
  Using& operator=(const Using&) = delete;

 private:
  void end() noexcept {
    while (begun_ > 0) {
      --begun_;
      owners_[begun_].owner->end(owners_[begun_].touches);
    }
  }
  std::vector<Touched>& owners_;
  std::size_t begun_ = 0;
};

// self, whole and alone: the one managed argument, first, with nothing but scalars beside it. Whatever would make a difference
// between self and its parts goes the ordinary way: a graph, and the type promotion of a 0-dim self.
bool may_run_in_parts(const OperatorAccess& access, const Walk& walk, c10::ArrayRef<c10::IValue> arguments) {
  if (!access.in_parts || walk.owners.size() != 1 || walk.owners[0].touches.size() != 1 || !arguments[0].isTensor())
    return false;
  const auto& self = arguments[0].toTensor();
  const bool graph = c10::GradMode::is_enabled();
  if (!Walk::is_paged(self) || !Walk::is_whole(self) || (graph && self.requires_grad())) return false;
  for (std::size_t i = 1; i < arguments.size(); ++i) {
    if (!arguments[i].isTensor() || !arguments[i].toTensor().defined()) continue;
    const auto& other = arguments[i].toTensor();
    if (other.dim() != 0 || Walk::is_paged(other) || (graph && other.requires_grad()) ||
        (self.dim() == 0 && other.scalar_type() != self.scalar_type()))
      return false;
  }
  return true;
}

void on_operator(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  g_faults.fetch_add(1, std::memory_order_relaxed);
  const auto count = op.schema().arguments().size();
  const auto& access = access_of(op);
  const auto arguments = torch::jit::last(*stack, count);
  Walk walk;
  for (std::size_t i = 0; i < count; ++i) walk.value(arguments[i], access.arguments[i]);
  const auto below = keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kPagedKey);
  if (walk.owners.empty()) return op.redispatchBoxed(below, stack);
  if (may_run_in_parts(access, walk, arguments)) {
    const auto self = arguments[0].toTensor();
    const auto& owner = walk.owners[0].owner;
    const auto run = [&](const at::Tensor& part) {
      torch::jit::Stack call(arguments.begin(), arguments.end());
      call[0] = part;
      op.callBoxed(call);
    };
    if (owner->edit_in_parts(walk.owners[0].touches[0], run)) {
      torch::jit::drop(*stack, count);
      self.unsafeGetTensorImpl()->bump_version();
      torch::jit::push(*stack, self);
      return;
    }
  }
  const Using in_use(walk.owners, op.schema().name());
  op.redispatchBoxed(below, stack);
}

}  // namespace

long faults_seen() { return g_faults.load(std::memory_order_relaxed); }

}  // namespace zero

TORCH_LIBRARY_IMPL(_, TESTING_ONLY_GenericWrapper, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&zero::on_operator>());
}
