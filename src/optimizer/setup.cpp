// Who takes part: the list of parameters, the check that all ranks have the same, and everything that is made from it.
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <cstring>

#include "core/check.h"
#include "core/memory.h"
#include "optimizer/impl.h"
#include "paging/page_table.h"
#include "precision/loss_scaling.h"
#include "residency/resident_parameters.h"

namespace zero {

ZeroOptimizer::Impl::Impl(std::unique_ptr<torch::optim::Optimizer> wrapped, const Options& user_options)
    : options(user_options), inner(std::move(wrapped)), precision(user_options) {
  if (options.module() != nullptr) read_module(*options.module(), names, module_buffers);
}

ZeroOptimizer::Impl::~Impl() {
  disconnect();
  if (scaling) scaling->leave_optimizer();
}

double ZeroOptimizer::Impl::divisor() const {
  if (options.divisor() != 0) return options.divisor();
  return options.reduction() == Reduction::kMean ? comm.size() : 1;
}

std::vector<Segment> ZeroOptimizer::Impl::held(int space, int bucket) const {
  return replicated() ? layout->whole(space, bucket) : layout->segments(space, bucket, comm.rank());
}

Segment ZeroOptimizer::Impl::held_of(int parameter) const {
  const auto& slot = layout->slot(parameter);
  if (slot.space >= 0)
    for (const auto& segment : held(slot.space, slot.bucket))
      if (segment.parameter == parameter) return segment;
  return {};
}

bool ZeroOptimizer::Impl::needs_set_up() const {
  if (layout == nullptr) return true;
  std::size_t count = 0, active = 0;
  bool same = true;
  // Parameters are in group order unless groups have grown; then the slow comparison in follow() sorts it out, once.
  std::unordered_map<const void*, const Parameter*> by_tensor;
  for (const auto& p : parameters) {
    active += p.active;
    if (p.active) by_tensor.emplace(p.tensor.unsafeGetTensorImpl(), &p);
  }
  for (std::size_t g = 0; g < groups->size(); ++g) {
    for (const auto& t : (*groups)[g].params()) {
      ++count;
      const auto it = t.defined() ? by_tensor.find(t.unsafeGetTensorImpl()) : by_tensor.end();
      same = same && it != by_tensor.end() && it->second->group == static_cast<int>(g);
    }
  }
  if (!same || count != active) return true;
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const auto& p = parameters[i];
    if (!p.active) continue;
    ZERO_CHECK(p.tensor.sizes() == p.sizes(), p.name, " has shape ", p.tensor.sizes(), " now, but was registered with ",
               p.sizes(), "; make a new optimizer for a model that changes its shape");
    const auto& slot = layout->slot(static_cast<int>(i));
    if (slot.space < 0 && (p.tensor.requires_grad() || p.tensor.grad().defined())) return true;
    if (slot.space >= 0 && layout->spaces()[slot.space].dtype != static_cast<int>(p.tensor.scalar_type())) return true;
  }
  return false;
}

