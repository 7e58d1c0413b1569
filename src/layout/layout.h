// Where every element of every parameter lives: pure 64-bit arithmetic, no tensors and no communication.
//
//   parameters of one (group, dtype, device) → one flat Space → Buckets → one shard per rank
//
// A bucket is a contiguous range of its space, padded so that it cuts into N equal shards whose starts are aligned; rank r owns the
// r-th. So one bucket is one contiguous reduce-scatter and one contiguous all-gather, a parameter may span ranks, and a group with
// fewer elements than ranks is no special case. N is the shard group's size, never "the world".
//
// Called by src/reduce (gradients), src/residency (parameters) and src/update (optimizer state), which all share one layout, so
// that a shard of each belongs together.
#pragma once

#include <cstdint>
#include <functional>
#include <tuple>
#include <utility>
#include <vector>

namespace zero {

/// Every parameter and every shard starts at a multiple of this many bytes: full vector loads, and no cache line with two owners.
inline constexpr std::int64_t kAlignment = 64;

/// Shards that may be mapped side by side are whole pages.
inline constexpr std::int64_t kPage = 4096;

/// What the layout must know about a parameter.
struct ParameterSpec {
  std::int64_t numel = 0;
  int itemsize = 4;  ///< bytes per element; a power of two up to 16
  int group = 0;     ///< parameter group (its options)
  int dtype = 0;     ///< element type and
  int device = 0;    ///< device, as small numbers: only compared
};

/// A parameter's place. All offsets and counts are in elements of the space.
struct Slot {
  int space = -1;  ///< -1: the parameter has no place
  int bucket = -1;
  std::int64_t offset = 0;  ///< from the start of the space
  std::int64_t numel = 0;
};

struct Bucket {
  std::int64_t begin = 0;  ///< from the start of the space
  std::int64_t shard = 0;  ///< elements per rank; the bucket has shard × N
  std::int64_t shards_before =
      0;  ///< sum of `shard` over the space's earlier buckets: where a rank's own shard lies in flat state
  std::vector<int> parameters;  ///< in order of their offsets
};

struct Space {
  int group = 0, dtype = 0, device = 0, itemsize = 4;
  std::int64_t size = 0;   ///< padded elements
  std::int64_t shard = 0;  ///< padded elements of one rank
  int first_unit = 0;      ///< number of its first bucket, counted over all spaces
  std::vector<Bucket> buckets;
};

/// The part of one parameter that lies in one rank's shard of one bucket; never empty.
struct Segment {
  int parameter = 0;
  std::int64_t in_parameter = 0;  ///< first element, from the parameter's start
  std::int64_t in_space = 0;      ///< the same element, from the space's start
  std::int64_t in_shard = 0;      ///< the same element, from the start of this rank's shard of the bucket
  std::int64_t numel = 0;
};

class Layout {
 public:
  /// @param ranks N ≥ 1 shards per bucket
  /// @param bucket_bytes a bucket is closed before the parameter that would take it beyond this; a larger parameter is alone in one
  /// @param page_shards_from shards of at least so many bytes are padded to whole pages; 0: none
  Layout(int ranks, std::int64_t bucket_bytes, std::int64_t page_shards_from = 0);

  /// Gives parameters places in new spaces, one per (group, dtype, device) in order of first
  /// appearance. Earlier parameters keep theirs, so that state that exists stays where it is.
  /// @param parameters the index of each spec's parameter, in which slot() and Segment speak of it; new to this layout
  void append(const std::vector<ParameterSpec>& specs, const std::vector<int>& parameters);

  /// The same places for elements of other types: `type_of` gives (dtype, itemsize) for a space's own.
  Layout in_types(const std::function<std::pair<int, int>(int dtype, int itemsize)>& type_of) const;

  int ranks() const { return ranks_; }
  const std::vector<Space>& spaces() const { return spaces_; }
  /// The place of a parameter; space == -1 if it has none.
  const Slot& slot(int parameter) const;

  /// Buckets of all spaces, counted through: what is gathered and reduced as a whole.
  int units() const;
  int unit(int space, int bucket) const { return spaces_[space].first_unit + bucket; }
  int unit_of(int parameter) const { return unit(slot(parameter).space, slot(parameter).bucket); }
  struct Place {
    int space = 0, bucket = 0;
  };
  Place place(int unit) const;
  const Bucket& bucket(int unit) const;
  const std::vector<int>& members(int unit) const { return bucket(unit).parameters; }
  /// Of the whole bucket, and of one rank's shard of it.
  std::int64_t bytes(int unit) const { return shard_bytes(unit) * ranks_; }
  std::int64_t shard_bytes(int unit) const;
  /// Where a parameter begins, from the start of its bucket.
  std::int64_t bytes_in_bucket(int parameter) const;

  /// What rank `rank` owns of a bucket, in order.
  std::vector<Segment> segments(int space, int bucket, int rank) const;
  /// What all ranks own of it: whole parameters, with in_shard counted from the start of the bucket.
  std::vector<Segment> whole(int space, int bucket) const;

  /// Padded elements (Ψ′) and bytes of all spaces.
  std::int64_t padded_numel() const;
  std::int64_t padded_bytes() const;
  /// Bytes of the largest bucket, or buckets.
  std::int64_t largest_bucket_bytes() const { return largest_buckets_bytes(1); }
  std::int64_t largest_buckets_bytes(std::size_t how_many) const;

 private:
  void close(Space& space) const;
  std::vector<Segment> cut(int space, int bucket, std::int64_t lo, std::int64_t hi) const;

  int ranks_;
  std::int64_t bucket_bytes_, page_shards_from_;
  std::vector<Space> spaces_;
  std::vector<Slot> slots_;
};

}  // namespace zero
