#include "checkpoint/load.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <torch/csrc/autograd/variable.h>

#include <mutex>
#include <utility>

#include "checkpoint/reader.h"
#include "checkpoint/together.h"
#include "checkpoint/types.h"
#include "core/check.h"
#include "paging/page_table.h"
#include "precision/loss_scaling.h"
#include "update/state_fields.h"
#include "zero/checkpoint.h"

namespace zero {

using namespace checkpoint;

namespace {

// The folder that a user's path stands for.
std::string folder_of(const std::string& path) {
  if (size_of(path + "/" + kManifestName) >= 0) return path;
  const auto newest = latest(path);
  if (!newest) ZERO_FAIL("there is no checkpoint at ", path, is_folder(path) ? "" : " (nor a folder)");
  return *newest;
}

// Writes what fits into the optimizer and the model, on this rank.
class Application {
 public:
  Application(ZeroOptimizer::Impl& impl, const Manifest& manifest, const Contents& contents, const Match& fit, Reader& reader)
      : impl_(impl), manifest_(manifest), contents_(contents), fit_(fit), reader_(reader) {
    for (const auto& t : manifest.tensors)
      if (t.kind == "state") fields_[t.name].push_back(&t);
  }

  void run() {
    const auto& spaces = impl_.layout->spaces();
    for (std::size_t s = 0; s < spaces.size(); ++s)
      for (std::size_t b = 0; b < spaces[s].buckets.size(); ++b)
        for (const auto& segment : impl_.held(static_cast<int>(s), static_cast<int>(b)))
          load(segment, static_cast<int>(s), static_cast<int>(b));
    for (std::size_t i = 0; i < contents_.loose.size(); ++i)
      if (fit_.loose[i] != nullptr) load(contents_.loose[i], *fit_.loose[i]);
  }

 private:
  void load(const Segment& segment, int space, int bucket) {
    const int i = segment.parameter;
    const auto* entry = fit_.parameters[i];
    if (entry == nullptr) return;
    const auto& p = impl_.parameters[i];
    const auto dtype = static_cast<at::ScalarType>(impl_.layout->spaces()[space].dtype);
    reader_.read(*entry, layout_strides(p.tensor), segment.in_parameter, segment.numel,
                 tensor_over(impl_.residents->memory(space, bucket, segment), impl_.residents, {segment.numel}, {1}, dtype,
                             impl_.device));
    if (impl_.precision.has_master(dtype)) {
      const auto* master = manifest_.find("master", entry->name);
      if (master == nullptr || !fit_.optimizer) {
        impl_.masters.forget(i);  // the parameter's values count
      } else {
        const auto* known = impl_.masters.find(i);
        const auto to = known != nullptr ? *known : new_piece(p, segment, at::kFloat);
        read(*master, p, segment, to);
        impl_.masters.set(i, to);
      }
    }
    if (fit_.optimizer) load_state(p, segment, entry->name);
  }

  void load_state(const Parameter& p, const Segment& segment, const std::string& name) {
    auto* key = p.tensor.unsafeGetTensorImpl();
    const auto saved = manifest_.states.find(name);
    if (saved == manifest_.states.end()) {
      impl_.state->erase(key);
      return;
    }
    StateFields known, fields;
    if (const auto it = impl_.state->find(key); it != impl_.state->end() && it->second && impl_.kind != WrappedClass::kOther)
      known = take_apart(impl_.kind, *it->second, segment.numel);
    for (const auto* entry : fields_[name]) {
      auto to = new_piece_like(known, entry->field, p, segment, scalar_type(entry->dtype));
      read(*entry, p, segment, to);
      fields.tensors.emplace_back(entry->field, std::move(to));
    }
    for (const auto& [field, value] : saved->second) fields.values.emplace_back(field, to_ivalue(value));
    (*impl_.state)[key] = put_together(impl_.kind, fields, *impl_.inner, *impl_.groups, p);
  }

  // Where the updater keeps it already, if it does.
  static at::Tensor new_piece_like(const StateFields& known, const std::string& field, const Parameter& p,
                                   const Segment& segment, at::ScalarType type) {
    for (const auto& [name, tensor] : known.tensors)
      if (name == field && tensor.numel() == segment.numel && is_in_order(tensor, p)) return tensor;
    return new_piece(p, segment, type);
  }

