// The slots of a node whose ranks are processes: made by one of them, opened by the others. For MPI's ranks and zero-run's, which differ
// in how they tell each other where.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "comm/control_block.h"

namespace zero {

/// What a rank tells the others meanwhile.
struct SlotOffer {
  char token[16] = {};  ///< where the memory is, see window.h
  char error[400] = {};
};
/// Collective. Every rank's offer, by rank.
using SwapOffers = std::function<std::vector<SlotOffer>(const SlotOffer&)>;

/// Collective over the ranks that `swap` asks. @throws c10::Error on all of them if one can't
/// @param leader the rank that makes this rank's slots; -1: this rank gets none
std::shared_ptr<Slot> share_slots(const SwapOffers& swap, int rank, int leader, int count);

}  // namespace zero
