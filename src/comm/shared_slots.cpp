#include "comm/shared_slots.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <string>

#include "comm/window.h"
#include "core/check.h"

namespace zero {
namespace {

std::vector<SlotOffer> meet(const SwapOffers& swap, const std::function<void(SlotOffer&)>& step) {
  SlotOffer mine;
  try {
    step(mine);
  } catch (const c10::Error& error) {
    std::strncpy(mine.error, error.msg().c_str(), sizeof mine.error - 1);
  }
  auto all = swap(mine);
  for (std::size_t r = 0; r < all.size(); ++r)
    ZERO_CHECK(all[r].error[0] == '\0', "making a communicator: rank ", r, ": ", all[r].error);
  return all;
}

}  // namespace

std::shared_ptr<Slot> share_slots(const SwapOffers& swap, int rank, int leader, int count) {
  const auto bytes = static_cast<std::int64_t>(sizeof(Slot)) * count;
  std::shared_ptr<Mapping> memory;
  const auto offers = meet(swap, [&](SlotOffer& offer) {
    if (rank != leader) return;
    memory = Mapping::create(bytes, true);
    for (int i = 0; i < count; ++i) new (memory->data() + static_cast<std::ptrdiff_t>(sizeof(Slot)) * i) Slot;
    const auto token = token_of(memory, true);
    std::memcpy(offer.token, token.data(), std::min(token.size(), sizeof offer.token));
  });
  meet(swap, [&](SlotOffer&) {
    if (leader >= 0 && rank != leader)
      memory = from_token({offers[static_cast<std::size_t>(leader)].token, sizeof SlotOffer::token}, bytes, true);
  });
  if (memory == nullptr) return nullptr;
  memory->close_fd();
  return {memory, reinterpret_cast<Slot*>(memory->data())};
}

}  // namespace zero
