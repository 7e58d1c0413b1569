// Set-up, agreement and small messages of ranks on several nodes; cluster_collectives.cpp moves the data. See cluster_impl.h.
#include "comm/cluster_impl.h"

#include <algorithm>
#include <cstring>
#include <exception>
#include <utility>

#include "comm/mpi_bringup.h"

namespace zero {
namespace {

void append(std::string& packed, const std::string& text) {
  const auto length = static_cast<std::int64_t>(text.size());
  packed.append(reinterpret_cast<const char*>(&length), sizeof length);
  packed += text;
}

std::string take(const std::string& packed, std::size_t& at) {
  std::int64_t length = 0;
  std::memcpy(&length, packed.data() + at, sizeof length);
  at += sizeof length;
  auto text = packed.substr(at, static_cast<std::size_t>(length));
  at += static_cast<std::size_t>(length);
  return text;
}

std::vector<int> far_ranks(const NodeMap& map, int rank) {
  std::vector<int> far;
  for (std::size_t r = 0; r < map.node_of.size(); ++r) {
    if (map.node_of[r] != map.node_of[static_cast<std::size_t>(rank)]) far.push_back(static_cast<int>(r));
  }
  return far;
}

}  // namespace

void NodeMap::add(int rank, int leader) {
  const auto place = std::find(leaders.begin(), leaders.end(), leader);
  const auto node = static_cast<std::size_t>(place - leaders.begin());
  if (place == leaders.end()) {
    leaders.push_back(leader);
    nodes.emplace_back();
  }
  node_of.push_back(static_cast<int>(node));
  index_of.push_back(ranks_on(static_cast<int>(node)));
  nodes[node].push_back(rank);
}

int NodeMap::deputy(int node, int s) const {
  const auto& ranks = nodes[static_cast<std::size_t>(node)];
  return ranks[static_cast<std::size_t>(index_of[static_cast<std::size_t>(s)]) % ranks.size()];
}

ClusterImpl::ClusterImpl(int rank, Team::Setup setup, std::shared_ptr<OwnedComm> comm, NodeMap map)
    : TeamImpl(rank, std::move(setup)),
      map_(std::move(map)),
      node_(map_.node_of[static_cast<std::size_t>(rank)]),
      wire_(std::move(comm), team_, far_ranks(map_, rank)) {
  for (int node = 0; node < nodes(); ++node) {
    if (node != node_) others_.push_back(node);
  }
  for (int member = 0; member < team_.size(); ++member) {
    const int owner = team_.rank_in_world(member);
    slices_of_.push_back({owner});
    for (int s = 0; s < size(); ++s) {
      if (map_.node_of[static_cast<std::size_t>(s)] != node_ && map_.deputy(node_, s) == owner) slices_of_.back().push_back(s);
    }
  }
  team_.progress = [this] { wire_.poll(); };
}

ClusterImpl::~ClusterImpl() {
  if (std::uncaught_exceptions() > 0) {
    ClusterImpl::fail("an exception ended its work");
  } else {
    wire_.tell(false, rank(), {});
  }
}

std::vector<std::string> ClusterImpl::swap(const std::string& mine) {
  team_.patience = std::chrono::milliseconds(0);
  const auto here = team_.exchange(nullptr, mine);
  team_.patience = 2 * kPatience;  // from here on the ranks of this node may be waiting for those of others
  std::string everything;
  if (team_.rank() == 0) {
    std::string ours;
    for (const auto& text : here) append(ours, text);
    std::vector<int> leaders;
    for (int node : others_) leaders.push_back(map_.leaders[static_cast<std::size_t>(node)]);
    auto packs = wire_.swap(leaders, ours);
    packs.insert(packs.begin() + node_, std::move(ours));
    std::vector<std::size_t> at(packs.size(), 0);
    for (int r = 0; r < size(); ++r) {
      const auto node = static_cast<std::size_t>(map_.node_of[static_cast<std::size_t>(r)]);
      append(everything, take(packs[node], at[node]));
    }
  }
  if (!alone()) everything = team_.exchange(nullptr, everything)[0];
  std::vector<std::string> all;
  std::size_t at = 0;
  for (int r = 0; r < size(); ++r) all.push_back(take(everything, at));
  return all;
}

std::vector<std::string> ClusterImpl::enter_with(const Call& call, const std::string& mine) {
  auto all = swap(std::string(reinterpret_cast<const char*>(&call), sizeof call) + mine);
  std::vector<Call> calls(all.size());
  for (std::size_t r = 0; r < all.size(); ++r) {
    std::memcpy(static_cast<void*>(&calls[r]), all[r].data(), sizeof(Call));
    all[r].erase(0, sizeof(Call));
  }
  compare(calls, all);
  resolve([&](int member) -> const Call& { return calls[static_cast<std::size_t>(team_.rank_in_world(member))]; });
  if (call.op == Op::exchange) traffic_.between_nodes_bytes += static_cast<std::int64_t>(mine.size()) * (nodes() - 1);
  return all;
}

void ClusterImpl::enter(const Call& call, const void* /*bytes*/, std::int64_t /*count*/) { enter_with(call, {}); }

std::shared_ptr<CommunicatorImpl> ClusterImpl::form(const std::vector<int>& /*members*/, int color, int key) {
  return split_mpi(wire_.comm(), color, key, wait_policy());
}

}  // namespace zero