  static bool is_in_order(const at::Tensor& piece, const Parameter& p) {
    return piece.dim() <= 1 ? piece.is_contiguous() : piece.strides() == at::IntArrayRef(layout_strides(p.tensor));
  }

  static at::Tensor new_piece(const Parameter& p, const Segment& segment, at::ScalarType type) {
    const auto options = at::TensorOptions().dtype(type).device(p.tensor.device());
    return segment.numel == p.tensor.numel() ? at::empty_strided(p.sizes(), layout_strides(p.tensor), options)
                                             : at::empty({segment.numel}, options);
  }

  void read(const TensorEntry& entry, const Parameter& p, const Segment& segment, const at::Tensor& to) {
    reader_.read(entry, layout_strides(p.tensor), segment.in_parameter, segment.numel, storage_order(to));
  }

  void load(const Loose& loose, const TensorEntry& common) {
    const auto* entry = &common;
    if (manifest_.ranks == impl_.comm.size())  // a buffer of this rank's own
      if (const auto* own = manifest_.find(loose.kind, loose.name, std::to_string(impl_.comm.rank()))) entry = own;
    const auto t = loose.tensor.detach();
    if (is_dense(t) && !PageTable::global().find(t.storage().unsafeGetStorageImpl())) {
      reader_.read(*entry, t.strides(), 0, t.numel(), storage_order(t));
    } else {
      t.copy_(reader_.read_whole(*entry));
    }
    torch::autograd::impl::bump_version(loose.tensor);
  }

