// See nccl_comm.h.
#include "comm/nccl/nccl_comm.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <cstdio>
#include <thread>
#include <utility>

#include "core/check.h"

namespace zero {
namespace {

constexpr std::chrono::microseconds kNap{50};

std::chrono::milliseconds since(Clock::time_point began) {
  return std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - began);
}

}  // namespace

NcclComm::NcclComm(NcclApi api, std::shared_ptr<DeviceApi> device)
    : api_(std::move(api)), device_(std::move(device)), stream_(device_) {}

NcclComm::~NcclComm() { abort(); }

void NcclComm::throw_error(ncclResult_t result, const char* call) const {
  const char* more = api_.GetLastError(comm_);
  ZERO_FAIL(call, ": ", api_.GetErrorString(result), more != nullptr && *more != '\0' ? ": " : "", more != nullptr ? more : "",
            " (NCCL ", nccl_version_text(api_.version), "; NCCL_DEBUG=WARN says more)");
}

ncclResult_t NcclComm::async_state() const {
  ncclResult_t state = ncclSuccess;
  const ncclResult_t result = api_.CommGetAsyncError(comm_, &state);
  return result != ncclSuccess ? result : state;
}

void NcclComm::join(const ncclUniqueId& id, int rank, int size) {
  const OnDevice here(*device_);
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 0;  // a peer that never comes must not hold this thread where nobody can end it
  settle(api_.CommInitRankConfig(&comm_, size, id, rank, &config), "ncclCommInitRankConfig");
}

void NcclComm::settle(ncclResult_t result, const char* call) {
  if (result == ncclSuccess) return;
  Backoff backoff(1);
  const auto began = Clock::now();
  bool warned = false;
  while (result == ncclInProgress && comm_ != nullptr) {
    result = async_state();
    if (result != ncclInProgress) break;
    if (backoff.pause()) continue;
    if (watch) watch();
    const auto waited = since(began);
    if (waited >= policy.timeout) {
      throw NcclTimeout(
          detail::text(call, ": waited ", readable(policy.timeout),
                       ", the timeout, for the other ranks to do the same (set by WaitPolicy or ZERO_TIMEOUT_SECONDS)"));
    }
    if (!warned && waited >= policy.warn_after) {
      warned = true;
      std::fprintf(stderr, "zero: %s: has waited %s for the other ranks\n", call, readable(waited).c_str());
    }
    std::this_thread::sleep_for(kNap);
  }
  if (result != ncclSuccess) throw_error(result, call);
}

void NcclComm::check() {
  ZERO_CHECK(alive(), "NCCL's communicator has been aborted, since memory was freed that a rank or a device was stuck with");
  const ncclResult_t state = async_state();
  if (state != ncclSuccess && state != ncclInProgress) throw_error(state, "NCCL has met an error");
}

ncclRedOp_t NcclComm::scaled_sum(ncclDataType_t type, double factor) {
  const auto known = scaled_.find({type, factor});
  if (known != scaled_.end()) return known->second;
  union {
    double f64;
    float f32;
    std::uint16_t bits;
  } scalar{};
  switch (type) {
    case ncclFloat64:
      scalar.f64 = factor;
      break;
    case ncclFloat16:
      scalar.bits = c10::Half(static_cast<float>(factor)).x;
      break;
    case ncclBfloat16:
      scalar.bits = c10::BFloat16(static_cast<float>(factor)).x;
      break;
    default:
      scalar.f32 = static_cast<float>(factor);
      break;
  }
  ncclRedOp_t op = ncclSum;
  settle(api_.RedOpCreatePreMulSum(&op, &scalar, type, ncclScalarHostImmediate, comm_), "ncclRedOpCreatePreMulSum");
  scaled_.emplace(std::pair(type, factor), op);
  return op;
}

void NcclComm::finish(std::chrono::milliseconds patience) noexcept {
  if (comm_ == nullptr) return;
  try {
    policy.timeout = std::min(policy.timeout, patience);
    settle(api_.CommFinalize(comm_), "ncclCommFinalize");
    // Also after an error: Destroy has taken the communicator, and Abort mustn't.
    (void)api_.CommDestroy(std::exchange(comm_, nullptr));
  } catch (const std::exception&) {
    abort();
  }
}

void NcclComm::abort() noexcept {
  if (comm_ != nullptr) (void)api_.CommAbort(std::exchange(comm_, nullptr));
}

}  // namespace zero
