// One step: agree, reduce, (norm, decision), update, gather. Nothing is written before all ranks know that all can.
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/variable.h>

#include <ATen/Parallel.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>

#include "core/check.h"
#include "kernels/kernels.h"
#include "optimizer/impl.h"

namespace zero {
namespace {

// Adds the seconds of a scope to a report's field.
class Timed {
 public:
  explicit Timed(double& seconds) : seconds_(seconds), start_(std::chrono::steady_clock::now()) {}
  ~Timed() { seconds_ += std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count(); }
  Timed(const Timed&) = delete;
  Timed& operator=(const Timed&) = delete;

 private:
  double& seconds_;
  std::chrono::steady_clock::time_point start_;
};

// Adds the bytes that a scope sends to a report. The communicator may have other users between our calls.
class Counted {
 public:
  Counted(const Communicator& comm, StepReport& report) : comm_(comm), report_(report), start_(comm.traffic()) {}
  ~Counted() {
    const auto now = comm_.traffic();
    report_.bytes_sent += now.data_bytes - start_.data_bytes;
    report_.control_bytes += now.control_bytes - start_.control_bytes;
  }
  Counted(const Counted&) = delete;
  Counted& operator=(const Counted&) = delete;

 private:
  const Communicator& comm_;
  StepReport& report_;
  Traffic start_;
};

// What every rank tells the others at the start of a call.
struct Header {
  char call[24] = {};
  std::int64_t step = 0;
  std::uint64_t options_hash = 0;
  std::uint64_t parameters = 0;
  std::uint8_t needs_set_up = 0, moved = 0, unchanged = 0, unused = 0;
};

struct Message {
  Header header;
  std::vector<char> present;
  std::string problem;