  ZeroOptimizer::Impl& impl_;
  const Manifest& manifest_;
  const Contents& contents_;
  const Match& fit_;
  Reader& reader_;
  std::map<std::string, std::vector<const TensorEntry*>> fields_;
};

void set_random(at::Generator generator, const at::Tensor& state) {
  const std::lock_guard<std::mutex> lock(generator.mutex());
  generator.set_state(state);
}

bool load_random(ZeroOptimizer::Impl& impl, const Manifest& manifest, Reader& reader) {
  if (manifest.ranks != impl.comm.size()) return false;
  const auto rank = std::to_string(impl.comm.rank());
  const auto* cpu = manifest.find("random", "cpu", rank);
  if (cpu == nullptr) return false;
  set_random(at::detail::getDefaultCPUGenerator(), reader.read_whole(*cpu));
  if (!impl.device.is_cuda()) return true;
  const auto* cuda = manifest.find("random", "cuda", rank);
  if (cuda != nullptr) set_random(at::globalContext().defaultGenerator(impl.device), reader.read_whole(*cuda));
  return cuda != nullptr;
}

void load_loss_scale(ZeroOptimizer::Impl& impl, const Scalars& saved) {
  if (!impl.scaling || saved.empty()) return;
  const auto integer = [&](const char* name) { return std::get<std::int64_t>(saved.at(name)); };
  impl.scaling->state = {std::get<double>(saved.at("scale")), integer("clean"), static_cast<std::int32_t>(integer("tolerated")),
                         static_cast<std::int32_t>(integer("skipped_in_a_row"))};
  impl.scaling->pending.reset();
}

Extra extra_of(const Manifest& manifest, Reader& reader) {
  Extra out;
  for (const auto& [name, scalar] : manifest.extra)
    std::visit(
        [&, key = name](const auto& x) {
          if constexpr (!std::is_same_v<std::decay_t<decltype(x)>, Blob>) out.emplace(key, x);
        },
        scalar);
  for (const auto& t : manifest.tensors)
    if (t.kind == "extra") out.emplace(t.name, reader.read_whole(t));
  return out;
}

// The options of the groups as they were saved; back to what they were if the class can't read them.
void load_options(ZeroOptimizer::Impl& impl, const Manifest& manifest, Reader& reader) {
  const auto* entry = manifest.find("options", "options");
  ZERO_CHECK(entry != nullptr, "the checkpoint has no options of groups");
  const auto bytes = reader.read_whole(*entry);
  options_from_archive(*impl.inner, *impl.groups,
                       std::string(static_cast<const char*>(bytes.const_data_ptr()), bytes.nbytes()));
}

}  // namespace

Loaded load(const std::string& path, const ModelTensors& model, ZeroOptimizer& optimizer, const LoadOptions& options) {
  auto& impl = optimizer.impl();
  const at::NoGradGuard no_grad;
  const Counted counted(impl.comm, impl.pending);
  wait_for_save(optimizer);
  impl.meet_between_steps(Call::kLoad, "");
  const auto& comm = impl.comm;

  Loaded out;
  auto problem = attempt([&] {
    if (comm.rank() == 0) out.path = folder_of(path);
  });
  out.path = exchange_or_throw(comm, problem, out.path, "zero::load(): which checkpoint")[0];

  Manifest manifest;
  Contents contents;
  Match fit;
  problem = attempt([&] {
    manifest = read_manifest(out.path);
    contents = list_contents(impl, model);
    fit = match(manifest, impl, contents);
    const auto n = fit.differences.size();
    if (options.strict() && n > 0)
      ZERO_FAIL("zero::load(): ", out.path, " doesn't fit: ", fit.differences[0],
                n > 1 ? detail::text(" (and ", n - 1, " more differences)") : "");
  });
  exchange_or_throw(comm, problem, "", "zero::load(): does it fit");
  Reader reader(out.path, manifest);
  exchange_or_throw(comm, attempt([&] { reader.verify_share(comm.rank(), comm.size()); }), "", "zero::load(): checksums");

  // Nothing has been written so far.
  std::vector<std::unique_ptr<torch::optim::OptimizerOptions>> before;
  for (const auto& group : *impl.groups) before.push_back(group.options().clone());
  problem = attempt([&] {
    out.extra = extra_of(manifest, reader);
    if (fit.optimizer) load_options(impl, manifest, reader);
  });
  const auto ready = exchange(comm, problem, "", "zero::load(): options");
  if (!ready.problem.empty()) {
    for (std::size_t g = 0; g < before.size(); ++g) (*impl.groups)[g].set_options(std::move(before[g]));
    ZERO_FAIL(ready.problem);
  }
  Quiet quiet(impl, "zero::load()");
  problem = attempt([&] {
    Application(impl, manifest, contents, fit, reader).run();
    out.random = load_random(impl, manifest, reader);
  });
  quiet.end_writing();
  impl.consolidated.reset();
  exchange_or_throw(comm, problem.empty() ? "" : problem + ". The model and the optimizer are partly loaded", "",
                    "zero::load(): the end");
  if (fit.optimizer) {
    load_loss_scale(impl, manifest.loss_scale);
    impl.report = StepReport{};
    impl.report.number = manifest.step;
  }
  out.step = manifest.step;
  out.skipped = std::move(fit.differences);
  return out;
}

namespace {

const ExtraValue::Variant& value_of(const Loaded& loaded, const std::string& name) {
  const auto it = loaded.extra.find(name);
  if (it == loaded.extra.end()) ZERO_FAIL(loaded.path, " has no extra value '", name, "'");
  return it->second.value();
}

template <typename T>
const T& value_as(const Loaded& loaded, const std::string& name, const char* kind) {
  const auto* value = std::get_if<T>(&value_of(loaded, name));
  if (value == nullptr) ZERO_FAIL("the extra value '", name, "' of ", loaded.path, " is no ", kind);
  return *value;
}

}  // namespace

std::int64_t Loaded::integer(const std::string& name) const { return value_as<std::int64_t>(*this, name, "integer"); }
double Loaded::number(const std::string& name) const {
  const auto* integer = std::get_if<std::int64_t>(&value_of(*this, name));
  return integer != nullptr ? static_cast<double>(*integer) : value_as<double>(*this, name, "number");
}
const std::string& Loaded::text(const std::string& name) const { return value_as<std::string>(*this, name, "text"); }
const at::Tensor& Loaded::tensor(const std::string& name) const { return value_as<at::Tensor>(*this, name, "tensor"); }

}  // namespace zero
