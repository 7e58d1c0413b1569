// See node_queue.h. Memory ordering: a rank's inputs and its Call are read after its `posted` was (acquire), and written again
// after its peers' `taken` was.
#include "comm/node_queue.h"

#include <algorithm>
#include <utility>

#include "core/check.h"

namespace zero {

NodeQueue::NodeQueue(NodeImpl& impl, int place, std::string what)
    : QueueImpl(std::move(what)), impl_(impl), team_(impl.team_), place_(place) {
  impl_.queues_.push_back(this);
}

NodeQueue::~NodeQueue() {
  impl_.queues_.erase(std::find(impl_.queues_.begin(), impl_.queues_.end(), this));
  own().closed.store(true, std::memory_order_release);
  team_.ring();
}

std::int64_t NodeQueue::begin(Call call, const at::Tensor& input, const at::Tensor& output) {
  const std::int64_t ticket = begun();
  call.number = ticket;
  impl_.guarded([&] {
    team_.set_current(call);  // first: a failure is met in this call, not in the one before
    team_.check_failures();
    const std::int64_t bytes = call.bytes() * impl_.size();
    auto window = impl_.find_window(call, input.const_data_ptr(), bytes);
    ZERO_CHECK(window != nullptr || bytes == 0, team_.here(), ": input is not inside a Buffer of this communicator");
    if (ticket >= Lane::kDepth) release(ticket - Lane::kDepth);  // the record's place, here and for the peers
    operation(ticket) = {std::move(window), output};
    ++impl_.traffic_.calls;
    impl_.traffic_.data_bytes += call.bytes() * (impl_.size() - 1);
    own().calls[ticket % Lane::kDepth] = call;
    own().posted.store(ticket + 1, std::memory_order_release);
    team_.ring();
    if (impl_.size() == 1) serve();
  });
  return ticket;
}

void NodeQueue::refuse(const std::string& message) {
  impl_.guarded([&] { ZERO_FAIL("rank ", impl_.rank(), " of ", impl_.size(), " (", impl_.backend(), "): ", message); });
  ZERO_FAIL(message);  // not reached
}

bool NodeQueue::begun_by_all(std::int64_t ticket) const {
  for (int member = 0; member < team_.size(); ++member) {
    if (lane(member).posted.load(std::memory_order_acquire) <= ticket) return false;
  }
  return true;
}

void NodeQueue::compare(std::int64_t ticket) const {
  const Call& first = call(0, ticket);
  for (int member = 1; member < team_.size(); ++member) {
    const Call& other = call(member, ticket);
    const auto rank = team_.rank_in_world(member);
    if (!other.agrees_with(first)) {
      ZERO_FAIL(team_.here(), ": the ranks disagree: rank ", team_.rank_in_world(0), " calls ", describe(first), "; rank ",
                rank, " calls ", describe(other));
    }
    if (other.count > 0 && other.window != first.window) {
      ZERO_FAIL(team_.here(), ": the ranks' inputs lie in different Buffers: that of rank ", team_.rank_in_world(0), " in #",
                first.window, " of those allocated, that of rank ", rank, " in #", other.window);
    }
  }
}

void NodeQueue::take(std::int64_t ticket) {
  // Perhaps in the middle of another call, whose messages name that one.
  struct Current {
    Team& team;
    Call before;
    ~Current() { team.set_current(before); }
  } current{team_, team_.current()};
  const Call& mine = call(team_.rank(), ticket);
  team_.set_current(mine);
  compare(ticket);
  Operation& its = operation(ticket);
  const std::int64_t slice = mine.bytes() * team_.rank();
  sum_members(its.output.mutable_data_ptr(), team_.size(), mine.count, mine,
              [&](int member) -> const char* { return its.window->data(member) + call(member, ticket).offset + slice; });
  its = {};
  own().taken.store(ticket + 1, std::memory_order_release);
  team_.ring();
}

bool NodeQueue::serve() {
  const std::int64_t all = begun();
  for (std::int64_t ticket = finished(); ticket < all; ++ticket) {
    if (!begun_by_all(ticket)) return true;
    take(ticket);
  }
  return false;
}

void NodeQueue::poll() {
  impl_.guarded([this] {
    if (serve()) team_.check_failures();
  });
}

void NodeQueue::finish(std::int64_t ticket) {
  while (serve() && finished() <= ticket) {
    const std::int64_t next = finished();
    team_.set_current(call(team_.rank(), next));
    const auto there = [&](int member) { return lane(member).posted.load(std::memory_order_acquire) > next; };
    const auto given_up = [&](int member) { return lane(member).closed.load(std::memory_order_acquire); };
    team_.await({there, given_up, " to begin it", true});
  }
}

void NodeQueue::release(std::int64_t ticket) {
  finish(ticket);  // first, so that a timeout names who hasn't begun it, not who waits for that as well
  team_.set_current(call(team_.rank(), ticket));
  const auto there = [&](int member) { return lane(member).taken.load(std::memory_order_acquire) > ticket; };
  const auto given_up = [&](int member) { return lane(member).closed.load(std::memory_order_acquire); };
  team_.await({there, given_up, " to read its input"});
}

void NodeQueue::wait(std::int64_t ticket) {
  if (finished() > ticket) return;
  impl_.guarded([&] { finish(ticket); });
}

void NodeQueue::wait_released(std::int64_t ticket) {
  if (released() > ticket) return;
  impl_.guarded([&] { release(ticket); });
}

std::int64_t NodeQueue::released() const {
  std::int64_t least = finished();
  for (int member = 0; member < team_.size(); ++member) {
    least = std::min(least, lane(member).taken.load(std::memory_order_acquire));
  }
  return least;
}

// The lowest place that no rank uses any more. Every rank has let go of it before it came here, so nobody reads it, and each
// resets its own part.
std::shared_ptr<QueueImpl> NodeImpl::form_queue(const Call& call) {
  std::string mine(Slot::kLanes, '-');
  for (const NodeQueue* queue : queues_) mine[static_cast<std::size_t>(queue->place())] = '+';
  const auto all = enter_with(call, mine);
  for (int place = 0; place < Slot::kLanes; ++place) {
    const auto used = [&](const std::string& places) { return places[static_cast<std::size_t>(place)] == '+'; };
    if (std::any_of(all.begin(), all.end(), used)) continue;
    Lane& own = team_.lane(team_.rank(), place);
    own.posted.store(0, std::memory_order_relaxed);
    own.taken.store(0, std::memory_order_relaxed);
    own.closed.store(false, std::memory_order_relaxed);
    swap({});
    team_.serve = [this] { return serve_queues(); };
    return std::make_shared<NodeQueue>(*this, place, call.what);
  }
  std::string held;
  for (std::size_t r = 0; r < all.size(); ++r) {
    held += detail::text(r > 0 ? ", " : "", std::count(all[r].begin(), all[r].end(), '+'), " on rank ", r);
  }
  throw AgreedError(
      detail::text(team_.here(), ": ", Slot::kLanes, " queues at a time, and none is free on all ranks: open are ", held));
}

bool NodeImpl::serve_queues() {
  bool more = false;
  for (NodeQueue* queue : queues_) more = queue->serve() || more;
  return more;
}

}  // namespace zero
