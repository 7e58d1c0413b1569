#include "optimizer/meeting.h"

#include <algorithm>
#include <cstring>

#include "core/check.h"
#include "optimizer/impl.h"
#include "precision/loss_scaling.h"

namespace zero {

std::string Message::pack() const {
  auto packed_header = header;
  packed_header.parameters = flags.size();
  packed_header.order = static_cast<std::int64_t>(order.size());
  std::string out(reinterpret_cast<const char*>(&packed_header), sizeof packed_header);
  out.append(reinterpret_cast<const char*>(flags.data()), flags.size());
  out.append(reinterpret_cast<const char*>(order.data()), order.size() * sizeof(std::int32_t));
  return out + problem;
}

Message Message::unpack(const std::string& packed) {
  Message m;
  std::memcpy(&m.header, packed.data(), sizeof m.header);
  const auto* at = packed.data() + sizeof m.header;
  m.flags.assign(at, at + m.header.parameters);
  at += m.header.parameters;
  m.order.resize(static_cast<std::size_t>(m.header.order));
  // memcpy may not be given the null pointer of an empty vector, not even for no bytes.
  if (!m.order.empty()) std::memcpy(m.order.data(), at, m.order.size() * sizeof(std::int32_t));
  at += m.order.size() * sizeof(std::int32_t);
  m.problem.assign(at, packed.data() + packed.size());
  return m;
}

// What a scope within has counted already isn't counted again.
Counted::Counted(const Communicator& comm, StepReport& report)
    : comm_(comm),
      report_(report),
      start_(comm.defined() ? comm.traffic() : Traffic{}),
      data_before_(report.bytes_sent),
      control_before_(report.control_bytes) {}

Counted::~Counted() {
  if (!comm_.defined()) return;
  const auto now = comm_.traffic();
  report_.bytes_sent = data_before_ + now.data_bytes - start_.data_bytes;
  report_.control_bytes = control_before_ + now.control_bytes - start_.control_bytes;
}

namespace {

const char* name_of(Call call) {
  switch (call) {
    case Call::kStep:
      return "step()";
    case Call::kNorm:
      return "grad_norm()";
    case Call::kClip:
      return "clip_grad_norm_()";
    case Call::kBackward:
      return "the end of a backward";
    case Call::kRead:
      return "an operator that reads a gradient";
    case Call::kReduce:
      return "reduce_gradients()";
    case Call::kWriteBack:
      return "an operator on parameters, after edits that don't fit the budget";
    case Call::kGather:
      return "the end of a zero::GatherGuard for writing";
    case Call::kUnshard:
      return "unshard()";
    case Call::kEdit:
      return "edit_local_shards()";
    case Call::kSave:
      return "zero::save()";
    case Call::kLoad:
      return "zero::load()";
    case Call::kExport:
      return "zero::export_model()";
    case Call::kConsolidate:
      return "consolidate_state()";
    case Call::kJoined:
      return "Join (out of data)";
  }
  return "?";
}

}  // namespace

std::string ZeroOptimizer::Impl::where(const Header& header) const {
  std::string out = std::string(name_of(header.call)) + ", step " + std::to_string(header.step + 1);
  if (header.call == Call::kBackward) out += ", backward " + std::to_string(header.backwards);
  if (header.call == Call::kRead && header.unit >= 0 && header.unit < layout->units())
    out += ", from " + context->name(header.unit);
  return out;
}

Header ZeroOptimizer::Impl::call_of(Call call) const {
  Header header;
  header.call = call;
  header.step = report.number;
  header.backwards = backwards;
  header.weight = weight;
  if (gradients) header.edited = gradients->edited();
  header.scaled = scaling && scaling->scaled;
  header.unscaled = scaling && scaling->unscaled;
  return header;
}

std::vector<Message> ZeroOptimizer::Impl::meet(const Message& mine) {
  std::vector<Message> all;
  for (const auto& packed : comm.exchange(mine.pack(), where(mine.header))) all.push_back(Message::unpack(packed));
  if (gradients) gradients->forget_edited();
  check(all);
  if (gradients && !joined)
    gradients->forbid_edits(
        std::any_of(all.begin(), all.end(), [](const Message& m) { return m.header.call == Call::kJoined; }));
  return all;
}

void ZeroOptimizer::Impl::meet_for(Call call, const std::string& problem) {
  Message mine;
  mine.header = call_of(call);
  mine.problem = problem;
  const auto all = meet(mine);
  ZERO_CHECK(std::none_of(all.begin(), all.end(), [](const Message& m) { return m.header.call == Call::kJoined; }),
             name_of(call), ": a rank that is out of data (Join) could not follow");
}

void ZeroOptimizer::Impl::meet_between_steps(Call call, const std::string& problem) {
  ZERO_CHECK(attached(), name_of(call), ": the optimizer has no communicator yet; call attach(comm) first, on every rank");
  read_step();  // what a device has counted is a part of the state
  Message mine;
  mine.header = call_of(call);
  mine.problem = problem;
  try {
    if (mine.problem.empty()) mine.header.needs_set_up = needs_set_up();
    if (paged && mine.problem.empty()) mine.problem = paged->problem();
    if (mine.problem.empty() && !mine.header.needs_set_up)
      for (std::size_t i = 0; i < parameters.size(); ++i)
        if (parameters[i].active && residents->moved(static_cast<int>(i))) mine.header.moved = 1;
  } catch (const c10::Error& e) {
    mine.problem = e.what_without_backtrace();
  }
  const auto all = meet(mine);
  for (const auto& m : all)
    ZERO_CHECK(m.header.call != Call::kJoined, name_of(call), ": a rank that is out of data (Join) could not follow");
  const auto any = [&](auto member) {
    return std::any_of(all.begin(), all.end(), [&](const Message& m) { return m.header.*member != 0; });
  };
  if (any(&Header::needs_set_up)) set_up({});
  if (any(&Header::moved) && paged) paged->leave_moved(name_of(call));
  forget_replaced_masters();
}

void ZeroOptimizer::Impl::check(const std::vector<Message>& all) const {
  for (std::size_t r = 0; r < all.size(); ++r)
    if (!all[r].problem.empty()) ZERO_FAIL(comm.size() > 1 ? detail::text("rank ", r, ": ") : std::string(), all[r].problem);
  std::size_t first = all.size();
  for (std::size_t r = 0; r < all.size(); ++r) {
    if (all[r].header.call == Call::kJoined) continue;
    if (first == all.size()) first = r;
    const auto &a = all[first].header, &b = all[r].header;
    if (a.call != b.call || a.step != b.step || a.unit != b.unit || (a.call == Call::kBackward && a.backwards != b.backwards) ||
        a.value != b.value || a.which != b.which) {
      ZERO_FAIL("the ranks are at different calls: rank ", first, " is in ", where(a), "; rank ", r, " is in ", where(b),
                ". Every rank has to make the same calls of backward(), of operators on gradients and of step()");
    }
    ZERO_CHECK(a.unscaled == b.unscaled, "before ", where(b), ": LossScaler::unscale() was called on rank ",
               a.unscaled ? first : r, " and not on rank ", a.unscaled ? r : first);
    ZERO_CHECK(
        a.edited == b.edited, "before ", where(b), ": rank ", first, " and rank ", r,
        " have edited gradients in place differently. Every rank has to make the same edits, of the same gradients: each "
        "applies them to the part of the average that it keeps");
  }
}

Message ZeroOptimizer::Impl::gradient_message(Call call) {
  Message mine;
  mine.header = call_of(call);
  try {
    mine.header.needs_set_up = needs_set_up();
    if (!mine.header.needs_set_up) mine.problem = gradients->problem();
    gradients->prepare();
    mine.flags = gradients->flags();
    mine.header.under_way = gradients->under_way();
    if (comm.rank() == 0)
      for (const int unit : gradients->completion_order()) mine.order.push_back(unit);
  } catch (const c10::Error& e) {
    mine.problem = e.what_without_backtrace();
  }
  mine.flags.resize(parameters.size(), 0);
  return mine;
}

GradientAgreement ZeroOptimizer::Impl::agreement(const std::vector<Message>& all) {
  GradientAgreement agreed;
  double total = 0;
  for (const auto& m : all) {
    agreed.flags.push_back(m.flags);
    agreed.flags.back().resize(parameters.size(), 0);
    if (m.header.call == Call::kJoined)  // it follows the others
      for (auto& flags : agreed.flags.back()) flags &= kAveraged;
    agreed.under_way = std::max(agreed.under_way, m.header.under_way);
    total += m.header.weight;
  }
  agreed.order.assign(all[0].order.begin(), all[0].order.end());
  // Nothing has been seen anywhere: the sum is zero, whatever it is divided by.
  if (weighted()) division.by = total > 0 ? total : 1;
  return agreed;
}

Message ZeroOptimizer::Impl::entry_message(const Header& call, Facts& options_now) {
  Message mine;
  mine.header = call;
  try {
    mine.header.needs_set_up = needs_set_up();
    if (!mine.header.needs_set_up) {
      for (std::size_t i = 0; i < parameters.size(); ++i)
        if (parameters[i].active && residents->moved(static_cast<int>(i))) mine.header.moved = 1;
      gradients->watch();
      mine.header.unchanged = reducer->keeps() && gradients->unchanged();
      mine.problem = gradients->problem();
      if (paged && mine.problem.empty() && call.call == Call::kStep) mine.problem = paged->problem();
      if (mine.problem.empty() && call.call == Call::kStep) mine.problem = take_background_problem();
      mine.flags = gradients->flags();
    }
    mine.flags.resize(parameters.size(), 0);
    for (std::size_t i = 0; i < parameters.size(); ++i)  // also of those that have no place yet
      if (parameters[i].active && mine.flags[i] == 0 && parameters[i].tensor.grad().defined()) mine.flags[i] = kForeign;
    for (std::size_t g = 0; g < groups->size(); ++g)
      for (auto& fact : describe_options(kind, (*groups)[g].options(), "group " + std::to_string(g)))
        options_now.push_back(std::move(fact));
    if (scaling) scaling->describe(options_now, !decides_on_device());
    mine.header.options_hash = hash_facts(options_now);
  } catch (const c10::Error& e) {
    mine.problem = e.what_without_backtrace();
  }
  mine.flags.resize(parameters.size(), 0);
  return mine;
}

bool ZeroOptimizer::Impl::entered(const std::vector<Message>& all, const Facts& options_now) {
  for (const auto& m : all)
    if (m.header.options_hash != all[0].header.options_hash)
      throw_first_difference(comm, options_now, "the ranks' options differ at step " + std::to_string(report.number + 1));

  auto any = [&](auto member) {
    return std::any_of(all.begin(), all.end(), [&](const Message& m) { return m.header.*member != 0; });
  };
  const auto agreed = agreement(all);
  present.assign(parameters.size(), 0);
  for (std::size_t i = 0; i < parameters.size(); ++i) present[i] = agreed.any(static_cast<int>(i), kOurs | kForeign);
  if (any(&Header::needs_set_up)) {
    if (reducer) reducer->set_kept(false);
    const auto with_gradient = present;
    set_up(with_gradient);
    return false;
  }
  if (any(&Header::moved) && comm.size() > 1) {
    Facts values;
    for (const auto& p : parameters) {
      if (!p.active) continue;
      if (paged && !paged->moved(static_cast<int>(&p - parameters.data()))) {  // not looked at: it is nowhere whole
        values.emplace_back(p.name, "not replaced");
        continue;
      }
      const auto t = (is_dense(p.tensor) ? p.tensor.detach() : p.tensor.detach().contiguous()).to(at::kCPU);
      values.emplace_back("hash of the values of " + p.name, std::to_string(hash_bytes(t.const_data_ptr(), t.nbytes())));
    }
    agree(comm, values, "parameters were replaced (to(), load) and now differ between ranks");
    if (paged) paged->leave_moved("step " + std::to_string(report.number + 1));
  }
  divides = scaling && !scaling->unscaled && any(&Header::scaled);
  unscale = divides ? 1 / scaling->state.scale : 1;  // where a device decides, told_norm() says what it is
  if (scaling && any(&Header::scaled)) scaling->scaled = true;
  const bool reuse = std::all_of(all.begin(), all.end(), [](const Message& m) { return m.header.unchanged != 0; });
  if (!reuse) {
    reducer->set_kept(false);
    pending.grad_norm.reset();
    clip_factor = 1;  // an earlier clip is in the gradients' memory after collect()
    gradients->collect(agreed);
  } else {
    gradients->store_edits();
  }
  return true;
}

void ZeroOptimizer::Impl::enter(const Header& call) {
  ZERO_CHECK(attached(), name_of(call.call), ": the optimizer has no communicator yet; call attach(comm) first, on every rank");
  for (;;) {
    if (gradients && gradients->unfinished()) agree_on_gradients();
    Facts options_now;
    const auto all = meet(entry_message(call, options_now));
    if (entered(all, options_now)) return;
  }
}

}  // namespace zero
