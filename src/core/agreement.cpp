#include "core/agreement.h"

#include <algorithm>
#include <sstream>

#include "core/check.h"

namespace zero {
namespace {

// Each fact as two length-prefixed strings, so that any text survives.
std::string pack(const Facts& facts) {
  std::string out;
  auto put = [&](const std::string& s) {
    const std::uint64_t n = s.size();
    out.append(reinterpret_cast<const char*>(&n), sizeof n).append(s);
  };
  for (const auto& [key, value] : facts) put(key), put(value);
  return out;
}

Facts unpack(const std::string& packed) {
  Facts out;
  std::size_t at = 0;
  auto get = [&] {
    std::uint64_t n = 0;
    std::copy_n(packed.data() + at, sizeof n, reinterpret_cast<char*>(&n));
    at += sizeof n;
    std::string s = packed.substr(at, n);
    at += n;
    return s;
  };
  while (at + sizeof(std::uint64_t) <= packed.size()) {
    auto key = get();
    out.emplace_back(std::move(key), get());
  }
  return out;
}

}  // namespace

std::uint64_t hash_bytes(const void* data, std::size_t bytes, std::uint64_t h) {
  const auto* p = static_cast<const unsigned char*>(data);
  for (std::size_t i = 0; i < bytes; ++i) h = (h ^ p[i]) * 0x100000001b3ULL;
  return h;
}

std::uint64_t hash_facts(const Facts& facts) {
  const auto packed = pack(facts);
  return hash_bytes(packed.data(), packed.size());
}

void agree(const Communicator& comm, const Facts& facts, const std::string& about) {
  if (comm.size() == 1) return;
  const std::uint64_t mine = hash_facts(facts);
  const auto all = comm.exchange(std::string(reinterpret_cast<const char*>(&mine), sizeof mine), about);
  if (std::all_of(all.begin(), all.end(), [&](const std::string& h) { return h == all[0]; })) return;
  throw_first_difference(comm, facts, about);
}

void throw_first_difference(const Communicator& comm, const Facts& facts, const std::string& about) {
  const auto all = comm.exchange(pack(facts), about);
  const auto first = unpack(all[0]);
  for (std::size_t i = 0;; ++i) {
    bool more = i < first.size();
    for (int r = 1; r < comm.size(); ++r) {
      const auto theirs = unpack(all[r]);
      more = more || i < theirs.size();
      const bool have0 = i < first.size(), have = i < theirs.size();
      if (have0 && have && first[i] == theirs[i]) continue;
      if (!have0 && !have) continue;
      std::ostringstream out;
      out << about << ": ";
      if (have0 && have && first[i].first == theirs[i].first) {
        out << first[i].first << " is " << first[i].second << " on rank 0 and " << theirs[i].second << " on rank " << r;
      } else {
        auto say = [](const Facts& f, std::size_t k) {
          return k < f.size() ? f[k].first + " = " + f[k].second : "nothing more";
        };
        out << "rank 0 has " << say(first, i) << ", rank " << r << " has " << say(theirs, i);
      }
      ZERO_FAIL(out.str());
    }
    if (!more) break;
  }
  ZERO_FAIL(about, ": the hashes differ, but not the facts");
}

void throw_together(const Communicator& comm, const std::string& problem) {
  const auto all = comm.exchange(problem, "agreeing that no rank has an error");
  for (int r = 0; r < comm.size(); ++r)
    if (!all[r].empty()) ZERO_FAIL(comm.size() > 1 ? "rank " + std::to_string(r) + ": " : std::string(), all[r]);
}

}  // namespace zero
