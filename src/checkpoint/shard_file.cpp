#include "checkpoint/shard_file.h"

#include <algorithm>

#include "checkpoint/checksum.h"
#include "checkpoint/safetensors.h"
#include "core/check.h"

namespace zero::checkpoint {
namespace {

constexpr std::int64_t kChunk = std::int64_t{1} << 20;  // fits a cache: what is hashed is written from there

// The names that the file shows: a parameter's own where it is whole.
std::string name_in_file(const Run& run) {
  const auto& t = run.tensor;
  std::string name = t.kind == "parameter" || t.kind == "buffer" ? t.name : "zero/" + t.kind + "/" + t.name;
  if (!t.field.empty()) name += "/" + t.field;
  if (run.count != t.numel()) name += "[" + std::to_string(run.begin) + ":" + std::to_string(run.begin + run.count) + "]";
  return name;
}

bool is_row_major(const TensorEntry& t) {
  std::int64_t next = 1;
  for (auto d = t.shape.size(); d-- > 0; next *= t.shape[d])
    if (t.shape[d] != 1 && t.strides[d] != next) return false;
  return true;
}

StoredTensor stored(const Run& run) {
  const auto type = stored_type(run.tensor.dtype);
  StoredTensor out{name_in_file(run), type.dtype, {run.count}};
  if (run.count == run.tensor.numel() && is_row_major(run.tensor)) out.shape = run.tensor.shape;
  if (type.numbers > 1) out.shape.push_back(type.numbers);
  return out;
}

}  // namespace

Manifest write_shard(const std::string& folder, const std::string& name, const std::vector<Run>& runs,
                     const std::function<bool()>& cancelled) {
  StoredFile layout;
  layout.metadata["format"] = "zero";
  for (const auto& run : runs)
    if (run.count > 0) layout.tensors.push_back(stored(run));
  const auto header = lay_out(layout);
  const auto file = File::create(folder + "/" + name);
  file.reserve(layout.bytes);
  file.write(header.data(), static_cast<std::int64_t>(header.size()), 0);

  Manifest out;
  out.files.push_back({name, layout.bytes});
  std::size_t next = 0;
  for (const auto& run : runs) {
    out.tensors.push_back(run.tensor);
    if (run.count == 0) continue;
    const auto& place = layout.tensors[next++];
    const auto bytes = run.bytes();
    Checksum sum;
    for (std::int64_t at = 0; at < place.bytes(); at += kChunk) {
      if (cancelled && cancelled()) ZERO_FAIL("writing ", file.path(), " was given up");
      const auto n = std::min(kChunk, place.bytes() - at);
      const auto* from = static_cast<const char*>(bytes.get()) + at;
      sum.add(from, n);
      file.write(from, n, place.begin + at);
    }
    file.start_writing(place.begin, place.bytes());
    out.tensors.back().fragments.push_back({0, run.begin, run.count, place.begin, sum.value()});
  }
  file.sync();
  return out;
}

void read_elements(const TensorEntry& tensor, std::int64_t begin, std::int64_t count, void* to,
                   const std::function<const File&(int file)>& open) {
  const auto itemsize = tensor.itemsize();
  for (const auto& f : tensor.fragments) {
    const auto first = std::max(begin, f.begin), last = std::min(begin + count, f.begin + f.count);
    if (first >= last) continue;
    open(f.file).read(static_cast<char*>(to) + (first - begin) * itemsize, (last - first) * itemsize,
                      f.offset + (first - f.begin) * itemsize);
  }
}

std::string verify(const Manifest& manifest, const TensorEntry& tensor, const Fragment& fragment, const File& file) {
  std::vector<char> chunk(static_cast<std::size_t>(std::min(kChunk, fragment.count * tensor.itemsize())));
  Checksum sum;
  const auto bytes = fragment.count * tensor.itemsize();
  for (std::int64_t at = 0; at < bytes; at += kChunk) {
    const auto n = std::min(kChunk, bytes - at);
    file.read(chunk.data(), n, fragment.offset + at);
    sum.add(chunk.data(), n);
  }
  if (sum.value() == fragment.checksum) return {};
  return detail::text(file.path(), " is damaged: the checksum of ", tensor.title(), ", elements ", fragment.begin, " to ",
                      fragment.begin + fragment.count, ", is another than when it was written (file ", fragment.file + 1,
                      " of ", manifest.files.size(), ")");
}

std::pair<std::int64_t, std::int64_t> share(std::int64_t bytes, int rank, int ranks) {
  const auto cut = [&](std::int64_t r) { return bytes / ranks * r + bytes % ranks * r / ranks; };
  return {cut(rank), cut(rank + 1)};
}

}  // namespace zero::checkpoint
