// SHA-256 (FIPS 180-4), for naming weight files and texts. Not for secrets.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

namespace gpt {

class Sha256 {
 public:
  void update(const void* data, std::size_t bytes);
  /// Ends the message; the object is used up. 64 hexadecimal digits.
  std::string hex();

 private:
  void block(const unsigned char* data);

  std::array<std::uint32_t, 8> state_{0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                      0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  std::array<unsigned char, 64> pending_{};
  std::uint64_t total_ = 0;
};

std::string sha256_hex(const std::string& bytes);

}  // namespace gpt