Facts ZeroOptimizer::Impl::facts() const {
  Facts out;
  out.emplace_back("the wrapped class", wrapped_name);
  out.emplace_back("Options::stage", std::to_string(static_cast<int>(options.stage())));
  out.emplace_back("Options::bucket_bytes", std::to_string(options.bucket_bytes()));
  out.emplace_back("Options::mapped_shard_bytes", std::to_string(options.mapped_shard_bytes()));
  out.emplace_back("Options::master_weights", !options.master_weights()   ? "not set"
                                              : *options.master_weights() ? "true"
                                                                          : "false");
  out.emplace_back("Options::reduce_dtype", options.reduce_dtype() ? c10::toString(*options.reduce_dtype()) : "not set");
  out.emplace_back("Options::state_dtype", c10::toString(options.state_dtype()));
  out.emplace_back("Options::reduction", std::to_string(static_cast<int>(options.reduction())));
  out.emplace_back("the divisor of gradients", std::to_string(divisor()));
  out.emplace_back("Options::gathered_gradient_bytes", std::to_string(options.gathered_gradient_bytes()));
  if (options.stage() == Stage::kParameters) {
    out.emplace_back("Options::memory_budget", std::to_string(options.memory_budget()));
    out.emplace_back("Options::debug", options.debug() ? "true" : "false");
    out.emplace_back("Options::exceed_budget", options.exceed_budget() ? "true" : "false");
  }
  out.emplace_back("Options::skip_nonfinite", options.skip_nonfinite() ? "true" : "false");
  out.emplace_back("Options::max_grad_norm", std::to_string(options.max_grad_norm()));
  out.emplace_back("Options::record_grad_norm", options.record_grad_norm() ? "true" : "false");
  out.emplace_back("Options::broadcast_parameters", options.broadcast_parameters() ? "true" : "false");
  for (const auto& p : parameters) {
    if (!p.active) continue;
    out.emplace_back("shape of " + p.name, to_string(p.tensor.sizes()));
    out.emplace_back("type of " + p.name, c10::toString(p.tensor.scalar_type()));
    out.emplace_back("requires_grad of " + p.name, p.tensor.requires_grad() ? "true" : "false");
    if (is_dense(p.tensor) && !p.tensor.is_contiguous())
      out.emplace_back("strides of " + p.name, to_string(p.tensor.strides()));
  }
  out.emplace_back("number of parameters", std::to_string(parameters.size()));
  out.emplace_back("number of groups", std::to_string(groups->size()));
  for (std::size_t g = 0; g < groups->size(); ++g)
    for (auto& fact : describe_options(kind, (*groups)[g].options(), "group " + std::to_string(g)))
      out.push_back(std::move(fact));
  for (std::size_t i = 0; i < module_buffers.size(); ++i)
    out.emplace_back("shape of buffer #" + std::to_string(i), to_string(module_buffers[i].sizes()));
  return out;
}

// Matches the groups' tensors with the parameters that are known: the same tensor, one that takes another's place, or a new one.
void ZeroOptimizer::Impl::follow() {
  const auto& given = options.names();
  auto listed = list_parameters(*groups, [&](const at::Tensor& t, std::size_t n) -> std::string {
    if (t.defined())
      if (auto it = names.find(t.unsafeGetTensorImpl()); it != names.end()) return it->second;
    return n < given.size() ? given[n] : std::string();
  });
  std::unordered_map<const void*, std::size_t> known;
  for (std::size_t i = 0; i < parameters.size(); ++i) known.emplace(parameters[i].tensor.unsafeGetTensorImpl(), i);
  std::vector<char> still(parameters.size(), 0);
  for (const auto& p : listed)
    if (auto it = known.find(p.tensor.unsafeGetTensorImpl()); it != known.end()) still[it->second] = 1;

  const std::size_t before = parameters.size();
  for (auto& p : listed) {
    if (auto it = known.find(p.tensor.unsafeGetTensorImpl()); it != known.end()) {
      auto& old = parameters[it->second];
      ZERO_CHECK(old.group == p.group, old.name, " has moved to group ", p.group,
                 "; make a new optimizer to regroup parameters");
      old.index = p.index;
      old.active = true;
      continue;
    }
    const auto gone = std::find_if(parameters.begin(), parameters.begin() + before, [&](const Parameter& old) {
      return old.group == p.group && old.index == p.index && !still[&old - parameters.data()];
    });
    if (gone == parameters.begin() + before) {
      parameters.push_back(std::move(p));
      continue;
    }
    ZERO_CHECK(gone->sizes() == p.sizes() && gone->tensor.scalar_type() == p.tensor.scalar_type(), gone->name,
               " was replaced by a tensor of shape ", p.sizes(), " and type ", p.tensor.scalar_type(), "; it has shape ",
               gone->sizes(), " and type ", gone->tensor.scalar_type(), ", and only a tensor like it can take its place");
    const int index = static_cast<int>(gone - parameters.begin());
    gradients->leave(index);
    residents->leave(index);
    still[index] = 1;
    gone->tensor = p.tensor;
  }
  for (std::size_t i = 0; i < before; ++i) {
    if (parameters[i].active && !still[i]) residents->leave(static_cast<int>(i));
    parameters[i].active = still[i] != 0;
  }
}