  std::string pack() const {
    std::string out(reinterpret_cast<const char*>(&header), sizeof header);
    out.append(present.data(), present.size());
    return out + problem;
  }
  static Message unpack(const std::string& packed) {
    Message m;
    std::memcpy(&m.header, packed.data(), sizeof m.header);
    const auto* p = packed.data() + sizeof m.header;
    m.present.assign(p, p + m.header.parameters);
    m.problem.assign(p + m.header.parameters, packed.data() + packed.size());
    return m;
  }
};

kernels::Span span_of(const at::Tensor& shard, std::int64_t offset, std::int64_t& numel) {
  auto* memory = static_cast<char*>(shard.data_ptr()) + offset * shard.element_size();
  switch (shard.scalar_type()) {
    case at::kFloat:
      return {memory, kernels::DType::f32};
    case at::kDouble:
      return {memory, kernels::DType::f64};
    case at::kHalf:
      return {memory, kernels::DType::f16};
    case at::kBFloat16:
      return {memory, kernels::DType::bf16};
    case at::kComplexFloat:
      numel *= 2;
      return {memory, kernels::DType::f32};
    case at::kComplexDouble:
      numel *= 2;
      return {memory, kernels::DType::f64};
    default:
      ZERO_FAIL("no norm for gradients of type ", shard.scalar_type());
  }
}

}  // namespace

int ZeroOptimizer::Impl::threads() const {
  return options.update_threads() > 0 ? options.update_threads() : at::get_num_threads();
}

bool ZeroOptimizer::Impl::uses_fused(int space) const {
  return fused_knows(kind, static_cast<at::ScalarType>(layout->spaces()[space].dtype));
}

bool ZeroOptimizer::Impl::bucket_present(int space, int bucket) const {
  const auto& members = layout->spaces()[space].buckets[bucket].parameters;
  return std::any_of(members.begin(), members.end(), [&](int i) { return present[i] && parameters[i].tensor.numel() > 0; });
}

void ZeroOptimizer::Impl::enter(const char* call, Groups& groups, StateMap& state) {
  ZERO_CHECK(attached(), call, ": the optimizer has no communicator yet; call attach(comm) first, on every rank");
  const std::string what = std::string(call) + " of step " + std::to_string(report.number + 1);
  for (;;) {
    Message mine;
    std::strncpy(mine.header.call, call, sizeof mine.header.call - 1);
    mine.header.step = report.number;
    Facts options_now;
    try {
      mine.header.needs_set_up = needs_set_up(groups);
      if (!mine.header.needs_set_up) {
        for (std::size_t i = 0; i < parameters.size(); ++i)
          if (parameters[i].active && residents->adopt(static_cast<int>(i))) mine.header.moved = 1;
        gradients->watch();
      }
      for (std::size_t i = 0; i < parameters.size(); ++i)
        mine.present.push_back(static_cast<char>(parameters[i].active && parameters[i].tensor.grad().defined()));
      if (!mine.header.needs_set_up) {
        mine.header.unchanged = reducer->keeps() && gradients->unchanged();
        mine.problem = gradients->problem();
      }
      for (std::size_t g = 0; g < groups.size(); ++g)
        for (auto& fact : describe_options(kind, groups[g].options(), "group " + std::to_string(g)))
          options_now.push_back(std::move(fact));
      mine.header.options_hash = hash_facts(options_now);
    } catch (const c10::Error& e) {
      mine.problem = e.what_without_backtrace();
    }
    mine.present.resize(parameters.size(), 0);
    mine.header.parameters = parameters.size();

    const auto packed = comm.exchange(mine.pack(), what);
    std::vector<Message> all;
    for (const auto& p : packed) all.push_back(Message::unpack(p));
    for (std::size_t r = 0; r < all.size(); ++r)
      if (!all[r].problem.empty()) ZERO_FAIL(comm.size() > 1 ? detail::text("rank ", r, ": ") : std::string(), all[r].problem);
    for (std::size_t r = 1; r < all.size(); ++r) {
      const auto &a = all[0].header, &b = all[r].header;
      ZERO_CHECK(std::strcmp(a.call, b.call) == 0 && a.step == b.step, "the ranks are at different calls: rank 0 is in ",
                 a.call, " of step ", a.step + 1, ", rank ", r, " in ", b.call, " of step ", b.step + 1);
    }
    for (const auto& m : all)
      if (m.header.options_hash != all[0].header.options_hash)
        throw_first_difference(comm, options_now, "the ranks' options differ at step " + std::to_string(report.number + 1));

    auto any = [&](auto member) {
      return std::any_of(all.begin(), all.end(), [&](const Message& m) { return m.header.*member != 0; });
    };
    present.assign(parameters.size(), 0);
    for (const auto& m : all)
      for (std::size_t i = 0; i < std::min(present.size(), m.present.size()); ++i) present[i] = present[i] || m.present[i];
    if (any(&Header::needs_set_up)) {
      if (reducer) reducer->set_kept(false);
      const auto with_gradient = present;
      set_up(groups, state, with_gradient);
      continue;
    }
    if (any(&Header::moved) && comm.size() > 1) {
      Facts values;
      for (const auto& p : parameters) {
        if (!p.active) continue;
        const auto t = is_dense(p.tensor) ? p.tensor.detach() : p.tensor.detach().contiguous();
        values.emplace_back("hash of the values of " + p.name, std::to_string(hash_bytes(t.const_data_ptr(), t.nbytes())));
      }
      agree(comm, values, "parameters were replaced (to(), load) and now differ between ranks");
    }
    const bool reuse = std::all_of(all.begin(), all.end(), [](const Message& m) { return m.header.unchanged != 0; });
    if (!reuse) {
      reducer->set_kept(false);
      pending.grad_norm.reset();
      clip_factor = 1;  // an earlier clip is in the gradients' memory after collect()
      gradients->collect(present);
    }
    return;
  }
}

void ZeroOptimizer::Impl::reduce_for_norm() {
  if (reducer->keeps()) return;
  // Partial sums are cut alike at every stage: each rank's shards, in order.
  double sum = 0;
  std::int32_t nonfinite = -1;
  for (std::size_t s = 0; s < layout->spaces().size(); ++s) {
    for (std::size_t b = 0; b < layout->spaces()[s].buckets.size(); ++b) {
      if (!bucket_present(s, b)) continue;
      const auto shard = reducer->shard(s, b, true);
      for (const auto& segment : layout->segments(s, b, comm.rank())) {
        if (!present[segment.parameter]) continue;
        std::int64_t n = segment.numel;
        const auto span = span_of(shard, segment.in_shard, n);
        const auto found = kernels::squared_norm(span, n, threads());
        sum += found.sum_of_squares;
        if (found.first_nonfinite >= 0 && (nonfinite < 0 || segment.parameter < nonfinite)) nonfinite = segment.parameter;
      }
    }
  }
  struct Partial {
    double sum;
    std::int32_t nonfinite;
    std::int32_t unused;
  } mine{sum, nonfinite, 0};
  double total = 0;
  kept_nonfinite = -1;
  for (const auto& packed : comm.exchange(std::string(reinterpret_cast<const char*>(&mine), sizeof mine), "gradient norm")) {
    Partial theirs{};
    std::memcpy(&theirs, packed.data(), sizeof theirs);
    total += theirs.sum;
    if (theirs.nonfinite >= 0 && (kept_nonfinite < 0 || theirs.nonfinite < kept_nonfinite)) kept_nonfinite = theirs.nonfinite;
  }
  kept_norm = std::sqrt(total);
  reducer->set_kept(true);
  gradients->mark();
}

double ZeroOptimizer::Impl::norm(Groups& groups, StateMap& state) {
  ZERO_CHECK(attached(), "grad_norm: the optimizer has no communicator yet; call attach(comm) first, on every rank");
  const Counted counted(comm, pending);
  enter("grad_norm", groups, state);
  const Timed timed(pending.seconds_reduce);
  reduce_for_norm();
  return kept_norm * clip_factor;
}

double ZeroOptimizer::Impl::clip(double max_norm, Groups& groups, StateMap& state) {
  const double before = norm(groups, state);
  if (!pending.grad_norm) pending.grad_norm = before;  // the norm before the first of several clips
  // As LibTorch: a NaN norm makes every gradient NaN, an infinite one zero (and the infinite elements NaN).
  double factor = max_norm / (before + 1e-6);
  if (factor > 1) factor = 1;
  clip_factor *= factor;
  gradients->multiply_later(factor);
  return before;
}

std::vector<Piece> ZeroOptimizer::Impl::pieces(int space, int bucket, const at::Tensor& average) const {
  std::vector<Piece> out;
  const auto& s = layout->spaces()[space];
  for (const auto& segment : held(space, bucket)) {
    if (!present[segment.parameter]) continue;
    Piece piece;
    piece.parameter = segment.parameter;
    piece.space = space, piece.bucket = bucket;
    piece.in_parameter = segment.in_parameter;
    piece.in_held = segment.in_shard;
    piece.held = s.buckets[bucket].shard * (replicated() ? layout->ranks() : 1);
    piece.numel = segment.numel;
    piece.param = static_cast<char*>(residents->memory(segment.parameter)) + segment.in_parameter * s.itemsize;
    piece.grad = static_cast<char*>(average.data_ptr()) + segment.in_shard * s.itemsize;
    out.push_back(piece);
  }
  return out;
}

void ZeroOptimizer::Impl::finish_bucket(int space, int bucket) {
  const Timed timed(pending.seconds_gather);
  if (!replicated()) residents->gather(space, bucket, reducer->label("gathering parameters of", space, bucket));
  residents->copy_out(space, bucket);
  // A graph that saved the old values must not be differentiated with the new ones.
  for (const int i : layout->spaces()[space].buckets[bucket].parameters)
    if (present[i]) torch::autograd::impl::bump_version(parameters[i].tensor);
}

void ZeroOptimizer::Impl::update_bucketwise(const Groups& groups, StateMap& state) {
  for (std::size_t s = 0; s < layout->spaces().size(); ++s) {
    if (!uses_fused(s)) continue;
    for (std::size_t b = 0; b < layout->spaces()[s].buckets.size(); ++b) {
      if (!bucket_present(s, b)) continue;
      at::Tensor average;
      {
        const Timed timed(pending.seconds_reduce);
        average = reducer->shard(s, b, reducer->keeps());
        if (replicated()) average = reducer->whole(s, b, average);
      }
      {
        const Timed timed(pending.seconds_update);
        residents->copy_in(s, b);
        fused->update(pieces(s, b, average), groups, state, clip_factor, threads());
      }
      finish_bucket(s, b);
    }
  }
}

void ZeroOptimizer::Impl::update_at_once(const Groups& groups, StateMap& state) {
  std::vector<Piece> everything;
  std::vector<at::Tensor> averages;
  std::vector<std::pair<int, int>> buckets;
  for (std::size_t s = 0; s < layout->spaces().size(); ++s) {
    if (uses_fused(s)) continue;
    for (std::size_t b = 0; b < layout->spaces()[s].buckets.size(); ++b) {
      if (!bucket_present(s, b)) continue;
      const Timed timed(pending.seconds_reduce);
      auto average = reducer->shard(s, b, true);
      // A copy, since the next bucket reuses the scratch: a user's step() runs once, over everything.
      if (replicated() && comm.size() > 1) average = reducer->whole(s, b, average).clone();
      averages.push_back(average);
      residents->copy_in(s, b);
      for (auto& piece : pieces(s, b, average)) everything.push_back(piece);
      buckets.emplace_back(s, b);
    }
  }
  if (buckets.empty()) return;
  {
    const Timed timed(pending.seconds_update);
    elementwise->update(everything, groups, state, clip_factor, threads());
  }
  for (const auto& [s, b] : buckets) finish_bucket(s, b);
}

void ZeroOptimizer::Impl::step(Groups& groups, StateMap& state) {
  ZERO_CHECK(attached(), "step: the optimizer has no communicator yet; call attach(comm) first, on every rank");
  {
    const Counted counted(comm, pending);
    enter("step", groups, state);
    if (options.skip_nonfinite() || options.record_grad_norm()) {
      const Timed timed(pending.seconds_reduce);
      reduce_for_norm();
    }
    if (reducer->keeps()) {
      if (!pending.grad_norm) pending.grad_norm = kept_norm * clip_factor;
      if (kept_nonfinite >= 0) pending.first_nonfinite = parameters[kept_nonfinite].name;
    }
    pending.clip_factor = clip_factor;
    pending.applied = !(options.skip_nonfinite() && kept_nonfinite >= 0 && reducer->keeps());
    if (pending.applied) {
      update_bucketwise(groups, state);
      update_at_once(groups, state);
    } else {
      pending.reason = "the averaged gradient of " + pending.first_nonfinite + " is not finite";
    }
    reducer->set_kept(false);
    clip_factor = 1;
  }
  pending.number = report.number + 1;
  report = pending;
  pending = StepReport{};
}

}  // namespace zero
