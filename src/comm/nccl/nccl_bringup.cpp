// How the ranks of an NcclImpl find each other. Every step is agreed on before the next, so that an error on one rank is an error on
// all, by name, and nobody is left waiting inside NCCL.
#include <cstring>
#include <map>
#include <utility>

#include "comm/errors.h"
#include "comm/nccl/nccl_impl.h"
#include "comm/nccl/nccl_queue.h"
#include "comm/team.h"
#include "core/check.h"

namespace zero {
namespace {

// After the timeout of a rank, so much longer it waits to hear who else has got stuck.
constexpr std::chrono::milliseconds kGrace = std::chrono::seconds(5);

std::string here(const Communicator& control) {
  return detail::text("rank ", control.rank(), " of ", control.size(), " (nccl): making the communicator");
}

// Everybody's message, '+' and what `step` returns; if it throws on some rank, this throws on all.
template <typename Step>
std::vector<std::string> agreed(const Communicator& control, const char* what, const Step& step) {
  std::string mine;
  try {
    mine = '+' + step();
  } catch (const c10::Error& error) {
    mine = '-' + error.msg();
  } catch (const std::exception& error) {
    mine = std::string("-") + error.what();
  }
  auto all = control.exchange(mine, what);
  for (std::size_t r = 0; r < all.size(); ++r) {
    if (all[r][0] == '-') throw AgreedError(detail::text(here(control), ": rank ", r, ": ", all[r].substr(1)));
    all[r].erase(0, 1);
  }
  return all;
}

void expect_devices_apart(const Communicator& control, const std::vector<std::string>& identities) {
  std::map<std::string, std::vector<int>> users;
  for (std::size_t r = 0; r < identities.size(); ++r) users[identities[r]].push_back(static_cast<int>(r));
  for (const auto& [identity, ranks] : users) {
    if (ranks.size() == 1) continue;
    throw AgreedError(
        detail::text(here(control), ": ", name_ranks(ranks), " use one GPU (", identity,
                     "), which NCCL can't: start no more ranks than there are GPUs, give each its own (ZERO_DEVICE, "
                     "CUDA_VISIBLE_DEVICES), or use zero::make_staged_communicator()"));
  }
}

void expect_one_version(const Communicator& control, const std::vector<std::string>& versions) {
  for (std::size_t r = 1; r < versions.size(); ++r) {
    if (versions[r] == versions[0]) continue;
    throw AgreedError(detail::text(here(control), ": rank 0 has NCCL ", versions[0], " but rank ", r, " has ", versions[r],
                                   ": install the same LibTorch on every node"));
  }
}

// Joins, and finds out whether all have. One that fails at once tells the others, which are waiting inside NCCL, by the control.
void join(const Communicator& control, NcclComm& comm, const ncclUniqueId& id) {
  std::string stuck;
  const auto policy = comm.policy;
  auto patience = policy;
  patience.timeout = policy.timeout + kGrace;
  try {
    comm.join(id, control.rank(), control.size());
  } catch (const NcclTimeout& error) {
    stuck = error.msg();
    patience.timeout = std::min(policy.timeout, kGrace);
  } catch (const PeerFailure& error) {
    comm.abort();
    throw PeerFailure(detail::text(here(control), ": rank ", error.origin, ' ', error.why), error.origin, error.why);
  } catch (const c10::Error& error) {
    comm.abort();
    control.fail(error.msg());
    ZERO_FAIL(here(control), ": ", error.msg());
  }
  if (!stuck.empty()) comm.abort();
  control.set_wait_policy(patience);
  std::vector<std::string> all;
  try {
    all = control.exchange(stuck.empty() ? "" : "stuck", "connecting NCCL");
  } catch (const c10::Error& error) {  // a rank hasn't come so far: the control names it
    comm.abort();
    ZERO_FAIL(here(control), ": ", stuck, stuck.empty() ? "" : "; ", error.msg());
  }
  control.set_wait_policy(policy);
  std::vector<int> ranks;
  for (std::size_t r = 0; r < all.size(); ++r)
    if (!all[r].empty()) ranks.push_back(static_cast<int>(r));
  if (ranks.empty()) return;
  comm.abort();
  throw AgreedError(
      detail::text(here(control), ": NCCL hasn't connected ", name_ranks(ranks), " within ", readable(policy.timeout),
                   ", the timeout (set by WaitPolicy or ZERO_TIMEOUT_SECONDS): see what NCCL_DEBUG=INFO says on them"));
}

}  // namespace

std::shared_ptr<NcclImpl> NcclImpl::bring_up(Communicator control, const MakeDevice& make_device, const MakeApi& make_api) {
  std::shared_ptr<NcclComm> comm;
  const auto policy = control.wait_policy();
  const auto identities = agreed(control, "comparing devices", [&] {
    auto device = make_device();
    comm = std::make_shared<NcclComm>(make_api(), device);
    return device->identity();
  });
  expect_devices_apart(control, identities);
  expect_one_version(control, agreed(control, "comparing NCCL", [&] { return nccl_version_text(comm->api().version); }));
  ncclUniqueId id{};
  const auto ids = agreed(control, "the id of a communicator", [&] {
    if (control.rank() != 0) return std::string();
    const ncclResult_t result = comm->api().GetUniqueId(&id);
    ZERO_CHECK(result == ncclSuccess, "ncclGetUniqueId: ", comm->api().GetErrorString(result));
    return std::string(id.internal, sizeof id.internal);
  });
  std::memcpy(id.internal, ids[0].data(), sizeof id.internal);
  comm->policy = policy;
  comm->watch = [impl = control.impl()] { impl->check_failures(); };
  join(control, *comm, id);
  return std::make_shared<NcclImpl>(std::move(control), std::move(comm));
}

Communicator NcclImpl::make(const Communicator& control, const MakeDevice& device, const MakeApi& api) {
  ZERO_CHECK(control.defined(), "zero::make_nccl_communicator: the control communicator is not attached to any ranks");
  ZERO_CHECK(control.device().is_cpu(), "zero::make_nccl_communicator: the control communicator must be one of the CPU, not ",
             control.backend());
  return Communicator(bring_up(control.duplicate(), device, api));
}

std::shared_ptr<CommunicatorImpl> NcclImpl::split(Call call, int color, int key) {
  std::shared_ptr<CommunicatorImpl> formed;
  guarded(call, [&] {
    enter(call);
    auto control = control_.impl()->split(call, color, key);
    if (control == nullptr) return;
    control->set_wait_policy(comm_->policy);
    formed = bring_up(
        Communicator(std::move(control)), [this] { return comm_->device(); }, [this] { return comm_->api(); });
  });
  return formed;
}

std::shared_ptr<QueueImpl> NcclImpl::open_queue(Call call) {
  std::shared_ptr<QueueImpl> queue;
  guarded(call, [&] {
    enter(call);
    control_.impl()->exchange(call, {});
    queue = std::make_shared<NcclQueue>(*this, call.what);
  });
  return queue;
}

}  // namespace zero
