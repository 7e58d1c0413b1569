// Whole parameters for raw pointers, the way back to ordinary ones, and each rank's own slices for elementwise work.
#include "zero/gather.h"

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/variable.h>

#include <exception>
#include <numeric>
#include <utility>

#include "core/agreement.h"
#include "core/check.h"
#include "optimizer/impl.h"

namespace zero {
namespace {

std::vector<int> all_parameters(ZeroOptimizer& optimizer) {
  std::vector<int> all(optimizer.impl().parameters.size());
  std::iota(all.begin(), all.end(), 0);
  return all;
}

std::vector<int> indices_of(ZeroOptimizer& optimizer, const std::vector<at::Tensor>& tensors) {
  const auto& parameters = optimizer.impl().parameters;
  std::vector<int> out;
  for (std::size_t t = 0; t < tensors.size(); ++t) {
    std::size_t i = 0;
    while (i < parameters.size() && parameters[i].tensor.unsafeGetTensorImpl() != tensors[t].unsafeGetTensorImpl()) ++i;
    ZERO_CHECK(i < parameters.size(), "GatherGuard: tensor #", t, " is not a parameter of this optimizer");
    out.push_back(static_cast<int>(i));
  }
  return out;
}

}  // namespace

GatherGuard::GatherGuard(ZeroOptimizer& optimizer, const std::vector<int>& indices, int values_of)
    : impl_(&optimizer.impl()), values_of_(values_of), unwinding_(std::uncaught_exceptions()) {
  ZERO_CHECK(impl_->attached() && impl_->residents,
             "GatherGuard: the optimizer has no communicator yet; call attach(comm) first");
  for (const int i : indices)
    if (impl_->parameters[i].active) parameters_.push_back(i);
  ZERO_CHECK(values_of < impl_->comm.size(), "GatherGuard: values_of is ", values_of, ", of ", impl_->comm.size(), " ranks");
  if (impl_->paged) impl_->paged->hold(parameters_);
  open_ = true;
}

GatherGuard::GatherGuard(ZeroOptimizer& optimizer) : GatherGuard(optimizer, all_parameters(optimizer), -1) {}
GatherGuard::GatherGuard(ZeroOptimizer& optimizer, const std::vector<at::Tensor>& parameters)
    : GatherGuard(optimizer, indices_of(optimizer, parameters), -1) {}
GatherGuard::GatherGuard(ZeroOptimizer& optimizer, const std::vector<at::Tensor>& parameters, int values_of)
    : GatherGuard(optimizer, indices_of(optimizer, parameters), values_of) {
  ZERO_CHECK(values_of >= 0, "GatherGuard: values_of is ", values_of);
}

GatherGuard::~GatherGuard() noexcept(false) {
  if (!open_) return;
  if (std::uncaught_exceptions() == unwinding_) {
    close();
    return;
  }
  open_ = false;
  if (impl_->paged) impl_->paged->unhold(parameters_, values_of_ >= 0);
}

void GatherGuard::close() {
  if (!std::exchange(open_, false)) return;
  const struct Unhold {
    GatherGuard& guard;
    ~Unhold() {
      if (guard.impl_->paged) guard.impl_->paged->unhold(guard.parameters_, guard.values_of_ >= 0);
    }
  } unhold{*this};
  if (values_of_ >= 0) impl_->broadcast_whole(parameters_, values_of_);
}

void ZeroOptimizer::Impl::broadcast_whole(const std::vector<int>& indices, int root) {
  const at::NoGradGuard no_grad;
  const Counted counted(comm, pending);
  Message mine;
  mine.header = call_of(Call::kGather);
  mine.header.value = root;
  mine.header.which = hash_bytes(indices.data(), indices.size() * sizeof(int));
  (void)meet(mine);
  for (const int i : indices) {
    const auto& tensor = parameters[i].tensor;
    if (tensor.numel() == 0) continue;
    const bool dense = is_dense(tensor);
    const auto values = dense ? tensor.detach() : tensor.detach().contiguous();
    comm.broadcast(
        tensor_over(values.data_ptr(), nullptr, {static_cast<std::int64_t>(values.nbytes())}, {1}, at::kByte, device), root,
        parameters[i].name);
    if (!dense) tensor.detach().copy_(values);
    torch::autograd::impl::bump_version(tensor);
  }
}

void ZeroOptimizer::unshard() {
  auto& impl = *impl_;
  const at::NoGradGuard no_grad;
  ZERO_CHECK(impl.attached(), "unshard: the optimizer has no communicator yet, so nothing is sharded");
  const Counted counted(impl.comm, impl.pending);
  impl.meet_for(Call::kUnshard, impl.paged ? impl.paged->problem() : std::string());
  if (!impl.paged) return;
  impl.paged->write_back("unshard()");
  impl.paged->leave_all();
}

std::vector<LocalShard> ZeroOptimizer::local_shards() const {
  ZERO_CHECK(impl_->attached(), "local_shards: the optimizer has no communicator yet; call attach(comm) first");
  return impl_->local_shards();
}

std::vector<LocalShard> ZeroOptimizer::Impl::local_shards() const {
  std::vector<LocalShard> out;
  for (std::size_t s = 0; s < layout->spaces().size(); ++s) {
    const auto dtype = static_cast<at::ScalarType>(layout->spaces()[s].dtype);
    for (std::size_t b = 0; b < layout->spaces()[s].buckets.size(); ++b) {
      for (const auto& segment : held(static_cast<int>(s), static_cast<int>(b))) {
        const auto& p = parameters[segment.parameter];
        LocalShard shard;
        shard.name = p.plain_name.empty() ? p.name : p.plain_name;
        shard.parameter = p.tensor;
        shard.group = p.group;
        shard.begin = segment.in_parameter;
        shard.values = tensor_over(residents->memory(static_cast<int>(s), static_cast<int>(b), segment), residents,
                                   {segment.numel}, {1}, dtype, device);
        if (const auto* master = masters.find(segment.parameter)) shard.master = storage_order(*master);
        out.push_back(std::move(shard));
      }
    }
  }
  return out;
}

void ZeroOptimizer::edit_local_shards(const std::function<void(LocalShard&)>& edit) {
  auto& impl = *impl_;
  const at::NoGradGuard no_grad;
  ZERO_CHECK(impl.attached(), "edit_local_shards: the optimizer has no communicator yet; call attach(comm) first");
  const Counted counted(impl.comm, impl.pending);
  impl.meet_for(Call::kEdit, impl.paged ? impl.paged->problem() : std::string());
  const auto writing = impl.lock_out_readers();
  impl.residents->begin_update("edit_local_shards()");
  // What throws on one rank is an error on all, after everybody has what was written.
  std::string problem;
  const auto each_bucket = [&](const auto& action) {
    for (std::size_t s = 0; s < impl.layout->spaces().size(); ++s)
      for (std::size_t b = 0; b < impl.layout->spaces()[s].buckets.size(); ++b)
        action(static_cast<int>(s), static_cast<int>(b));
  };
  each_bucket([&](int s, int b) { impl.residents->before_update(s, b); });
  try {
    for (auto& shard : impl.local_shards()) edit(shard);
  } catch (const c10::Error& e) {
    problem = e.what_without_backtrace();
  } catch (const std::exception& e) {
    problem = e.what();
  } catch (...) {
    problem = "edit_local_shards: an exception that is no std::exception";
  }
  each_bucket([&](int s, int b) {
    impl.residents->after_update(s, b, impl.context->label("gathering edited parameters,", impl.layout->unit(s, b)));
  });
  impl.residents->end_edit("edit_local_shards()");
  for (const auto& p : impl.parameters)
    if (p.active) torch::autograd::impl::bump_version(p.tensor);
  throw_together(impl.comm, problem);
}

}  // namespace zero
