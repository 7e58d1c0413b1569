#include "checkpoint/contents.h"

#include <ATen/ops/clone.h>
#include <torch/csrc/autograd/variable.h>

#include <set>

#include "checkpoint/types.h"
#include "core/check.h"
#include "paging/page_table.h"
#include "update/state_fields.h"

namespace zero::checkpoint {

Contents list_contents(const ZeroOptimizer::Impl& impl, const ModelTensors& model) {
  Contents out;
  std::map<const void*, std::string> first_name;
  for (const auto& entry : model.entries()) {
    const auto [it, is_new] = first_name.emplace(entry.tensor.unsafeGetTensorImpl(), entry.name);
    if (!is_new) out.also_called.emplace(entry.name, it->second);
  }
  std::set<const void*> listed;
  for (const auto& p : impl.parameters) {
    const auto* key = p.tensor.unsafeGetTensorImpl();
    const auto named = first_name.find(key);
    const auto& own = p.plain_name.empty() ? p.name : p.plain_name;
    out.names.push_back(!p.active ? std::string() : named != first_name.end() ? named->second : own);
    if (p.active) listed.insert(key);
  }
  std::set<std::string> seen;
  const auto check = [&](const std::string& name) {
    ZERO_CHECK(seen.insert(name).second, "two tensors are called '", name, "'; a checkpoint needs names that differ");
  };
  for (std::size_t i = 0; i < impl.parameters.size(); ++i) {
    if (out.names[i].empty()) continue;
    check(out.names[i]);
    // One that has no place (frozen) is whole on every rank.
    if (!out.placed(impl, i)) out.loose.push_back({"parameter", out.names[i], impl.parameters[i].tensor});
  }
  for (const auto& entry : model.entries()) {
    if (!listed.insert(entry.tensor.unsafeGetTensorImpl()).second) continue;
    check(entry.name);
    out.loose.push_back({entry.buffer ? "buffer" : "parameter", entry.name, entry.tensor});
  }
  return out;
}

Held held_pieces(ZeroOptimizer::Impl& impl, const Contents& contents) {
  Held out;
  const auto& spaces = impl.layout->spaces();
  for (std::size_t s = 0; s < spaces.size(); ++s) {
    for (std::size_t b = 0; b < spaces[s].buckets.size(); ++b) {
      for (const auto& segment : impl.held(static_cast<int>(s), static_cast<int>(b))) {
        const auto& p = impl.parameters[segment.parameter];
        const auto& name = contents.names[segment.parameter];
        if (name.empty()) continue;
        const auto add = [&](const std::string& kind, const std::string& field, const at::Tensor& piece) {
          // A state tensor that is all of its parameter may come with strides of its own (a loaded archive's).
          const auto strides = layout_strides(p.tensor);
          const auto order = [piece, strides] {
            return piece.dim() == static_cast<std::int64_t>(strides.size()) && piece.dim() > 1
                       ? flat_in(piece, strides)
                       : storage_order(piece.detach().contiguous());
          };
          out.pieces.push_back({entry_of(kind, name, field, piece.scalar_type(), p.sizes(), strides), segment.in_parameter,
                                segment.numel, order});
        };
        const auto dtype = static_cast<at::ScalarType>(spaces[s].dtype);
        add("parameter", "",
            tensor_over(impl.residents->memory(static_cast<int>(s), static_cast<int>(b), segment), impl.residents,
                        {segment.numel}, {1}, dtype, impl.device));
        if (const auto* master = impl.masters.find(segment.parameter)) add("master", "", *master);
        const auto state = impl.state->find(p.tensor.unsafeGetTensorImpl());
        if (state == impl.state->end() || !state->second) continue;
        const auto fields = take_apart(impl.kind, *state->second, segment.numel);
        for (const auto& [field, tensor] : fields.tensors) {
          ZERO_CHECK(tensor.numel() == segment.numel, field, " of ", p.name, " has ", tensor.numel(), " elements instead of ",
                     segment.numel);
          add("state", field, tensor);
        }
        auto& scalars = out.states[name];
        for (const auto& [field, value] : fields.values) scalars.emplace(field, to_scalar(value, field + " of " + p.name));
      }
    }
  }
  return out;
}

at::Tensor loose_values(const Loose& loose) {
  const auto t = loose.tensor.detach();
  if (PageTable::global().find(t.storage().unsafeGetStorageImpl())) return storage_order(t.clone(at::MemoryFormat::Contiguous));
  return flat_in(t, layout_strides(t));
}

Quiet::Quiet(ZeroOptimizer::Impl& impl, const std::string& label) : impl_(impl), label_(label), lock_(impl.lock_out_readers()) {
  impl_.residents->begin_update(label_);
  for (std::size_t s = 0; s < impl_.layout->spaces().size(); ++s)
    for (std::size_t b = 0; b < impl_.layout->spaces()[s].buckets.size(); ++b)
      impl_.residents->before_update(static_cast<int>(s), static_cast<int>(b));
}

void Quiet::end_reading() { impl_.residents->end_edit(label_); }

void Quiet::end_writing() {
  for (std::size_t s = 0; s < impl_.layout->spaces().size(); ++s)
    for (std::size_t b = 0; b < impl_.layout->spaces()[s].buckets.size(); ++b)
      impl_.residents->after_update(
          static_cast<int>(s), static_cast<int>(b),
          impl_.context->label("gathering loaded parameters,", impl_.layout->unit(static_cast<int>(s), static_cast<int>(b))));
  impl_.residents->end_edit(label_);
  for (const auto& p : impl_.parameters)
    if (p.active) torch::autograd::impl::bump_version(p.tensor);
}

}  // namespace zero::checkpoint