void ZeroOptimizer::Impl::place(const std::vector<char>& with_gradient) {
  std::vector<ParameterSpec> specs;
  std::vector<int> indices;
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const auto& p = parameters[i];
    const bool wanted = p.tensor.requires_grad() || (i < with_gradient.size() && with_gradient[i]);
    if (!p.active || !wanted || layout->slot(static_cast<int>(i)).space >= 0) continue;
    specs.push_back(p.spec());
    indices.push_back(static_cast<int>(i));
  }
  layout->append(specs, indices);
  *gradient_layout = precision.gradient_layout(*layout);
}

void ZeroOptimizer::Impl::take_state() {
  // What the wrapped object knows already (Adagrad's accumulators, a state that was loaded or trained before wrapping).
  auto& theirs = inner->state();
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    auto it = theirs.find(parameters[i].tensor.unsafeGetTensorImpl());
    // A frozen parameter's waits for the day it learns (Adagrad makes accumulators for all when it is constructed).
    if (it == theirs.end() || layout->slot(static_cast<int>(i)).space < 0) continue;
    const auto mine = held_of(static_cast<int>(i));
    // The constructor has rounded it to 16 bits: it is made anew in float32, with the master.
    const bool rounded =
        it->second && precision.has_master(parameters[i].tensor.scalar_type()) && is_initial(kind, *it->second);
    if (mine.numel > 0 && it->second && !rounded) {
      cut_state(kind, *it->second, parameters[i], mine.in_parameter, mine.numel);
      (*state)[it->first] = std::move(it->second);
    }
    theirs.erase(it);
  }
}

void ZeroOptimizer::Impl::broadcast(std::size_t first_parameter, std::size_t first_space,
                                    const std::function<void(int parameter)>& sent) {
  if (comm.size() == 1 || !options.broadcast_parameters()) return;
  const at::NoGradGuard no_grad;
  // Through an arena of gradients, which holds none yet, rather than through staging that the communicator would have to keep.
  const auto scratch = gradients->scratch(first_space);
  auto send = [&](const at::Tensor& t, const std::string& name) {
    const auto whole = is_dense(t) ? t.detach() : t.detach().contiguous();
    auto* bytes = static_cast<char*>(whole.data_ptr());
    const auto count = static_cast<std::int64_t>(whole.nbytes());
    for (std::int64_t at = 0; at < count;) {
      const auto chunk = scratch.numel() > 0 ? std::min(scratch.numel(), count - at) : count - at;
      if (scratch.numel() > 0) {
        const auto part = scratch.narrow(0, 0, chunk);
        copy_bytes(part.data_ptr(), bytes + at, chunk, device);
        comm.broadcast(part, 0, name);
        copy_bytes(bytes + at, part.data_ptr(), chunk, device);
      } else {
        comm.broadcast(tensor_over(bytes + at, nullptr, {chunk}, {1}, at::kByte, device), 0, name);
      }
      at += chunk;
    }
    if (!is_dense(t)) t.detach().copy_(whole);
    torch::autograd::impl::bump_version(t);
  };
  for (std::size_t i = first_parameter; i < parameters.size(); ++i) {
    send(parameters[i].tensor, parameters[i].name);
    sent(static_cast<int>(i));
  }
  if (first_parameter == 0)
    for (std::size_t i = 0; i < module_buffers.size(); ++i) send(module_buffers[i], "buffer #" + std::to_string(i));
  scratch.zero_();  // padding must be zero
}

