// N ranks as N threads, see zero/thread.h.
#include "zero/thread.h"

#include <algorithm>
#include <cstring>
#include <exception>
#include <mutex>
#include <thread>
#include <utility>

#include "comm/thread_impl.h"
#include "core/check.h"

namespace zero {

std::shared_ptr<Slot> ThreadImpl::make_slots(int ranks) {
  return {new Slot[static_cast<std::size_t>(ranks)], std::default_delete<Slot[]>()};
}

std::shared_ptr<ThreadImpl> ThreadImpl::make(int rank, int size, std::shared_ptr<Slot> slots, const char* backend) {
  Team::Setup setup;
  setup.rank = rank;
  setup.world = size;
  for (int r = 0; r < size; ++r) setup.ranks.push_back(r);
  setup.backend = backend;
  setup.slots = std::move(slots);
  return std::make_shared<ThreadImpl>(rank, std::move(setup));
}

std::shared_ptr<CommunicatorImpl> ThreadImpl::form(const std::vector<int>& members, int /*color*/, int /*key*/) {
  std::shared_ptr<Slot> slots;
  if (!members.empty() && members[0] == rank()) slots = make_slots(static_cast<int>(members.size()));
  // The first member shows the others where its pointer is, and keeps it there until all have copied it.
  struct Token {
    const std::shared_ptr<Slot>* slots;
  } token{&slots};
  const auto tokens = swap({reinterpret_cast<const char*>(&token), sizeof token});
  std::shared_ptr<ThreadImpl> formed;
  if (!members.empty()) {
    std::memcpy(&token, tokens[static_cast<std::size_t>(members[0])].data(), sizeof token);
    const auto index = std::find(members.begin(), members.end(), rank()) - members.begin();
    formed = make(static_cast<int>(index), static_cast<int>(members.size()), *token.slots, backend());
    formed->set_wait_policy(wait_policy());
  }
  swap({});
  return formed;
}

void run_ranks(int ranks, const std::function<void(const Communicator&)>& body) { run_ranks(ranks, WaitPolicy(), body); }

void run_ranks(int ranks, const WaitPolicy& policy, const std::function<void(const Communicator&)>& body) {
  ZERO_CHECK_GE(ranks, 1, "run_ranks");
  const auto slots = ThreadImpl::make_slots(ranks);
  std::mutex mutex;
  std::exception_ptr cause;        // the first that is not due to a peer
  std::exception_ptr consequence;  // the first that is
  const auto work = [&](int rank) {
    const auto impl = ThreadImpl::make(rank, ranks, slots, "thread");
    impl->set_wait_policy(policy);
    const auto record = [&](std::exception_ptr& first) {
      const std::lock_guard<std::mutex> lock(mutex);
      if (first == nullptr) first = std::current_exception();
    };
    // Recorded before the peers are told, so that what they throw then is never first.
    try {
      body(Communicator(impl));
    } catch (const PeerFailure& error) {
      record(consequence);
      impl->fail(error.msg());
    } catch (const c10::Error& error) {
      record(cause);
      impl->fail(error.msg());
    } catch (const std::exception& error) {
      record(cause);
      impl->fail(error.what());
    } catch (...) {
      record(cause);
      impl->fail("an exception of unknown type");
    }
  };
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank) threads.emplace_back(work, rank);
  for (auto& thread : threads) thread.join();
  if (cause != nullptr) std::rethrow_exception(cause);
  if (consequence != nullptr) std::rethrow_exception(consequence);
}

}  // namespace zero
