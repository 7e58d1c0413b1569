// How data moves between nodes, in chunks, with the next chunk on its way while this one is being added. See cluster_impl.h.
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <cstring>

#include "comm/cluster_impl.h"
#include "comm/node_impl.h"

namespace zero {
namespace {

using kernels::DType;

DType wide_of(DType type) { return type == DType::f64 ? DType::f64 : DType::f32; }

template <typename Narrow>
void round_to(char* output, const char* wide, std::int64_t count) {
  const auto* from = reinterpret_cast<const float*>(wide);
  auto* to = reinterpret_cast<Narrow*>(output);
  for (std::int64_t i = 0; i < count; ++i) to[i] = static_cast<Narrow>(from[i]);
}

}  // namespace

// Of one slice; N of them fit into half the staging memory, and doubled (a part in float) into one message.
std::int64_t ClusterImpl::chunk_bytes() const { return std::min(staging_bytes() / 2 / size(), kMaxMessage / 2) / 64 * 64; }

char* ClusterImpl::arena(std::int64_t bytes) {
  if (arena_ == nullptr) arena_ = std::make_shared<std::vector<char>>();
  if (static_cast<std::int64_t>(arena_->size()) < bytes) arena_->resize(static_cast<std::size_t>(bytes));
  return arena_->data();
}

void ClusterImpl::post(int to, const void* data, std::int64_t bytes, Wire::Pending& pending) {
  wire_.send(to, data, bytes, pending);
  traffic_.between_nodes_bytes += bytes;
}

// Adds the nodes' parts, in node order, and rounds once.
void ClusterImpl::combine(const Call& call, std::vector<const void*> parts, char* output, std::int64_t count) {
  const DType wide = wide_of(call.real);
  const bool raw = map_.nodes.size() == map_.node_of.size();  // one rank per node: nothing has been added yet
  if (raw || wide == call.real) {
    return kernels::sum_ranks(output, parts.data(), nodes(), count, call.real, call.divisor);
  }
  const auto bytes = static_cast<std::size_t>(count) * 4;
  scratch_.resize(bytes * (parts.size() + 1));
  for (std::size_t node = 0; node < parts.size(); ++node) {
    if (map_.ranks_on(static_cast<int>(node)) > 1) continue;
    const void* one = parts[node];
    char* widened = scratch_.data() + bytes * node;
    kernels::sum_ranks_wide(widened, &one, 1, count, call.real);
    parts[node] = widened;
  }
  char* sum = scratch_.data() + bytes * parts.size();
  kernels::sum_ranks(sum, parts.data(), nodes(), count, wide, call.divisor);
  call.real == DType::f16 ? round_to<c10::Half>(output, sum, count) : round_to<c10::BFloat16>(output, sum, count);
}

void ClusterImpl::do_reduce_scatter(const Call& call, const char* input, char* output) {
  const std::int64_t slice = call.bytes();
  const std::int64_t chunk = chunk_bytes();
  const std::int64_t widening = kernels::size_of(wide_of(call.real)) / call.item_bytes;
  const auto part_bytes = [&](int node, std::int64_t bytes) { return map_.ranks_on(node) == 1 ? bytes : bytes * widening; };
  const auto& slices = slices_of(team_.rank());
  const bool staged = !alone() && reach_.empty();
  const Buffer::Impl* staging = staged ? &this->staging() : nullptr;

  // For each of the two chunks under way: a part for every slice this rank deals with (its own first) and one from every node.
  const std::int64_t room = chunk * widening;
  const auto buffers = static_cast<std::int64_t>(slices.size() + others_.size());
  char* const memory = arena(2 * buffers * room);
  const auto outgoing = [&](int parity, std::size_t i) {
    return memory + (parity * buffers + static_cast<std::int64_t>(i)) * room;
  };
  const auto incoming = [&](int parity, std::size_t i) { return outgoing(parity, slices.size() + i); };
  Wire::Pending sends[2] = {Wire::Pending(arena_), Wire::Pending(arena_)};
  Wire::Pending receives[2] = {Wire::Pending(arena_), Wire::Pending(arena_)};

  const auto finish = [&](std::int64_t begin, int parity) {
    wire_.wait(receives[parity]);
    std::vector<const void*> parts(map_.nodes.size());
    parts[static_cast<std::size_t>(node_)] = alone() ? input + rank() * slice + begin : outgoing(parity, 0);
    for (std::size_t i = 0; i < others_.size(); ++i) parts[static_cast<std::size_t>(others_[i])] = incoming(parity, i);
    combine(call, std::move(parts), output + begin, std::min(chunk, slice - begin) / call.item_bytes);
  };

  int parity = 0;
  for (std::int64_t begin = 0; begin < slice; begin += chunk, parity = 1 - parity) {
    const std::int64_t bytes = std::min(chunk, slice - begin);
    const std::int64_t side = parity * (staging_bytes() / 2);
    for (std::size_t i = 0; i < others_.size(); ++i) {
      wire_.receive(map_.deputy(others_[i], rank()), incoming(parity, i), part_bytes(others_[i], bytes), receives[parity]);
    }
    if (staged) {
      for (int s = 0; s < size(); ++s) {
        std::memcpy(staging->data(team_.rank()) + side + s * chunk, input + s * slice + begin, static_cast<std::size_t>(bytes));
      }
      team_.sync();
    }
    wire_.wait(sends[parity]);
    for (std::size_t i = 0; i < slices.size(); ++i) {
      const int s = slices[i];
      const char* part = input + s * slice + begin;
      if (!alone()) {
        std::vector<const void*> members;
        for (int m = 0; m < team_.size(); ++m) {
          members.push_back(staged ? staging->data(m) + side + s * chunk
                                   : reach_[static_cast<std::size_t>(m)] + s * slice + begin);
        }
        kernels::sum_ranks_wide(outgoing(parity, i), members.data(), team_.size(), bytes / call.item_bytes, call.real);
        part = outgoing(parity, i);
      }
      if (i > 0) post(s, part, part_bytes(node_, bytes), sends[parity]);
    }
    if (begin > 0) finish(begin - chunk, 1 - parity);
  }
  if (slice > 0) finish((slice - 1) / chunk * chunk, 1 - parity);
  wire_.wait(sends[0]);
  wire_.wait(sends[1]);
  if (!alone()) team_.sync();
}

// Shows the ranks of this node what each of them has of one chunk of every slice.
void ClusterImpl::spread(std::int64_t slice, std::int64_t begin, std::int64_t bytes, std::int64_t side, char* full) {
  const std::int64_t chunk = chunk_bytes();
  const bool staged = reach_.empty();
  const Buffer::Impl* staging = staged ? &this->staging() : nullptr;
  if (staged) {
    for (int s : slices_of(team_.rank())) {
      std::memcpy(staging->data(team_.rank()) + side + s * chunk, full + s * slice + begin, static_cast<std::size_t>(bytes));
    }
  }
  team_.sync();
  for (int member = 0; member < team_.size(); ++member) {
    if (member == team_.rank()) continue;
    for (int s : slices_of(member)) {
      const char* from =
          staged ? staging->data(member) + side + s * chunk : reach_[static_cast<std::size_t>(member)] + s * slice + begin;
      kernels::bulk_copy(full + s * slice + begin, from, bytes);
    }
  }
}

void ClusterImpl::do_all_gather(const Call& call, const char* shard, char* full) {
  const std::int64_t slice = call.bytes();
  const std::int64_t chunk = chunk_bytes();
  char* const own = full + rank() * slice;
  if (shard != own && slice > 0) kernels::bulk_copy(own, shard, slice);
  const auto& slices = slices_of(team_.rank());
  Wire::Pending sends;
  Wire::Pending receives[2];
  int parity = 0;
  const auto start = [&](std::int64_t begin, int p) {
    if (begin >= slice) return;
    const std::int64_t bytes = std::min(chunk, slice - begin);
    for (std::size_t i = 1; i < slices.size(); ++i)
      wire_.receive(slices[i], full + slices[i] * slice + begin, bytes, receives[p]);
    for (int node : others_) post(map_.deputy(node, rank()), own + begin, bytes, sends);
  };
  start(0, 0);
  for (std::int64_t begin = 0; begin < slice; begin += chunk, parity = 1 - parity) {
    start(begin + chunk, 1 - parity);
    wire_.wait(receives[parity]);
    if (!alone()) spread(slice, begin, std::min(chunk, slice - begin), parity * (staging_bytes() / 2), full);
  }
  wire_.wait(sends);
  if (!alone()) team_.sync();
}

void ClusterImpl::do_all_reduce(const Call& call, char* data) {
  // In blocks, padded to a multiple of N, through memory of our own.
  reach_.clear();
  const std::int64_t block = chunk_bytes() * size();
  std::vector<char> padded;
  for (std::int64_t begin = 0; begin < call.bytes(); begin += block) {
    const std::int64_t bytes = std::min(block, call.bytes() - begin);
    Call part = call;
    part.count = (bytes / call.item_bytes + size() - 1) / size();
    padded.assign(static_cast<std::size_t>(part.bytes() * size()), '\0');
    std::memcpy(padded.data(), data + begin, static_cast<std::size_t>(bytes));
    char* const own = padded.data() + rank() * part.bytes();
    do_reduce_scatter(part, padded.data(), own);
    do_all_gather(part, own, padded.data());
    std::memcpy(data + begin, padded.data(), static_cast<std::size_t>(bytes));
  }
}

void ClusterImpl::do_broadcast(const Call& call, char* data) {
  const int root = call.root;
  const bool at_home = map_.node_of[static_cast<std::size_t>(root)] == node_;
  const int source = at_home ? root : map_.deputy(node_, root);  // of this node
  const Buffer::Impl* staging = alone() ? nullptr : &this->staging();
  const int member = map_.index_of[static_cast<std::size_t>(source)];
  const std::int64_t half = std::min(staging_bytes() / 2, kMaxMessage);
  std::int64_t side = 0;
  Wire::Pending sends;
  for (std::int64_t begin = 0; begin < call.bytes(); begin += half, side = half - side) {
    const std::int64_t bytes = std::min(half, call.bytes() - begin);
    if (rank() == root) {
      for (int node : others_) post(map_.deputy(node, root), data + begin, bytes, sends);
    } else if (rank() == source) {
      Wire::Pending receives;
      wire_.receive(root, data + begin, bytes, receives);
      wire_.wait(receives);
    }
    if (staging == nullptr) continue;
    if (rank() == source) std::memcpy(staging->data(member) + side, data + begin, static_cast<std::size_t>(bytes));
    team_.sync();
    if (rank() != source) kernels::bulk_copy(data + begin, staging->data(member) + side, bytes);
  }
  wire_.wait(sends);
}

}  // namespace zero