// A parameter's memory can come and go for one optimizer only.
void ZeroOptimizer::Impl::check_not_paged() const {
  std::unordered_map<const void*, const Parameter*> owners;
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const auto& p = parameters[i];
    if (!p.active || (paged && paged->manages(static_cast<int>(i)))) continue;
    const auto* storage = p.tensor.storage().unsafeGetStorageImpl();
    ZERO_CHECK(
        !PageTable::global().find(storage), p.name,
        " is sharded by another optimizer at stage 3 (or shares its memory with a parameter that is); call its unshard() "
        "first, or destroy it after that");
    if (options.stage() != Stage::kParameters || comm.size() == 1 || !owns_storage(p.tensor)) continue;
    const auto [other, is_new] = owners.emplace(storage, &p);
    ZERO_CHECK(is_new, p.name, " shares its memory with ", other->second->name,
               "; at stage 3 give the optimizer one of them, and let the modules use the same tensor");
  }
}

// On which device all parameters are, and the communicator works.
void ZeroOptimizer::Impl::check_device() {
  for (const auto& p : parameters) {
    if (!p.active) continue;
    const auto there = p.tensor.device();
    ZERO_CHECK(there == comm.device(), p.name, " is on ", there, ", but the communicator (", comm.backend(), ") works on ",
               comm.device(),
               there.is_cpu()
                   ? "; move the model there before the optimizer is made"
                   : "; for parameters on a GPU take zero::make_nccl_communicator(), or zero::make_staged_communicator() "
                     "where several ranks share one");
    ZERO_CHECK(layout == nullptr || there == device, p.name, " has moved from ", device, " to ", there,
               "; move the model before the optimizer is made");
    device = there;
  }
}

void ZeroOptimizer::Impl::start_over() {
  if (gradients) gradients->end_of_life();
  if (residents) residents->leave_all();
  reducer.reset(), residents.reset(), paged.reset(), gradients.reset(), context.reset(), layout.reset(), fused.reset(),
      elementwise.reset(), device_step.reset();
  gradient_layout.reset();
  masters = MasterWeights();
  parameters.clear();
}

void ZeroOptimizer::Impl::make_parts() {
  layout = std::make_unique<Layout>(comm.size(), options.bucket_bytes(), options.mapped_shard_bytes());
  division.by = divisor();
  division.late = weighted();
  gradient_layout = std::make_unique<Layout>(precision.gradient_layout(*layout));
  context = std::make_unique<GradientContext>(
      GradientContext{comm, parameters, *gradient_layout, *layout, division, report.number, device});
  Gradients::Settings settings;
  settings.sharded = options.stage() >= Stage::kGradients && comm.size() > 1;
  settings.paged = averages();
  settings.refuse_graphs = options.stage() != Stage::kReplicated;
  settings.budget = options.gathered_gradient_bytes();
  Gradients::Callbacks callbacks;
  callbacks.ended = [this] { end_of_backward(); };
  callbacks.agree = [this] { agree_on_gradients(); };
  callbacks.announce = [this](int unit) { announce(unit); };
  callbacks.counted = [this](const std::function<void()>& body) {
    const Counted counted(comm, pending);
    body();
  };
  gradients = std::make_shared<Gradients>(*context, settings, std::move(callbacks));
  reducer = std::make_unique<Reducer>(*context, *gradients, options.stage() == Stage::kReplicated);
  if (options.stage() == Stage::kParameters && !replicated()) {
    PagedParameters::Settings paging;
    paging.budget = options.memory_budget();
    paging.prefetch = options.prefetch();
    paging.mapped_shard_bytes = options.mapped_shard_bytes();
    using Beyond = PagedParameters::Settings::Beyond;
    paging.beyond = options.memory_budget() == 0 ? Beyond::allowed : options.exceed_budget() ? Beyond::warned : Beyond::refused;
    paging.debug = options.debug();
    PagedParameters::Callbacks paged_callbacks;
    paged_callbacks.write_back = [this] { write_back(); };
    paged_callbacks.when = [this] { return "step " + std::to_string(report.number + 1); };
    paged_callbacks.label = [this](int unit) { return context->label("gathering parameters,", unit); };
    paged = std::make_shared<PagedParameters>(comm, parameters, *layout, paging, std::move(paged_callbacks));
    residents = paged;
  } else {
    residents = std::make_shared<ResidentParameters>(comm, parameters, *layout, !replicated());
  }
  device_step.reset();
  if (fused_knows(kind, at::kFloat))
    if (auto launcher = make_launcher(device))
      device_step = std::make_unique<DeviceStep>(kind, masters, device, std::move(launcher));
  const UpdateContext update{kind, parameters, precision, masters, device_step.get()};
  fused = make_fused_updater(update);
  elementwise = make_elementwise_updater(update, *inner);
}

