// The whole state of a sharded optimizer on a rank, for archives in torch::optim's own layout.
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/zeros.h>

#include <map>
#include <set>
#include <tuple>

#include "checkpoint/manifest.h"
#include "checkpoint/together.h"
#include "checkpoint/types.h"
#include "core/check.h"
#include "optimizer/impl.h"
#include "update/state_fields.h"

namespace zero {

using namespace checkpoint;

struct Consolidated {
  StateMap state;
  std::map<int, at::Tensor> masters;
};

namespace {

// What is gathered of a bucket in one call: one field, of one type.
using Column = std::tuple<std::string, std::string, std::string>;  // kind, field, dtype

// The parts of states that this rank has, by parameter and column.
struct Parts {
  Manifest manifest;  // named by the parameters' numbers
  std::map<std::pair<int, Column>, at::Tensor> pieces;
};

Parts parts_of(const ZeroOptimizer::Impl& impl) {
  Parts out;
  for (std::size_t k = 0; k < impl.parameters.size(); ++k) {
    const int i = static_cast<int>(k);
    const auto& p = impl.parameters[k];
    const auto mine = impl.held_of(i);
    if (!p.active || mine.numel == 0) continue;
    const auto name = std::to_string(i);
    const auto add = [&](const std::string& kind, const std::string& field, const at::Tensor& piece) {
      auto entry = entry_of(kind, name, field, piece.scalar_type(), p.sizes(), layout_strides(p.tensor));
      out.pieces.emplace(std::pair(i, Column(kind, field, entry.dtype)),
                         piece.dim() > 1 ? flat_in(piece, entry.strides) : storage_order(piece.detach().contiguous()));
      out.manifest.tensors.push_back(std::move(entry));
    };
    if (const auto* master = impl.masters.find(i)) add("master", "", *master);
    const auto state = impl.state->find(p.tensor.unsafeGetTensorImpl());
    if (state == impl.state->end() || !state->second) continue;
    const auto fields = take_apart(impl.kind, *state->second, mine.numel);
    for (const auto& [field, tensor] : fields.tensors) add("state", field, tensor);
    auto& scalars = out.manifest.states[name];
    for (const auto& [field, value] : fields.values) scalars.emplace(field, to_scalar(value, field + " of " + p.name));
  }
  return out;
}

}  // namespace

void ZeroOptimizer::Impl::consolidate(bool keep) {
  const Counted counted(comm, pending);
  meet_between_steps(Call::kConsolidate, "");
  if (replicated()) return;
  Parts mine;
  std::string text;
  const auto problem = attempt([&] { mine = parts_of(*this), text = to_json(mine.manifest); });
  std::vector<Manifest> all;
  for (const auto& one : exchange_or_throw(comm, problem, text, "consolidate_state(): what there is"))
    all.push_back(from_json(one, "a rank's state"));
  const auto whole = merge(all);

  std::map<int, std::set<Column>> columns;  // by unit
  std::set<std::pair<int, Column>> there;
  for (const auto& t : whole.tensors) {
    const int i = std::stoi(t.name);
    const Column column(t.kind, t.field, t.dtype);
    columns[layout->unit_of(i)].insert(column);
    there.emplace(i, column);
  }
  auto made = std::make_shared<Consolidated>();
  std::map<int, StateFields> fields;
  for (const auto& [unit, of_unit] : columns) {
    const auto at = layout->place(unit);
    const auto& bucket = layout->bucket(unit);
    for (const auto& column : of_unit) {
      const auto& [what, field, dtype] = column;
      const auto type = at::TensorOptions().dtype(scalar_type(dtype)).device(device);
      const auto shard = at::zeros({bucket.shard}, type);
      for (const auto& segment : layout->segments(at.space, at.bucket, comm.rank()))
        if (const auto piece = mine.pieces.find({segment.parameter, column}); piece != mine.pieces.end())
          shard.narrow(0, segment.in_shard, segment.numel).copy_(piece->second);
      const auto full = at::empty({bucket.shard * comm.size()}, type);
      comm.all_gather(shard, full, context->label(("gathering " + (field.empty() ? what : field) + ",").c_str(), unit));
      if (!keep) continue;
      for (const int i : bucket.parameters) {
        if (there.count({i, column}) == 0) continue;
        const auto& slot = layout->slot(i);
        auto tensor = at::empty_strided(parameters[i].sizes(), layout_strides(parameters[i].tensor), type);
        storage_order(tensor).copy_(full.narrow(0, slot.offset - bucket.begin, slot.numel));
        if (what == "master") {
          made->masters.emplace(i, std::move(tensor));
        } else {
          fields[i].tensors.emplace_back(field, std::move(tensor));
        }
      }
    }
  }
  if (!keep) return;
  for (const auto& [name, scalars] : whole.states) {
    const int i = std::stoi(name);
    for (const auto& [field, value] : scalars) fields[i].values.emplace_back(field, to_ivalue(value));
    made->state[parameters[i].tensor.unsafeGetTensorImpl()] = put_together(kind, fields[i], *inner, *groups, parameters[i]);
  }
  consolidated = std::move(made);
}

void ZeroOptimizer::Impl::with_whole_state(const std::function<void(StateMap& state)>& body) {
  const bool here = !attached() || replicated();
  ZERO_CHECK(here || consolidated,
             "saving a sharded optimizer: this rank has only its part of the state. Call consolidate_state() before, on every "
             "rank and "
             "after the last step; or write shards with zero::save() (zero/checkpoint.h)");
  body(here ? *state : consolidated->state);
}

const at::Tensor* ZeroOptimizer::Impl::whole_master(int parameter) const {
  if (!attached() || replicated()) return masters.find(parameter);
  const auto it = consolidated->masters.find(parameter);
  return it == consolidated->masters.end() ? nullptr : &it->second;
}

void ZeroOptimizer::consolidate_state(bool keep) {
  const at::NoGradGuard no_grad;
  impl_->consolidate(keep);
}

}  // namespace zero
