// Layout arithmetic, exhaustively for small shapes and by numbers alone for huge ones.
#include "layout/layout.h"

#include <random>

#include "support/catch.h"

using zero::kPage;
using zero::Layout;
using zero::ParameterSpec;

namespace {

ParameterSpec spec(std::int64_t numel, int itemsize = 4, int group = 0, int dtype = 6) {
  ParameterSpec s;
  s.numel = numel, s.itemsize = itemsize, s.group = group, s.dtype = dtype;
  return s;
}

std::vector<int> count_up(std::size_t n, int first = 0) {
  std::vector<int> out;
  for (std::size_t i = 0; i < n; ++i) out.push_back(first + static_cast<int>(i));
  return out;
}

// Everything that must hold of any layout.
void check(const Layout& layout, const std::vector<ParameterSpec>& specs) {
  const int n = layout.ranks();
  for (std::size_t s = 0; s < layout.spaces().size(); ++s) {
    const auto& space = layout.spaces()[s];
    const std::int64_t align = zero::kAlignment / space.itemsize;
    std::int64_t end = 0, shards = 0;
    for (const auto& bucket : space.buckets) {
      REQUIRE(bucket.begin == end);  // buckets follow each other without gaps
      REQUIRE(bucket.shard % align == 0);
      REQUIRE(bucket.shards_before == shards);
      end = bucket.begin + bucket.shard * n;
      shards += bucket.shard;
    }
    REQUIRE(space.size == end);
    REQUIRE(space.shard == shards);
  }
  std::vector<std::int64_t> owned(specs.size(), 0);
  for (std::size_t i = 0; i < specs.size(); ++i) {
    const auto& slot = layout.slot(static_cast<int>(i));
    const auto& space = layout.spaces().at(slot.space);
    const auto& bucket = space.buckets.at(slot.bucket);
    REQUIRE(slot.numel == specs[i].numel);
    REQUIRE(slot.offset % (zero::kAlignment / space.itemsize) == 0);
    REQUIRE(slot.offset >= bucket.begin);
    REQUIRE(slot.offset + slot.numel <= bucket.begin + bucket.shard * n);
    REQUIRE(space.group == specs[i].group);
    REQUIRE(space.dtype == specs[i].dtype);
  }
  for (std::size_t s = 0; s < layout.spaces().size(); ++s) {
    for (std::size_t b = 0; b < layout.spaces()[s].buckets.size(); ++b) {
      const auto& bucket = layout.spaces()[s].buckets[b];
      std::int64_t last_end = -1;
      for (int rank = 0; rank < n; ++rank) {
        for (const auto& segment : layout.segments(s, b, rank)) {
          const auto& slot = layout.slot(segment.parameter);
          REQUIRE(segment.numel > 0);
          REQUIRE(segment.in_space >= last_end);  // monotonic and disjoint over ranks
          last_end = segment.in_space + segment.numel;
          REQUIRE(segment.in_space == slot.offset + segment.in_parameter);
          REQUIRE(segment.in_shard == segment.in_space - bucket.begin - rank * bucket.shard);
          REQUIRE(segment.in_shard >= 0);
          REQUIRE(segment.in_shard + segment.numel <= bucket.shard);
          REQUIRE(segment.in_parameter == owned[segment.parameter]);  // exactly covering, in order
          owned[segment.parameter] += segment.numel;
        }
      }
      std::int64_t whole = 0;
      for (const auto& segment : layout.whole(s, b)) whole += segment.numel;
      std::int64_t members = 0;
      for (int p : bucket.parameters) members += layout.slot(p).numel;
      REQUIRE(whole == members);
    }
  }
  for (std::size_t i = 0; i < specs.size(); ++i) REQUIRE(owned[i] == specs[i].numel);
}

}  // namespace

TEST_CASE("every small pair of sizes, world size and bucket size") {
  for (int ranks = 1; ranks <= 5; ++ranks)
    for (std::int64_t a = 0; a <= 40; ++a)
      for (std::int64_t b : {0, 1, 2, 3, 16, 17, 31, 97})
        for (std::int64_t bucket : {1, 64, 200, 4096}) {
          const std::vector<ParameterSpec> specs{spec(a), spec(b), spec(a + 2 * b), spec(1)};
          Layout layout(ranks, bucket);
          layout.append(specs, count_up(specs.size()));
          check(layout, specs);
        }
}

TEST_CASE("random models of several types and groups") {
  std::mt19937 random(7);
  const int sizes[] = {2, 4, 8, 16};
  for (int round = 0; round < 400; ++round) {
    std::vector<ParameterSpec> specs;
    const int count = 1 + static_cast<int>(random() % 12);
    for (int i = 0; i < count; ++i) {
      const int kind = static_cast<int>(random() % 4);
      specs.push_back(spec(random() % 5 == 0 ? 0 : static_cast<std::int64_t>(random() % 3000), sizes[kind],
                           static_cast<int>(random() % 3), kind));
    }
    Layout layout(1 + static_cast<int>(random() % 8), 1 + static_cast<std::int64_t>(random() % 9000));
    layout.append(specs, count_up(specs.size()));
    check(layout, specs);
  }
}

