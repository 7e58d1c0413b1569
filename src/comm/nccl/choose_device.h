// Which GPU is whose: the rule behind zero::choose_device().
#pragma once

#include <c10/core/Device.h>

#include "zero/communicator.h"

namespace zero {

/// Collective. @param devices how many this rank sees
c10::Device device_of(const Communicator& control, int devices);

}  // namespace zero
