// The random numbers of this example: a counter-based generator, so that element n of tensor t, or sequence number s of a run,
// is the same on every rank, for every number of ranks, and in any other program or language.
#pragma once

#include <cstdint>

namespace gpt {

/// Splitmix64 started at `key` and read at position `counter`; all arithmetic modulo 2^64.
constexpr std::uint64_t hash64(std::uint64_t key, std::uint64_t counter) {
  std::uint64_t z = key * 0xD1342543DE82EF95u + (counter + 1) * 0x9E3779B97F4A7C15u;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
  return z ^ (z >> 31);
}

constexpr std::uint64_t kWeightKey = 1234;    ///< tensor number t draws from key kWeightKey + t
constexpr std::uint64_t kBatchKey = 77;       ///< sequence number s starts where hash64(kBatchKey + seed, s) says
constexpr std::uint64_t kGenerateKey = 4242;  ///< byte number n of generated text
constexpr std::uint64_t kPseudoKey = 99;      ///< made-up text for tests and benchmarks

}  // namespace gpt
