// Do all ranks have the same? Compared by hash, and spelled out only if they differ.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "zero/communicator.h"

namespace zero {

/// What is compared: "shape of 'fc.weight' (group 0, #2)" → "[3, 4]".
using Facts = std::vector<std::pair<std::string, std::string>>;

/// 64-bit FNV-1a: no cryptography needed, only that a difference shows.
std::uint64_t hash_bytes(const void* data, std::size_t bytes, std::uint64_t seed = 0xcbf29ce484222325ULL);
std::uint64_t hash_facts(const Facts& facts);

/// Collective. @throws c10::Error, the same on every rank, naming the first fact on which ranks differ and both values.
/// @param about how the message starts: "the ranks' parameters differ"
void agree(const Communicator& comm, const Facts& facts, const std::string& about);

/// Collective; to be called when the hashes are known to differ.
[[noreturn]] void throw_first_difference(const Communicator& comm, const Facts& facts, const std::string& about);

/// Collective. Every rank says whether it has a problem (empty: none); if any has, all throw the same error, with the first such
/// rank's words. So a check that fails on one rank only leaves nobody waiting.
void throw_together(const Communicator& comm, const std::string& problem);

}  // namespace zero
