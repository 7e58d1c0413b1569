#include "checkpoint/checksum.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

namespace zero::checkpoint {

struct Checksum::State {
  XXH3_state_t xxh{};
};

Checksum::Checksum() : state_(std::make_unique<State>()) { XXH3_64bits_reset(&state_->xxh); }
Checksum::~Checksum() = default;

void Checksum::add(const void* data, std::int64_t bytes) {
  XXH3_64bits_update(&state_->xxh, data, static_cast<std::size_t>(bytes));
}

std::uint64_t Checksum::value() const { return XXH3_64bits_digest(&state_->xxh); }

std::uint64_t checksum_of(const void* data, std::int64_t bytes) { return XXH3_64bits(data, static_cast<std::size_t>(bytes)); }

}  // namespace zero::checkpoint
