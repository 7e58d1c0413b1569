// The frame around every collective, see team_impl.h.
#include "comm/team_impl.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <type_traits>
#include <utility>

#include "core/check.h"

namespace zero {
namespace {

constexpr std::int64_t kStagingBytes = std::int64_t{8} << 20;

}  // namespace

std::int64_t staging_bytes_wanted(int ranks) {
  std::int64_t bytes = kStagingBytes;
  if (const char* value = std::getenv("ZERO_STAGING_BYTES"); value != nullptr && *value != '\0') {
    bytes = std::strtoll(value, nullptr, 10);
    ZERO_CHECK(bytes > 0, "ZERO_STAGING_BYTES=", value, ": must be a positive number of bytes");
  }
  // Each half holds at least a cache line for every rank.
  return std::max<std::int64_t>(bytes, 128 * static_cast<std::int64_t>(ranks)) / 128 * 128;
}

TeamImpl::TeamImpl(int rank, Team::Setup setup)
    : team_(std::move(setup)), rank_(rank), staging_bytes_(staging_bytes_wanted(team_.world())) {}

void TeamImpl::guarded(const std::function<void()>& body) {
  if (broken_ != nullptr) std::rethrow_exception(broken_);
  try {
    body();
  } catch (const AgreedError&) {
    throw;
  } catch (const PeerFailure& error) {
    break_down(std::current_exception(), error.origin, error.why);
    throw;
  } catch (const c10::Error& error) {
    break_down(std::current_exception(), rank_, "failed: " + error.msg());
    throw;
  } catch (const std::exception& error) {
    break_down(std::current_exception(), rank_, std::string("failed: ") + error.what());
    throw;
  }
}

template <typename Body>
auto TeamImpl::run(Call& call, const Body& body) {
  struct Release {
    TeamImpl& impl;
    ~Release() {
      impl.window_.reset();
      impl.reach_.clear();
    }
  } release{*this};
  using Result = decltype(body());
  [[maybe_unused]] std::conditional_t<std::is_void_v<Result>, bool, Result> result{};
  guarded([&] {
    call.number = ++number_;
    call.staging = staging_bytes_;
    team_.set_current(call);
    ++traffic_.calls;
    team_.check_failures();
    check_far_failures();
    if constexpr (std::is_void_v<Result>) {
      body();
    } else {
      result = body();
    }
  });
  if constexpr (!std::is_void_v<Result>) return result;
}

void TeamImpl::break_down(std::exception_ptr error, int origin, const std::string& why) {
  broken_ = std::move(error);
  if (team_.fail(origin, why)) spread_failure(origin, why);
}

void TeamImpl::fail(const std::string& why) {
  if (team_.fail(rank_, "failed: " + why)) spread_failure(rank_, "failed: " + why);
}

void TeamImpl::check_failures() {
  guarded([this] {
    team_.check_failures();
    check_far_failures();
  });
}

void TeamImpl::compare(const std::vector<Call>& calls, const std::vector<std::string>& notes) const {
  const auto own = static_cast<std::size_t>(rank_);
  if (calls[own].op == Op::refuse) throw AgreedError(notes[own]);
  for (std::size_t r = 0; r < calls.size(); ++r) {
    if (calls[r].op == Op::refuse) throw AgreedError(detail::text(team_.here(), ": refused by rank ", r, ": ", notes[r]));
  }
  for (std::size_t r = 1; r < calls.size(); ++r) {
    if (calls[r].staging != calls[0].staging) {
      throw AgreedError(detail::text(team_.here(), ": ZERO_STAGING_BYTES differs: ", calls[0].staging, " on rank 0, ",
                                     calls[r].staging, " on rank ", r));
    }
    if (calls[r].agrees_with(calls[0])) continue;
    throw AgreedError(detail::text(team_.here(), ": the ranks disagree: rank 0 calls ", describe(calls[0]), "; rank ", r,
                                   " calls ", describe(calls[r])));
  }
}

void TeamImpl::refuse(const std::string& message) {
  Call call;
  call.op = Op::refuse;
  const auto full = detail::text("rank ", rank_, " of ", size(), " (", backend(), "): ", message);
  run(call, [&] { enter_with(call, full.substr(0, Page::kText)); });
  ZERO_FAIL(full);  // not reached: entering a refused call throws
}

std::shared_ptr<Buffer::Impl> TeamImpl::find_window(Call& call, const void* data, std::int64_t bytes) {
  windows_.erase(std::remove_if(windows_.begin(), windows_.end(), [](const auto& window) { return window.expired(); }),
                 windows_.end());
  for (const auto& candidate : windows_) {
    auto window = candidate.lock();
    if (window == nullptr) continue;
    const auto offset = reinterpret_cast<std::intptr_t>(data) - reinterpret_cast<std::intptr_t>(window->data(window->self));
    if (offset < 0 || offset + bytes > window->bytes) continue;
    call.window = window->id;
    call.offset = offset;
    return window;
  }
  return nullptr;
}

void TeamImpl::resolve(const std::function<const Call&(int)>& call_of) {
  if (window_ == nullptr) return;
  for (int member = 0; member < team_.size(); ++member) {
    // Only a window that every rank is using is sure to be there on every rank.
    if (call_of(member).window != window_->id) return reach_.clear();
    reach_.push_back(window_->data(member) + call_of(member).offset);
  }
}

void TeamImpl::reduce_scatter(Call call, const void* input, void* output) {
  run(call, [&] {
    window_ = find_window(call, input, call.bytes() * size());
    enter(call, input, call.bytes() * size());
    do_reduce_scatter(call, static_cast<const char*>(input), static_cast<char*>(output));
    traffic_.data_bytes += call.bytes() * (size() - 1);
  });
}

void TeamImpl::all_gather(Call call, const void* shard, void* full) {
  run(call, [&] {
    window_ = gathers_from_shard() ? find_window(call, shard, call.bytes()) : find_window(call, full, call.bytes() * size());
    enter(call, shard, call.bytes());
    do_all_gather(call, static_cast<const char*>(shard), static_cast<char*>(full));
    traffic_.data_bytes += call.bytes() * (size() - 1);
  });
}

void TeamImpl::all_reduce(Call call, void* data) {
  run(call, [&] {
    window_ = find_window(call, data, call.bytes());
    enter(call, data, call.bytes());
    do_all_reduce(call, static_cast<char*>(data));
    traffic_.data_bytes += 2 * (size() - 1) * call.bytes() / size();
  });
}

void TeamImpl::broadcast(Call call, void* data) {
  run(call, [&] {
    window_ = find_window(call, data, call.bytes());
    enter(call, data, call.root == rank_ ? call.bytes() : 0);
    do_broadcast(call, static_cast<char*>(data));
    if (call.root == rank_) traffic_.data_bytes += call.bytes() * (size() - 1);
  });
}

std::vector<std::string> TeamImpl::exchange(Call call, const std::string& mine) {
  return run(call, [&] {
    auto all = enter_with(call, mine);
    traffic_.control_bytes += static_cast<std::int64_t>(mine.size()) * (size() - 1);
    return all;
  });
}

std::shared_ptr<Buffer::Impl> TeamImpl::allocate(Call call) {
  return run(call, [&] {
    const auto verdicts = enter_with(call, room_verdict(call.count));
    const auto everywhere = [&](const std::string& mine) { return swap(mine); };
    auto window = make_window(call.count, call.what, static_cast<Backing>(call.root), verdicts, everywhere);
    window->id = next_window_++;
    windows_.push_back(window);
    return window;
  });
}

std::shared_ptr<QueueImpl> TeamImpl::open_queue(Call call) {
  return run(call, [&] { return form_queue(call); });
}

std::shared_ptr<CommunicatorImpl> TeamImpl::split(Call call, int color, int key) {
  return run(call, [&] {
    const int mine[2] = {color, key};
    const auto all = enter_with(call, {reinterpret_cast<const char*>(mine), sizeof mine});
    std::vector<std::pair<int, int>> order;  // (key, rank)
    for (int r = 0; r < size(); ++r) {
      int theirs[2] = {};
      std::memcpy(theirs, all[static_cast<std::size_t>(r)].data(), sizeof theirs);
      if (color >= 0 && theirs[0] == color) order.emplace_back(theirs[1], r);
    }
    std::sort(order.begin(), order.end());
    std::vector<int> members;
    for (const auto& [its_key, r] : order) members.push_back(r);
    return form(members, color, key);
  });
}

}  // namespace zero
