#include "checkpoint/safetensors.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <set>

#include "checkpoint/file.h"
#include "checkpoint/manifest.h"
#include "core/check.h"

namespace zero::checkpoint {
namespace {

constexpr std::int64_t kLength = 8;                         // of the header's length
constexpr std::int64_t kAlign = 64;                         // where the data begins
constexpr std::int64_t kLongestHeader = 100 * 1000 * 1000;  // what other readers accept

std::int64_t bytes_of(const StoredTensor& t) { return numel_of(t.shape) * itemsize_of(t.dtype); }

}  // namespace

StoredType stored_type(const std::string& dtype) {
  if (dtype == "C64") return {"F32", 2};
  if (dtype == "C128") return {"F64", 2};
  return {dtype, 1};
}

const StoredTensor* StoredFile::find(const std::string& name) const {
  const auto it = std::find_if(tensors.begin(), tensors.end(), [&](const StoredTensor& t) { return t.name == name; });
  return it == tensors.end() ? nullptr : &*it;
}

std::string lay_out(StoredFile& file) {
  std::vector<std::size_t> order(file.tensors.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
    return itemsize_of(file.tensors[a].dtype) > itemsize_of(file.tensors[b].dtype);
  });
  std::set<std::string> names;
  std::int64_t next = 0;
  for (const auto i : order) {
    auto& t = file.tensors[i];
    ZERO_CHECK(names.insert(t.name).second, "two tensors are called '", t.name, "'");
    t.begin = next;
    t.end = next += bytes_of(t);
  }
  auto json = header_to_json(file, 0);
  json.resize((json.size() + kLength + kAlign - 1) / kAlign * kAlign - kLength, ' ');
  ZERO_CHECK(static_cast<std::int64_t>(json.size()) <= kLongestHeader,
             "too many tensors for one file of safetensors: its header ", "would have ", json.size(), " bytes");
  const auto data_begin = static_cast<std::int64_t>(json.size()) + kLength;
  for (auto& t : file.tensors) t.begin += data_begin, t.end += data_begin;
  file.bytes = data_begin + next;
  std::string length(kLength, '\0');
  for (int i = 0; i < kLength; ++i) length[i] = static_cast<char>(json.size() >> (8 * i) & 0xff);
  return length + json;
}

StoredFile read_header(const std::string& path) {
  const auto file = File::open_to_read(path);
  const auto bytes = file.size();
  unsigned char length[kLength] = {};
  if (bytes < kLength) ZERO_FAIL(path, " is no file of safetensors: it has ", bytes, " bytes");
  file.read(length, kLength, 0);
  std::uint64_t n = 0;
  for (int i = 0; i < kLength; ++i) n |= static_cast<std::uint64_t>(length[i]) << (8 * i);
  if (n > static_cast<std::uint64_t>(std::min(kLongestHeader, bytes - kLength)))
    ZERO_FAIL(path, " is damaged, or no file of safetensors: its header would have ", n, " bytes");
  std::string json(n, '\0');
  file.read(json.data(), static_cast<std::int64_t>(n), kLength);
  auto out = header_from_json(json, kLength + static_cast<std::int64_t>(n), path);
  out.bytes = bytes;
  std::sort(out.tensors.begin(), out.tensors.end(),
            [](const StoredTensor& a, const StoredTensor& b) { return std::tie(a.begin, a.end) < std::tie(b.begin, b.end); });
  std::int64_t next = kLength + static_cast<std::int64_t>(n);
  for (const auto& t : out.tensors) {
    for (const auto size : t.shape)
      if (size < 0) ZERO_FAIL(path, ": the tensor '", t.name, "' has a negative size");
    if (t.begin != next) ZERO_FAIL(path, ": the tensor '", t.name, "' begins at byte ", t.begin, "; expected was ", next);
    if (t.bytes() != bytes_of(t))
      ZERO_FAIL(path, ": the tensor '", t.name, "' has ", t.bytes(), " bytes; its shape needs ", bytes_of(t));
    next = t.end;
  }
  if (next != bytes) ZERO_FAIL(path, " is damaged: it has ", bytes, " bytes; its header speaks of ", next);
  return out;
}

}  // namespace zero::checkpoint
