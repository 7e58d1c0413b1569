// One rank's file: the runs of elements that it writes, as a file of safetensors, and what the manifest says about them.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "checkpoint/file.h"
#include "checkpoint/manifest.h"

namespace zero::checkpoint {

/// A run of a tensor's elements that this rank writes.
struct Run {
  TensorEntry tensor;  ///< without fragments
  std::int64_t begin = 0, count = 0;
  /// Its bytes in host memory, for as long as the pointer lives: called once, when they are written.
  std::function<std::shared_ptr<const void>()> bytes;

  std::int64_t size() const { return count * tensor.itemsize(); }
};

/// Writes `runs` to `folder`/`name`, on the disk when it returns. What isn't in host memory is there one run at a time.
/// @param cancelled is asked now and then; true: throws
/// @returns a manifest of this file and its fragments
Manifest write_shard(const std::string& folder, const std::string& name, const std::vector<Run>& runs,
                     const std::function<bool()>& cancelled = {});

/// Reads elements [begin, begin + count) of a tensor, in the order of its strides, to `to`.
/// @param open gives the opened file of a number
void read_elements(const TensorEntry& tensor, std::int64_t begin, std::int64_t count, void* to,
                   const std::function<const File&(int file)>& open);

/// Reads a fragment once more and compares. @returns what is wrong, or empty
std::string verify(const Manifest& manifest, const TensorEntry& tensor, const Fragment& fragment, const File& file);

/// [first, last) of `bytes` split over ranks as evenly as it goes: rank's part of a list that all ranks have.
std::pair<std::int64_t, std::int64_t> share(std::int64_t bytes, int rank, int ranks);

}  // namespace zero::checkpoint
