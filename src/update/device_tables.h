// What a DeviceLauncher is handed: the CUDA kernels' own tables.
#pragma once

#include "kernels/cuda/bind.h"
#include "kernels/cuda/decide_body.h"
#include "update/device_pass.h"

namespace zero {

struct DeviceLauncher::Adam : kernels::cuda::AdamTables {};
struct DeviceLauncher::Sgd : kernels::cuda::SgdTables {};

}  // namespace zero
