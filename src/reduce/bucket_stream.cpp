#include "reduce/bucket_stream.h"

#include <ATen/ops/empty.h>

#include <algorithm>

#include "core/memory.h"

namespace zero {

const Bucket& BucketStream::bucket(int unit) const {
  const auto [space, bucket] = context_.layout.place(unit);
  return context_.layout.spaces()[space].buckets[bucket];
}

int BucketStream::position(int parameter) const {
  const auto& members = bucket(context_.layout.unit_of(parameter)).parameters;
  return static_cast<int>(std::lower_bound(members.begin(), members.end(), parameter) - members.begin());
}

void BucketStream::allocate() {
  const int units = context_.layout.units();
  std::vector<std::int64_t> sizes{0, 0};
  for (int unit = 0; unit < units; ++unit) sizes.push_back(context_.layout.bytes(unit));
  std::partial_sort(sizes.begin(), sizes.begin() + 2, sizes.end(), std::greater<>());
  if (!queue_.defined()) queue_ = context_.comm.open_queue("gradients");
  if (!window_.defined() || buffers_[0].memory.numel() < sizes[0] || buffers_[1].memory.numel() < sizes[1]) {
    for (auto& buffer : buffers_)
      if (buffer.ticket >= 0) queue_.wait_released(buffer.ticket);
    window_ = context_.comm.allocate(sizes[0] + sizes[1], "buckets of gradients on their way");
    for (int i : {0, 1})
      buffers_[i] = {tensor_over(static_cast<char*>(window_.data()) + (i == 0 ? 0 : sizes[0]), window_.impl(), {sizes[i]}, {1},
                                 at::kByte, context_.device)};
  }
  filling_.resize(units), last_.resize(units), started_.resize(units);
  // Nothing has been learned about new parameters: all of them, from the last to the first.
  Plan plan;
  for (int unit = units; unit-- > 0;) plan.order.push_back(unit);
  plan.expected.resize(context_.parameters.size());
  for (std::size_t i = 0; i < plan.expected.size(); ++i)
    plan.expected[i] = context_.layout.slot(static_cast<int>(i)).space >= 0 && context_.parameters[i].tensor.requires_grad();
  plans_ = {std::move(plan)};
  followed_.clear();
  last_plans_ = {-1, -1};
  use(0);
}

void BucketStream::use(int plan) {
  plan_ = plans_[plan];
  plan_.count.assign(context_.layout.units(), 0);
  for (std::size_t i = 0; i < plan_.expected.size(); ++i)
    if (plan_.expected[i]) ++plan_.count[context_.layout.unit_of(static_cast<int>(i))];
  next_ = 0;
}

void* BucketStream::memory(const Filling& filling) const {
  return filling.buffer >= 0 ? buffers_[filling.buffer].memory.data_ptr() : filling.own.data_ptr();
}

// A free buffer that is large enough, or −1 if both hold buckets that are not under way.
int BucketStream::find_buffer(std::int64_t bytes) {
  for (;;) {
    collect_finished(false);
    int best = -1, waits = -1;
    for (int i : {1, 0}) {  // the smaller one first
      auto& buffer = buffers_[i];
      if (buffer.memory.numel() < bytes) continue;
      if (buffer.ticket >= 0 && queue_.released(buffer.ticket)) buffer.ticket = -1, buffer.unit = -1;
      if (buffer.unit < 0 && best < 0) best = i;
      if (buffer.ticket >= 0 && (waits < 0 || buffer.ticket < buffers_[waits].ticket)) waits = i;
    }
    if (best >= 0 || waits < 0) return best;
    queue_.wait_released(buffers_[waits].ticket);
  }
}

void BucketStream::open(int unit) {
  auto& filling = filling_[unit];
  if (filling.open) return;
  const auto bytes = context_.layout.bytes(unit);
  filling = Filling{};
  filling.open = true;
  filling.buffer = find_buffer(bytes);
  if (filling.buffer >= 0) {
    buffers_[filling.buffer].unit = unit;
  } else {
    filling.own = at::empty({bytes}, context_.bytes());
  }
  filling.arrived.resize(bucket(unit).parameters.size());
  filling.onto.resize(filling.arrived.size());
}

void BucketStream::evict(int buffer) {
  auto& filling = filling_[buffers_[buffer].unit];
  filling.own = at::empty({context_.layout.bytes(buffers_[buffer].unit)}, context_.bytes());
  copy_bytes(filling.own.data_ptr(), buffers_[buffer].memory.data_ptr(), filling.own.numel(), context_.device);
  filling.buffer = -1;
  buffers_[buffer].unit = -1;
}

bool BucketStream::complete(int unit) const {
  return filling_[unit].open && plan_.count[unit] > 0 && filling_[unit].expected == plan_.count[unit];
}

void BucketStream::add(int parameter, const at::Tensor& gradient, bool onto) {
  const int unit = context_.layout.unit_of(parameter);
  last_[unit] = ++clock_;
  open(unit);
  auto& filling = filling_[unit];
  const int at = position(parameter);
  const auto region = context_.region(memory(filling), nullptr, parameter);
  if (filling.arrived[at]) {
    region.add_(gradient);
  } else {
    place_gradient(region, gradient);
    filling.arrived[at] = 1;
    filling.onto[at] = onto;
    if (plan_.expected[parameter]) ++filling.expected;
  }
  advance();
}

void BucketStream::drop(int parameter) {
  auto& filling = filling_[context_.layout.unit_of(parameter)];
  const int at = position(parameter);
  if (!filling.open || !filling.arrived[at]) return;
  filling.arrived[at] = 0;
  if (plan_.expected[parameter]) --filling.expected;
}

std::uint8_t BucketStream::flags(int parameter) const {
  const int unit = context_.layout.unit_of(parameter);
  const auto& filling = filling_[unit];
  if (!filling.open || !filling.arrived[position(parameter)]) return 0;
  return started_[unit] ? kAgain : kWaiting;
}

void BucketStream::complete_plan() {
  if (held_back_) return;
  for (; next_ < plan_.order.size(); ++next_)
    if (!started_[plan_.order[next_]]) start(plan_.order[next_]);
}

void BucketStream::advance() {
  if (!held_back_) {
    while (next_ < plan_.order.size() && complete(plan_.order[next_]) && !started_[plan_.order[next_]])
      start(plan_.order[next_++]);
  }
  queue_.poll();
  collect_finished(false);
}

// Where nothing has arrived, zeros are added.
void BucketStream::fill_gaps(int unit, const Filling& filling) {
  const auto [space, b] = context_.layout.place(unit);
  const auto& s = context_.layout.spaces()[space];
  const auto& members = s.buckets[b].parameters;
  auto* base = static_cast<char*>(memory(filling));
  std::int64_t end = 0;  // of what has been looked at, in bytes
  const auto clear_until = [&](std::int64_t begin) {
    if (begin > end) fill_bytes(base + end, 0, begin - end, context_.device);
  };
  for (std::size_t at = 0; at < members.size(); ++at) {
    if (!filling.arrived[at]) continue;
    const auto& slot = context_.layout.slot(members[at]);
    const auto begin = (slot.offset - s.buckets[b].begin) * s.itemsize;
    clear_until(begin);
    end = begin + slot.numel * s.itemsize;
  }
  clear_until(context_.layout.bytes(unit));
}

void BucketStream::start(int unit) {
  const auto bytes = context_.layout.bytes(unit);
  if (bytes == 0) {
    filling_[unit] = Filling{};
    return;
  }
  open(unit);
  auto& filling = filling_[unit];
  if (filling.buffer < 0) {
    int buffer = find_buffer(bytes);
    if (buffer < 0) evict(buffer = buffers_[1].memory.numel() >= bytes ? 1 : 0);
    copy_bytes(buffers_[buffer].memory.data_ptr(), filling.own.data_ptr(), bytes, context_.device);
    buffers_[buffer].unit = unit;
    filling.buffer = buffer;
    filling.own.reset();
  }
  fill_gaps(unit, filling);
  const auto& members = bucket(unit).parameters;
  std::vector<char> onto(members.size());
  for (std::size_t at = 0; at < members.size(); ++at) {
    if (started_[unit]) {
      onto[at] = 1;  // on top of what this backward has brought already
    } else {
      onto[at] = filling.arrived[at] ? filling.onto[at] : sink.has_gradient(members[at]);
    }
  }
  const bool any = std::any_of(onto.begin(), onto.end(), [](char o) { return o != 0; });
  sink.before(unit);
  auto output = sink.shard(unit);
  auto& buffer = buffers_[filling.buffer];
  const auto input = tensor_over(buffer.memory.data_ptr(), nullptr, {output.numel() * context_.layout.ranks()}, {1},
                                 output.scalar_type(), context_.device);
  if (any) output = at::empty({output.numel()}, output.options());
  buffer.ticket = queue_.begin(
      input, output, context_.division.late ? context_.early(context_.layout.place(unit).space) : context_.division.by,
      context_.label("reducing gradients,", unit));
  under_way_.push_back({unit, buffer.ticket, any ? output : at::Tensor(), std::move(onto)});
  filling = Filling{};
  started_[unit] = 1;
}

void BucketStream::collect_finished(bool wait) {
  while (!under_way_.empty()) {
    auto& first = under_way_.front();
    if (wait) queue_.wait(first.ticket);
    if (!queue_.finished(first.ticket)) return;
    sink.merge(first.unit, first.sum, first.onto);
    under_way_.pop_front();
  }
}

std::vector<int> BucketStream::completion_order() const {
  std::vector<int> order;
  for (int unit = 0; unit < static_cast<int>(last_.size()); ++unit)
    if (last_[unit] > 0) order.push_back(unit);
  std::sort(order.begin(), order.end(), [&](int a, int b) { return last_[a] < last_[b]; });
  return order;
}

void BucketStream::finish(const GradientAgreement& agreed) {
  const int units = context_.layout.units();
  std::vector<char> waits(units, 0), again(units, 0);
  for (std::size_t i = 0; i < context_.parameters.size(); ++i) {
    if (context_.layout.slot(static_cast<int>(i)).space < 0) continue;
    const int unit = context_.layout.unit_of(static_cast<int>(i));
    waits[unit] = waits[unit] || agreed.any(static_cast<int>(i), kWaiting);
    again[unit] = again[unit] || agreed.any(static_cast<int>(i), kAgain);
  }
  while (static_cast<std::int64_t>(next_) < agreed.under_way) {
    waits[plan_.order[next_]] = 0;
    start(plan_.order[next_++]);
  }
  for (std::size_t n = 0; n < next_; ++n) waits[plan_.order[n]] = 0;
  for (int unit = 0; unit < units; ++unit)
    if (waits[unit] || again[unit]) start(unit);
  collect_finished(true);
  learn(agreed);
  std::fill(last_.begin(), last_.end(), 0);
  std::fill(started_.begin(), started_.end(), 0);
  for (int unit = 0; unit < units; ++unit) {  // dropped altogether
    if (!filling_[unit].open) continue;
    if (filling_[unit].buffer >= 0) buffers_[filling_[unit].buffer].unit = -1;
    filling_[unit] = Filling{};
  }
}

void BucketStream::learn(const GradientAgreement& agreed) {
  Plan seen;
  seen.order = agreed.order;
  seen.expected.resize(context_.parameters.size());
  for (std::size_t i = 0; i < seen.expected.size(); ++i) seen.expected[i] = agreed.any(static_cast<int>(i), kArrived);
  // What rank 0 didn't have comes last.
  for (int unit = 0; unit < context_.layout.units(); ++unit) {
    const auto& members = bucket(unit).parameters;
    if (std::find(seen.order.begin(), seen.order.end(), unit) == seen.order.end() &&
        std::any_of(members.begin(), members.end(), [&](int i) { return seen.expected[i] != 0; }))
      seen.order.push_back(unit);
  }
  constexpr std::size_t kMost = 64;  // backwards that never repeat teach nothing
  auto found = std::find(plans_.begin(), plans_.end(), seen);
  if (found == plans_.end()) {
    if (plans_.size() == kMost) plans_.clear(), followed_.clear(), last_plans_ = {-1, -1};
    plans_.push_back(std::move(seen));
    found = plans_.end() - 1;
  }
  const int now = static_cast<int>(found - plans_.begin());
  followed_[last_plans_] = now;
  last_plans_ = {last_plans_.second, now};
  const auto next = followed_.find(last_plans_);
  use(next != followed_.end() ? next->second : now);
}

at::Tensor BucketStream::scratch() const {
  if (!window_.defined() || window_.bytes() == 0) return at::empty({0}, context_.bytes());
  return tensor_over(window_.data(), window_.impl(), {window_.bytes()}, {1}, at::kByte, context_.device);
}

std::int64_t BucketStream::buffer_bytes() const {
  std::int64_t sum = window_.defined() ? window_.bytes() : 0;
  for (const auto& filling : filling_)
    if (filling.own.defined()) sum += filling.own.numel();
  for (const auto& one : under_way_)
    if (one.sum.defined()) sum += static_cast<std::int64_t>(one.sum.nbytes());
  return sum;
}

}  // namespace zero
