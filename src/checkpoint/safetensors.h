// Files in safetensors' format: 8 bytes of length, a JSON header of names, types, shapes and byte ranges, then the data, without gaps.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace zero::checkpoint {

struct StoredTensor {
  std::string name;
  std::string dtype;
  std::vector<std::int64_t> shape;
  std::int64_t begin = 0, end = 0;  ///< of its bytes, from the start of the file

  std::int64_t bytes() const { return end - begin; }
};

struct StoredFile {
  std::vector<StoredTensor> tensors;  ///< in the order of their bytes
  std::map<std::string, std::string> metadata;
  std::int64_t bytes = 0;  ///< of the whole file

  const StoredTensor* find(const std::string& name) const;
};

/// Places tensors one after the other, those of wide elements first, so that each is aligned to its elements, and makes the
/// header. Fills in `begin`, `end` and `bytes`; the order of `file.tensors` stays.
/// @returns what the file begins with
std::string lay_out(StoredFile& file);

/// Reads and checks the header of a file: lengths, ranges without gaps or overlaps, shapes that fit their bytes.
/// @throws c10::Error that names the file
StoredFile read_header(const std::string& path);

/// The JSON of the header without its length. The byte ranges in it count from the start of the data.
std::string header_to_json(const StoredFile& file, std::int64_t data_begin);
StoredFile header_from_json(const std::string& text, std::int64_t data_begin, const std::string& where);

/// Complex numbers are stored as pairs: {"F32", 2}; others as they are.
struct StoredType {
  std::string dtype;
  int numbers = 1;  ///< per element
};
StoredType stored_type(const std::string& dtype);

}  // namespace zero::checkpoint
