// What a checkpoint says about itself (manifest.json): which tensors there are, and in which file each run of their elements lies.
// No tensors and no LibTorch here.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <tuple>
#include <variant>
#include <vector>

namespace zero::checkpoint {

/// Written by this library. A reader refuses what is newer than its own.
inline constexpr int kVersion = 1;
inline constexpr const char* kManifestName = "manifest.json";

/// A small tensor that isn't cut: the bytes of its elements.
struct Blob {
  std::string dtype;
  std::vector<std::int64_t> shape;
  std::string bytes;
  bool operator==(const Blob& other) const { return dtype == other.dtype && shape == other.shape && bytes == other.bytes; }
};
using Scalar = std::variant<bool, std::int64_t, double, std::string, Blob>;
using Scalars = std::map<std::string, Scalar>;

/// A run of a tensor's elements, in the order in which they lie in memory, and where it is.
struct Fragment {
  int file = 0;             ///< in Manifest::files
  std::int64_t begin = 0;   ///< the first element
  std::int64_t count = 0;   ///< > 0
  std::int64_t offset = 0;  ///< of its first byte in the file
  std::uint64_t checksum = 0;
};

struct TensorEntry {
  std::string kind;   ///< "parameter", "buffer", "master", "state", "options", "random", "extra"
  std::string name;   ///< the parameter's or buffer's
  std::string field;  ///< of state: "exp_avg"; of a random generator: the rank
  std::string dtype;  ///< as safetensors names it, and "C64", "C128"
  std::vector<std::int64_t> shape;
  std::vector<std::int64_t> strides;  ///< in which elements are counted: dense, so an order of dimensions
  std::vector<Fragment> fragments;    ///< by begin; together every element once

  std::int64_t numel() const;
  int itemsize() const;
  /// "exp_avg of 'fc.weight'"
  std::string title() const;
  using Key = std::tuple<std::string, std::string, std::string>;
  Key key() const { return {kind, name, field}; }
};

struct FileEntry {
  std::string name;
  std::int64_t bytes = 0;
};

struct Manifest {
  std::int64_t step = 0;
  int ranks = 0, stage = 0;
  std::string optimizer;  ///< the wrapped class
  int groups = 0;
  std::map<std::string, std::string> options;  ///< of the groups, for people
  Scalars loss_scale;                          ///< empty: losses weren't scaled
  Scalars extra;                               ///< the user's
  std::map<std::string, Scalars> states;       ///< by parameter: what is there once per parameter. No entry: no state
  std::vector<FileEntry> files;
  std::vector<TensorEntry> tensors;

  const TensorEntry* find(const std::string& kind, const std::string& name, const std::string& field = {}) const;
};

/// The manifest as a file: JSON with a checksum over its body.
std::string to_json(const Manifest& manifest);
/// @param where names the file in errors. @throws c10::Error if it isn't a manifest, is damaged, or of a newer version
Manifest from_json(const std::string& text, const std::string& where);
/// Of another version of the format than this library reads? Then the rest of it says nothing to us.
bool is_newer(const std::string& text);

/// One manifest of the ranks' parts, each of which has one file and the fragments in it. @throws if they don't make whole tensors
Manifest merge(const std::vector<Manifest>& parts);
/// @throws c10::Error naming the first tensor that isn't whole, or the first range that isn't in its file
void check_complete(const Manifest& manifest, const std::string& where);
/// The manifest of a folder, checked against the files that are there. @throws c10::Error naming what is wrong
Manifest read_manifest(const std::string& folder);

/// Bytes of an element. @throws c10::Error for a type that the format doesn't have
int itemsize_of(const std::string& dtype);
std::int64_t numel_of(const std::vector<std::int64_t>& shape);

}  // namespace zero::checkpoint
