// Non-blocking messages and notices over MPI, see wire.h.
#include "comm/wire.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <new>
#include <thread>
#include <utility>

namespace zero {
namespace {

constexpr int kDataTag = 1;
constexpr int kNoticeTag = 2;
constexpr std::int64_t kFirst = 4096;  // of a control message: its length and as much of it as fits

// What a rank sent before it left may still be on its way when its notice arrives.
constexpr std::chrono::milliseconds kGrace{500};

}  // namespace

Wire::Wire(std::shared_ptr<OwnedComm> comm, Team& team, std::vector<int> far)
    : comm_(std::move(comm)), team_(team), far_(std::move(far)), left_(static_cast<std::size_t>(team.world())) {}

Wire::Pending::~Pending() {
  if (requests.empty() || !mpi_is_up()) return;
  for (std::size_t i = 0; i < requests.size(); ++i) {
    if (requests[i] != MPI_REQUEST_NULL && receives[i]) MPI_Cancel(&requests[i]);
  }
  for (int attempt = 0; attempt < 100; ++attempt) {
    int done = 0;
    if (MPI_Testall(static_cast<int>(requests.size()), requests.data(), &done, MPI_STATUSES_IGNORE) != MPI_SUCCESS) break;
    if (done != 0) return;
  }
  if (keep != nullptr) static_cast<void>(new (std::nothrow) std::shared_ptr<void>(std::move(keep)));
}

void Wire::send(int to, const void* data, std::int64_t bytes, Pending& pending) {
  MPI_Request request = MPI_REQUEST_NULL;
  ZERO_MPI(MPI_Isend(data, static_cast<int>(bytes), MPI_BYTE, to, kDataTag, comm(), &request));
  pending.requests.push_back(request);
  pending.peers.push_back(to);
  pending.receives.push_back(false);
}

void Wire::receive(int from, void* data, std::int64_t bytes, Pending& pending) {
  MPI_Request request = MPI_REQUEST_NULL;
  ZERO_MPI(MPI_Irecv(data, static_cast<int>(bytes), MPI_BYTE, from, kDataTag, comm(), &request));
  pending.requests.push_back(request);
  pending.peers.push_back(from);
  pending.receives.push_back(true);
}

void Wire::wait(Pending& pending) {
  Backoff backoff(team_.size());
  Clock::time_point began{};
  bool warned = false;
  while (true) {
    int done = 0;
    ZERO_MPI(MPI_Testall(static_cast<int>(pending.requests.size()), pending.requests.data(), &done, MPI_STATUSES_IGNORE));
    if (done != 0) break;
    if (backoff.pause()) continue;
    if (began == Clock::time_point{}) began = Clock::now();
    look_around(pending, began, warned);
    std::this_thread::sleep_for(std::chrono::microseconds(20));
  }
  pending.requests.clear();
  pending.peers.clear();
  pending.receives.clear();
}

void Wire::look_around(const Pending& pending, Clock::time_point began, bool& warned) {
  poll();
  team_.check_failures();
  std::vector<int> missing;
  const auto now = Clock::now();
  for (std::size_t i = 0; i < pending.requests.size(); ++i) {
    int done = 0;
    ZERO_MPI(MPI_Request_get_status(pending.requests[i], &done, MPI_STATUS_IGNORE));
    if (done != 0) continue;
    const int peer = pending.peers[i];
    missing.push_back(peer);
    const auto left = left_[static_cast<std::size_t>(peer)];
    if (left != Clock::time_point{} && now - left > kGrace) {
      const std::string reason = "has destroyed its communicator";
      throw PeerFailure(detail::text(team_.here(), ": rank ", peer, ' ', reason), peer, reason);
    }
  }
  std::sort(missing.begin(), missing.end());
  missing.erase(std::unique(missing.begin(), missing.end()), missing.end());
  if (missing.empty()) return;
  const auto waited = std::chrono::duration_cast<std::chrono::milliseconds>(now - began);
  if (waited >= team_.policy.timeout + kPatience) {
    ZERO_FAIL(team_.here(), ": waited ", readable(team_.policy.timeout), ", the timeout, for messages of ", name_ranks(missing),
              " (set by WaitPolicy or ZERO_TIMEOUT_SECONDS)");
  }
  if (!warned && waited >= team_.policy.warn_after) {
    warned = true;
    std::fprintf(stderr, "zero: %s: has waited %s for messages of %s\n", team_.here().c_str(), readable(waited).c_str(),
                 name_ranks(missing).c_str());
  }
}

std::vector<std::string> Wire::swap(const std::vector<int>& peers, const std::string& out) {
  const auto pieces_from = [](std::int64_t total, const auto& piece) {
    for (std::int64_t begin = kFirst - 8; begin < total; begin += kMaxMessage)
      piece(begin, std::min(kMaxMessage, total - begin));
  };
  struct Memory {
    std::string first = std::string(static_cast<std::size_t>(kFirst), '\0');
    std::string out;
    std::vector<std::string> heads, in;
  };
  const auto memory = std::make_shared<Memory>();
  const auto total = static_cast<std::int64_t>(out.size());
  memory->out = out;
  std::memcpy(memory->first.data(), &total, 8);
  std::memcpy(memory->first.data() + 8, out.data(), static_cast<std::size_t>(std::min(total, kFirst - 8)));
  memory->heads.assign(peers.size(), std::string(static_cast<std::size_t>(kFirst), '\0'));
  memory->in.resize(peers.size());
  Pending sends(memory);
  Pending receives(memory);
  for (std::size_t i = 0; i < peers.size(); ++i) {
    receive(peers[i], memory->heads[i].data(), kFirst, receives);
    send(peers[i], memory->first.data(), kFirst, sends);
    pieces_from(total,
                [&](std::int64_t begin, std::int64_t bytes) { send(peers[i], memory->out.data() + begin, bytes, sends); });
  }
  wait(receives);
  for (std::size_t i = 0; i < peers.size(); ++i) {
    std::int64_t length = 0;
    std::string& in = memory->in[i];
    std::memcpy(&length, memory->heads[i].data(), 8);
    in.resize(static_cast<std::size_t>(length));
    std::memcpy(in.data(), memory->heads[i].data() + 8, static_cast<std::size_t>(std::min(length, kFirst - 8)));
    pieces_from(length, [&](std::int64_t begin, std::int64_t bytes) { receive(peers[i], in.data() + begin, bytes, receives); });
  }
  wait(receives);
  wait(sends);
  return std::move(memory->in);
}

void Wire::read_notices() {
  while (true) {
    int found = 0;
    MPI_Status status;
    ZERO_MPI(MPI_Iprobe(MPI_ANY_SOURCE, kNoticeTag, comm(), &found, &status));
    if (found == 0) return;
    Notice notice;
    ZERO_MPI(MPI_Recv(&notice, sizeof notice, MPI_BYTE, status.MPI_SOURCE, kNoticeTag, comm(), MPI_STATUS_IGNORE));
    if (notice.failed == 0) {
      left_[static_cast<std::size_t>(status.MPI_SOURCE)] = Clock::now();
    } else if (!far_failed_) {
      far_failed_ = true;
      failure_ = notice;
    }
  }
}

void Wire::poll() {
  if (!mpi_is_up()) ZERO_FAIL(team_.here(), ": MPI has been finalised");
  read_notices();
  if (!far_failed_) return;
  throw PeerFailure(detail::text(team_.here(), ": rank ", failure_.origin, ' ', failure_.why), failure_.origin, failure_.why);
}

void Wire::tell(bool failed, int origin, const std::string& why) noexcept {
  if (failed) note_mpi_failure();
  if (!mpi_is_up()) return;
  auto notice = std::make_unique<Notice>();
  notice->failed = failed ? 1 : 0;
  notice->origin = origin;
  std::memcpy(notice->why, why.data(), std::min(why.size(), sizeof notice->why - 1));
  std::vector<MPI_Request> requests(far_.size(), MPI_REQUEST_NULL);
  for (std::size_t i = 0; i < far_.size(); ++i) {
    if (MPI_Isend(notice.get(), sizeof *notice, MPI_BYTE, far_[i], kNoticeTag, comm(), &requests[i]) != MPI_SUCCESS) {
      requests[i] = MPI_REQUEST_NULL;
    }
  }
  int done = 0;
  for (int attempt = 0; attempt < 100 && done == 0; ++attempt) {
    if (MPI_Testall(static_cast<int>(requests.size()), requests.data(), &done, MPI_STATUSES_IGNORE) != MPI_SUCCESS) break;
  }
  if (done == 0) {
    // MPI may still read it: a peer that takes no messages any more mustn't hold this rank up.
    static_cast<void>(notice.release());  // NOLINT(bugprone-unused-return-value)
  }
}

}  // namespace zero