bool ZeroOptimizer::Impl::anywhere(bool here) const {
  const auto all = comm.exchange(here ? "1" : "0", "setting up");
  return std::any_of(all.begin(), all.end(), [](const std::string& there) { return there == "1"; });
}

void ZeroOptimizer::Impl::set_up(const std::vector<char>& with_gradient) {
  read_step();
  if (paged) paged->pause();  // its thread looks at what is going to change
  const bool first = !was_set_up;
  const std::size_t known = parameters.size();
  // Of any rank: one that owns nothing has none after a hundred steps, and has to decide like the others.
  const bool stateful = !first && anywhere(!state->empty());
  std::string problem;
  try {
    if (first) {
      ZERO_CHECK(inner != nullptr, "zero::wrap: the optimizer to wrap is null");
      kind = classify(*inner);
      wrapped_name = class_name(*inner);
      check_wrappable(*inner, options.elementwise());
      const auto wrong = precision_problem(options);
      ZERO_CHECK(wrong.empty(), wrong);
    }
    bool converted = false;
    for (std::size_t i = 0; i < parameters.size() && layout != nullptr; ++i) {
      const auto& slot = layout->slot(static_cast<int>(i));
      if (slot.space < 0 || layout->spaces()[slot.space].dtype == static_cast<int>(parameters[i].tensor.scalar_type()))
        continue;
      ZERO_CHECK(
          !stateful, parameters[i].name, " was converted to ", parameters[i].tensor.scalar_type(),
          " after the first step, but its optimizer state is of another type; convert the model before training, or make a "
          "new optimizer");
      converted = true;
    }
    if (converted) start_over();  // nothing has been learned yet
    follow();
    for (const auto& p : parameters) {
      const auto wrong = p.active ? precision.problem(kind, p.tensor.scalar_type()) : std::string();
      ZERO_CHECK(wrong.empty(), p.name, ": ", wrong);
    }
    check_not_paged();
    check_device();
    ZERO_CHECK(
        kind != WrappedClass::kOther || inner->state().empty() || replicated(), "a ", wrapped_name,
        " that has made steps already can't be sharded: this library doesn't know the layout of its state. Wrap it before its "
        "first step");
  } catch (const c10::Error& e) {
    problem = e.what_without_backtrace();
  }
  try {
    throw_together(comm, problem);
    agree(comm, facts(), "the ranks don't have the same optimizer");
  } catch (const c10::Error&) {
    // Some ranks may have followed a change already. Without state all can begin again when it has been made good.
    if (!first && !stateful) start_over();
    throw;
  }

  const bool anew = layout == nullptr;
  if (anew) make_parts();
  const std::size_t known_spaces = layout->spaces().size();
  place(with_gradient);
  gradients->allocate();
  reducer->allocate();
  residents->allocate();
  if (paged) paged->fence("step " + std::to_string(report.number + 1) + ": setting up");
  const auto adopt = [this](int parameter) {
    if (parameters[parameter].active) residents->adopt(parameter);
  };
  // Each as soon as it has come: what is sharded needs its memory no more.
  broadcast(anew && first ? 0 : (anew ? parameters.size() : known), known_spaces, adopt);
  for (std::size_t i = 0; i < parameters.size(); ++i) adopt(static_cast<int>(i));
  residents->ready();
  gradients->watch();
  take_state();
  connect();
  was_set_up = true;
}

}  // namespace zero
