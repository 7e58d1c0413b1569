#include "checkpoint/reader.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>

#include <algorithm>

#include "checkpoint/shard_file.h"
#include "checkpoint/types.h"
#include "core/check.h"

namespace zero::checkpoint {
namespace {

constexpr std::int64_t kChunk = std::int64_t{1} << 18;  // elements that are converted at a time

// Dimensions of one element may have any stride.
bool same_order(const TensorEntry& tensor, at::IntArrayRef strides) {
  for (std::size_t d = 0; d < tensor.shape.size(); ++d)
    if (tensor.shape[d] > 1 && tensor.strides[d] != strides[d]) return false;
  return true;
}

}  // namespace

Reader::Reader(std::string folder, const Manifest& manifest)
    : folder_(std::move(folder)), manifest_(manifest), files_(manifest.files.size()) {}

const File& Reader::file(int number) {
  auto& file = files_.at(number);
  if (!file) file.emplace(File::open_to_read(folder_ + "/" + manifest_.files[number].name));
  return *file;
}

void Reader::read(const TensorEntry& tensor, at::IntArrayRef strides, std::int64_t begin, std::int64_t count,
                  const at::Tensor& to) {
  if (count == 0) return;
  if (!same_order(tensor, strides)) {
    to.copy_(flat_in(read_whole(tensor), strides).narrow(0, begin, count));
    return;
  }
  const auto open = [this](int number) -> const File& { return file(number); };
  const auto type = scalar_type(tensor.dtype);
  if (to.scalar_type() == type && to.device().is_cpu() && to.is_contiguous()) {
    read_elements(tensor, begin, count, to.mutable_data_ptr(), open);
    return;
  }
  const auto chunk = at::empty({std::min(count, kChunk)}, type);
  for (std::int64_t at = 0; at < count; at += kChunk) {
    const auto n = std::min(kChunk, count - at);
    read_elements(tensor, begin + at, n, chunk.mutable_data_ptr(), open);
    to.narrow(0, at, n).copy_(chunk.narrow(0, 0, n));
  }
}

at::Tensor Reader::read_whole(const TensorEntry& tensor) {
  auto out = at::empty_strided(tensor.shape, tensor.strides, scalar_type(tensor.dtype));
  if (out.numel() > 0)
    read_elements(tensor, 0, out.numel(), out.mutable_data_ptr(), [this](int number) -> const File& { return file(number); });
  return out;
}

void Reader::verify_share(int rank, int ranks) {
  std::int64_t total = 0;
  for (const auto& tensor : manifest_.tensors) total += tensor.numel() * tensor.itemsize();
  const auto [from, to] = share(total, rank, ranks);
  std::int64_t at = 0;
  for (const auto& tensor : manifest_.tensors) {
    for (const auto& fragment : tensor.fragments) {
      if (at >= from && at < to) {
        const auto problem = verify(manifest_, tensor, fragment, file(fragment.file));
        if (!problem.empty()) ZERO_FAIL(problem);
      }
      at += fragment.count * tensor.itemsize();
    }
  }
}

}  // namespace zero::checkpoint
