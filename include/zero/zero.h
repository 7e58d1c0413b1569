// Everything that a trainer needs. (zero/mpi.h, which includes mpi.h, is apart.)
#pragma once

#include "zero/checkpoint.h"
#include "zero/communicator.h"
#include "zero/deferred_init.h"
#include "zero/gather.h"
#include "zero/join.h"
#include "zero/loss_scaler.h"
#include "zero/no_sync.h"
#include "zero/optimizer.h"
#include "zero/options.h"
#include "zero/report.h"
#include "zero/thread.h"
