// Reads elements of a checkpoint into memory of any type, order of dimensions and device.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>
#include <vector>

#include "checkpoint/file.h"
#include "checkpoint/manifest.h"

namespace zero::checkpoint {

class Reader {
 public:
  Reader(std::string folder, const Manifest& manifest);

  /// Elements [begin, begin + count) of the tensor, counted in `strides`, into the 1-D tensor `to`: straight from the file where type and
  /// order are the same and it is in host memory; through a megabyte where only the type is another; through the whole tensor where
  /// the order of dimensions is another.
  void read(const TensorEntry& tensor, at::IntArrayRef strides, std::int64_t begin, std::int64_t count, const at::Tensor& to);
  /// All of it, on the CPU, as it was saved.
  at::Tensor read_whole(const TensorEntry& tensor);

  /// Reads rank `rank`'s share of all fragments and compares their checksums. @throws c10::Error naming the first damaged file
  void verify_share(int rank, int ranks);

 private:
  const File& file(int number);
  std::string folder_;
  const Manifest& manifest_;
  std::vector<std::optional<File>> files_;
};

}  // namespace zero::checkpoint
