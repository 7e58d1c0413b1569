// Collectives over shared memory, see node_impl.h. Memory ordering: whatever a rank wrote before a sync() may be read by its
// peers after it, until the next sync().
#include "comm/node_impl.h"

#include <algorithm>
#include <cstring>

namespace zero {
namespace {

// Even pieces, cut at cache lines: piece r of `count` elements starts here (r == ranks: the end).
std::int64_t piece_begin(std::int64_t count, int ranks, int r, std::int64_t item_bytes) {
  const std::int64_t line = 64 / item_bytes;
  const std::int64_t piece = ((count + ranks - 1) / ranks + line - 1) / line * line;
  return std::min(count, piece * r);
}

}  // namespace

void NodeImpl::enter(const Call& call, const void* bytes, std::int64_t count) {
  Page& own = team_.next_page();
  own.call = call;
  own.total = 0;
  if (count > 0 && count <= Page::kText) std::memcpy(own.text, bytes, static_cast<std::size_t>(count));
  team_.sync();
  check_calls();
}

std::vector<std::string> NodeImpl::enter_with(const Call& call, const std::string& mine) {
  return team_.exchange(&call, mine, [this] { check_calls(); });
}

void NodeImpl::check_calls() {
  const Call& own = team_.page(team_.rank()).call;
  bool same = own.op != Op::refuse;
  for (int member = 0; member < team_.size() && same; ++member) {
    const Call& other = team_.page(member).call;
    same = other.agrees_with(own) && other.staging == own.staging;
  }
  if (same) return resolve([this](int member) -> const Call& { return team_.page(member).call; });
  std::vector<Call> calls;
  std::vector<std::string> notes;
  for (int member = 0; member < team_.size(); ++member) {
    const Page& page = team_.page(member);
    calls.push_back(page.call);
    notes.emplace_back(page.text, static_cast<std::size_t>(std::min(page.total, Page::kText)));
  }
  compare(calls, notes);
}

void NodeImpl::do_reduce_scatter(const Call& call, const char* input, char* output) {
  const std::int64_t slice = call.bytes();
  const int own = team_.rank();
  const int ranks = team_.size();
  if (slice * ranks <= Page::kText) {
    return sum_members(output, ranks, call.count, call, [&](int r) { return team_.page(r).text + own * slice; });
  }
  if (!reach_.empty()) {
    sum_members(output, ranks, call.count, call, [&](int r) { return reach_[static_cast<std::size_t>(r)] + own * slice; });
    return team_.sync();
  }
  const Buffer::Impl& staging = this->staging();
  const std::int64_t half = staging_bytes() / 2;
  const std::int64_t chunk = half / ranks / 64 * 64;
  std::int64_t side = 0;
  for (std::int64_t begin = 0; begin < slice; begin += chunk, side = half - side) {
    const std::int64_t bytes = std::min(chunk, slice - begin);
    for (int r = 0; r < ranks; ++r) {
      if (r != own)
        std::memcpy(staging.data(own) + side + r * chunk, input + r * slice + begin, static_cast<std::size_t>(bytes));
    }
    team_.sync();
    sum_members(output + begin, ranks, bytes / call.item_bytes, call, [&](int r) -> const char* {
      return r == own ? input + own * slice + begin : staging.data(r) + side + own * chunk;
    });
  }
}

void NodeImpl::do_all_gather(const Call& call, const char* shard, char* full) {
  const std::int64_t slice = call.bytes();
  const int own = team_.rank();
  const int ranks = team_.size();
  if (shard != full + own * slice && slice > 0) kernels::bulk_copy(full + own * slice, shard, slice);
  if (slice <= Page::kText) {
    for (int r = 0; r < ranks; ++r) {
      if (r != own && slice > 0) std::memcpy(full + r * slice, team_.page(r).text, static_cast<std::size_t>(slice));
    }
    return;
  }
  if (!reach_.empty()) {
    for (int step = 1; step < ranks; ++step) {  // everybody reads another peer's memory first
      const int r = (own + step) % ranks;
      kernels::bulk_copy(full + r * slice, reach_[static_cast<std::size_t>(r)], slice);
    }
    return team_.sync();
  }
  const Buffer::Impl& staging = this->staging();
  const std::int64_t half = staging_bytes() / 2;
  std::int64_t side = 0;
  for (std::int64_t begin = 0; begin < slice; begin += half, side = half - side) {
    const std::int64_t bytes = std::min(half, slice - begin);
    std::memcpy(staging.data(own) + side, shard + begin, static_cast<std::size_t>(bytes));
    team_.sync();
    for (int step = 1; step < ranks; ++step) {
      const int r = (own + step) % ranks;
      kernels::bulk_copy(full + r * slice + begin, staging.data(r) + side, bytes);
    }
  }
}

void NodeImpl::do_all_reduce(const Call& call, char* data) {
  if (call.bytes() <= Page::kText) {
    return sum_members(data, team_.size(), call.count, call, [&](int r) { return team_.page(r).text; });
  }
  if (team_.size() == 1) return sum_members(data, 1, call.count, call, [&](int) { return data; });
  reach_.empty() ? reduce_staged(call, data) : reduce_direct(call, data);
}

void NodeImpl::reduce_direct(const Call& call, char* data) {
  const auto begin = [&](int r) { return piece_begin(call.count, team_.size(), r, call.item_bytes) * call.item_bytes; };
  const int own = team_.rank();
  sum_members(data + begin(own), team_.size(), (begin(own + 1) - begin(own)) / call.item_bytes, call,
              [&](int r) { return reach_[static_cast<std::size_t>(r)] + begin(own); });
  team_.sync();
  for (int step = 1; step < team_.size(); ++step) {
    const int r = (own + step) % team_.size();
    const auto bytes = begin(r + 1) - begin(r);
    if (bytes > 0) kernels::bulk_copy(data + begin(r), reach_[static_cast<std::size_t>(r)] + begin(r), bytes);
  }
  team_.sync();
}

void NodeImpl::reduce_staged(const Call& call, char* data) {
  const Buffer::Impl& staging = this->staging();
  const int own = team_.rank();
  const std::int64_t half = staging_bytes() / 2;
  std::int64_t side = 0;
  for (std::int64_t at = 0; at < call.bytes(); at += half, side = half - side) {
    const std::int64_t bytes = std::min(half, call.bytes() - at);
    const auto begin = [&](int r) {
      return piece_begin(bytes / call.item_bytes, team_.size(), r, call.item_bytes) * call.item_bytes;
    };
    std::memcpy(staging.data(own) + side, data + at, static_cast<std::size_t>(bytes));
    team_.sync();
    // The sum goes where nobody else reads before the next sync: this rank's piece of its own staging memory.
    sum_members(staging.data(own) + side + begin(own), team_.size(), (begin(own + 1) - begin(own)) / call.item_bytes, call,
                [&](int r) { return staging.data(r) + side + begin(own); });
    team_.sync();
    for (int r = 0; r < team_.size(); ++r) {
      std::memcpy(data + at + begin(r), staging.data(r) + side + begin(r), static_cast<std::size_t>(begin(r + 1) - begin(r)));
    }
  }
}

void NodeImpl::do_broadcast(const Call& call, char* data) {
  const int own = team_.rank();
  const int root = call.root;
  if (team_.size() == 1 || call.bytes() == 0) return;
  if (call.bytes() <= Page::kText) {
    if (own != root) std::memcpy(data, team_.page(root).text, static_cast<std::size_t>(call.bytes()));
    return;
  }
  if (!reach_.empty()) {
    if (own != root) kernels::bulk_copy(data, reach_[static_cast<std::size_t>(root)], call.bytes());
    return team_.sync();
  }
  const Buffer::Impl& staging = this->staging();
  const std::int64_t half = staging_bytes() / 2;
  std::int64_t side = 0;
  for (std::int64_t begin = 0; begin < call.bytes(); begin += half, side = half - side) {
    const std::int64_t bytes = std::min(half, call.bytes() - begin);
    if (own == root) std::memcpy(staging.data(own) + side, data + begin, static_cast<std::size_t>(bytes));
    team_.sync();
    if (own != root) kernels::bulk_copy(data + begin, staging.data(root) + side, bytes);
  }
}

}  // namespace zero