TEST_CASE("shards from a given size on are whole pages, smaller ones are not") {
  for (const int ranks : {1, 2, 3, 4}) {
    for (const int itemsize : {2, 4, 8, 16}) {
      constexpr std::int64_t kFrom = 3 * kPage;
      Layout layout(ranks, 4 * kFrom, kFrom);
      std::vector<ParameterSpec> specs;
      for (const std::int64_t n : {1, 50000, 7, 20000, 3000, 1, 60001}) specs.push_back(spec(n, itemsize));
      layout.append(specs, count_up(specs.size()));
      check(layout, specs);
      bool large = false, small = false;
      for (int unit = 0; unit < layout.units(); ++unit) {
        const auto bytes = layout.shard_bytes(unit);
        std::int64_t needed = 0;
        for (const int i : layout.members(unit)) needed += layout.slot(i).numel * itemsize;
        if (bytes >= kFrom) {
          large = true;
          REQUIRE(bytes % kPage == 0);
          REQUIRE(bytes * ranks < needed + ranks * kPage + 64 * static_cast<std::int64_t>(layout.members(unit).size()));
        } else {
          small = true;
          REQUIRE(bytes * ranks <= needed + 64 * (ranks + static_cast<std::int64_t>(layout.members(unit).size())));
        }
      }
      REQUIRE((large && small));
    }
  }
}

TEST_CASE("fewer elements than ranks, and a group of nothing") {
  Layout layout(4, 1 << 20);
  const std::vector<ParameterSpec> specs{spec(2), spec(0, 4, 1), spec(3, 4, 2)};
  layout.append(specs, count_up(3));
  check(layout, specs);
  REQUIRE(layout.segments(0, 0, 0).size() == 1);
  for (int rank = 1; rank < 4; ++rank) REQUIRE(layout.segments(0, 0, rank).empty());
  REQUIRE(layout.spaces()[1].size == 0);
}

TEST_CASE("B07 more than 2^31 elements, by arithmetic") {
  for (std::int64_t n : {(std::int64_t{1} << 31) - 1, std::int64_t{1} << 31, (std::int64_t{1} << 31) + 7,
                         (std::int64_t{1} << 32) + 1, std::int64_t{1} << 33, std::int64_t{1} << 40}) {
    for (int ranks : {1, 2, 3, 7, 1024}) {
      Layout layout(ranks, std::int64_t{25} << 20);
      const std::vector<ParameterSpec> specs{spec(5), spec(n), spec(n, 2, 0, 5), spec(11)};
      layout.append(specs, count_up(specs.size()));
      check(layout, specs);
      REQUIRE(layout.padded_numel() >= 2 * n + 16);
      REQUIRE(layout.padded_numel() <= 2 * n + 16 + 5 * 32 * (ranks + 1));
      REQUIRE(layout.padded_bytes() >= 6 * n);
    }
  }
}

TEST_CASE("buckets are closed before they grow beyond their size, and large parameters are alone") {
  Layout layout(2, 400);
  const std::vector<ParameterSpec> specs{spec(40), spec(40), spec(40), spec(1000), spec(8)};
  layout.append(specs, count_up(specs.size()));
  check(layout, specs);
  const auto& buckets = layout.spaces()[0].buckets;
  REQUIRE(buckets.size() == 4);
  REQUIRE(buckets[0].parameters == std::vector<int>{0, 1});
  REQUIRE(buckets[1].parameters == std::vector<int>{2});
  REQUIRE(buckets[2].parameters == std::vector<int>{3});
  REQUIRE(buckets[3].parameters == std::vector<int>{4});
}

TEST_CASE("parameters that come later leave the others where they are") {
  Layout layout(3, 1000);
  std::vector<ParameterSpec> specs{spec(100), spec(50, 4, 1)};
  layout.append(specs, count_up(2));
  const auto before = layout.segments(0, 0, 1);
  const std::vector<ParameterSpec> later{spec(70), spec(9, 8, 1, 7)};
  layout.append(later, {2, 3});
  specs.insert(specs.end(), later.begin(), later.end());
  check(layout, specs);
  const auto after = layout.segments(0, 0, 1);
  REQUIRE(after.size() == before.size());
  REQUIRE(after[0].in_space == before[0].in_space);
  REQUIRE(layout.slot(2).space == 2);
  REQUIRE(layout.slot(17).space == -1);
  REQUIRE_THROWS(layout.append({spec(1)}, {2}));
}

TEST_CASE("the shard group may be smaller than the world") {
  // Hybrid sharding: eight ranks in two shard groups of four; arithmetic knows only the group.
  Layout group(4, 1 << 20);
  const std::vector<ParameterSpec> specs{spec(1001)};
  group.append(specs, {0});
  check(group, specs);
  REQUIRE(group.spaces()[0].shard == 256);
}

TEST_CASE("nonsense is refused") {
  REQUIRE_THROWS(Layout(0, 1));
  REQUIRE_THROWS(Layout(1, 0));
}
