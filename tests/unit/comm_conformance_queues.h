// The part of comm_conformance.h that is about queues of reduce-scatters.
#pragma once

#include "comm_conformance_checks.h"

namespace zero::conformance {

/// Operations of a queue with input in one Buffer of `places` parts, used in turn. Checks every value.
template <typename T>
class Queued {
 public:
  Queued(const Communicator& comm, std::int64_t k, int places = 4)
      : comm_(comm), k_(k), places_(places), input_(comm, comm.size() * k * places, true), output_(comm, k * places, false) {}
  /// Fills the part of operation `number` with numbers of its own.
  void begin(const ReduceQueue& queue, std::int64_t number, double divisor = 1, const std::string& what = {}) {
    const std::int64_t n = comm_.size() * k_;
    const std::int64_t place = number % places_;
    for (std::int64_t i = 0; i < n; ++i) input_[place * n + i] = value<T>(comm_.rank(), number * n + i);
    const auto ticket = queue.begin(input_.tensor(place * n, n), output_.tensor(place * k_, k_), divisor, what);
    expect(ticket == number && queue.begun() == number + 1, comm_, "ticket ", ticket, " for ", number);
  }
  void check(std::int64_t number, double divisor = 1) {
    for (std::int64_t i = 0; i < k_; ++i) {
      expect(right(comm_, output_[number % places_ * k_ + i], (number * comm_.size() + comm_.rank()) * k_ + i, divisor), comm_,
             "operation ", number, " of ", k_, ' ', c10::toString(c10::CppTypeToScalarType<T>::value), " at ", i);
    }
  }
  /// What reduce_scatter makes of the same input has the same bits.
  void compare(std::int64_t number, double divisor = 1) {
    const std::int64_t n = comm_.size() * k_;
    Flat<T> other(comm_, k_, false);
    comm_.reduce_scatter(input_.tensor(number % places_ * n, n), other.tensor(), divisor);
    for (std::int64_t i = 0; i < k_; ++i) {
      expect(std::memcmp(&other[i], &output_[number % places_ * k_ + i], sizeof(T)) == 0, comm_, "not reduce_scatter's bits");
    }
  }

 private:
  const Communicator& comm_;
  std::int64_t k_;
  int places_;
  Flat<T> input_;
  Flat<T> output_;
};

inline void nap(int milliseconds) { std::this_thread::sleep_for(std::chrono::milliseconds(milliseconds)); }

template <typename T>
void queues_of(const Communicator& comm) {
  for (const std::int64_t k : counts()) {
    const auto queue = comm.open_queue("a test");
    Queued<T> data(comm, k);
    for (int i = 0; i < 4; ++i) data.begin(queue, i, i + 1);
    for (const int i : {2, 0, 3, 1}) {
      queue.wait(i);
      expect(queue.finished(i), comm, "finished after wait");
      data.check(i, i + 1);
    }
    queue.wait_released(3);
    expect(queue.released(3) && queue.released(0), comm, "released after wait_released");
    for (int i = 0; i < 4; ++i) data.compare(i, i + 1);
  }
}

inline void queues(const Communicator& comm) {
  queues_of<float>(comm);
  queues_of<double>(comm);
  queues_of<c10::Half>(comm);
  queues_of<c10::BFloat16>(comm);
  const auto queue = comm.open_queue();
  const int n = comm.size();
  Flat<float> input(comm, 2 * 7 * n, true);
  for (std::int64_t i = 0; i < 14 * n; ++i) input[i] = value<float>(comm.rank(), i);
  std::vector<float> output(14);
  queue.wait(queue.begin(at::from_blob(&input[0], {7 * n}, at::kComplexFloat),
                         at::from_blob(output.data(), {7}, at::kComplexFloat), 3));
  for (std::int64_t i = 0; i < 14; ++i) {
    expect(right(comm, output[static_cast<std::size_t>(i)], comm.rank() * 14 + i, 3), comm, "queued complex at ", i);
  }
}

/// Ranks of different speed, two places for the input, and all the ways to go on.
inline void queue_reuse(const Communicator& comm) {
  const auto queue = comm.open_queue("reuse");
  Queued<float> data(comm, 513, 2);
  std::int64_t checked = 0;
  for (std::int64_t i = 0; i < 200; ++i) {
    if (i >= 2) {
      queue.wait_released(i - 2);
      data.check(checked++);
    }
    if (i % 50 == 7 && comm.rank() == i / 50 % comm.size()) nap(10);
    data.begin(queue, i);
    if (comm.rank() % 2 == 0) queue.poll();
  }
  for (; checked < 200; ++checked) {
    while (!queue.finished(checked)) queue.poll();
    data.check(checked);
  }
  queue.wait_released(199);
  // A rank may begin four before the others take one.
  if (comm.rank() == 0) nap(50);
  Queued<float> more(comm, 65, 8);
  const auto second = comm.open_queue("more");
  for (std::int64_t i = 0; i < 8; ++i) more.begin(second, i, 2);
  for (std::int64_t i = 0; i < 8; ++i) {
    second.wait(i);
    more.check(i, 2);
  }
}

/// Other collectives between begin and wait; on one node in an order of each rank's own.
inline void queue_interleaved(const Communicator& comm) {
  const auto queue = comm.open_queue("one");
  const auto other = comm.open_queue("two");
  Queued<float> data(comm, 700, 4);
  Queued<double> others(comm, 33, 4);
  const bool odd = comm.rank() % 2 == 1;
  const bool free = comm.nodes() == 1;
  std::vector<float> numbers(3000);
  for (std::int64_t i = 0; i < 20; ++i) {
    if (i >= 4) {
      (free && odd ? other : queue).wait_released(i - 4);
      (free && odd ? queue : other).wait_released(i - 4);
    }
    if (odd || !free) comm.barrier("before or after");
    if (free && odd) others.begin(other, i);
    data.begin(queue, i);
    if (!free || !odd) others.begin(other, i);
    if (!odd && free) comm.barrier("before or after");
    if (!odd) queue.wait_released(i);  // by ranks that are in the barrier
    comm.barrier("while others wait");
    std::fill(numbers.begin(), numbers.end(), 1.0f);
    comm.all_reduce(at::from_blob(numbers.data(), {3000}, at::kFloat));
    expect(numbers[2999] == static_cast<float>(comm.size()), comm, "a sum beside a queue");
    (odd ? other : queue).wait(i);
    (odd ? queue : other).wait(i);
    data.check(i);
    others.check(i);
  }
}

inline void queue_places(const Communicator& comm) {
  if (comm.nodes() > 1) return;  // no limit there
  for (int round = 0; round < 3; ++round) {
    std::vector<ReduceQueue> open;
    for (int i = 0; i < 8; ++i) open.push_back(comm.open_queue());
    expect_error(comm, {"open_queue", "'ninth'", "8 on rank 0"}, [&] { comm.open_queue("ninth"); });
    if (comm.rank() == 0) open.erase(open.begin() + 3);
    if (comm.size() > 1) expect_error(comm, {"7 on rank 0"}, [&] { comm.open_queue("ninth"); });
    if (comm.rank() != 0) open.erase(open.begin() + 3);
    const auto queue = comm.open_queue("in the place of another");
    Queued<float> data(comm, 100);
    for (int i = 0; i < 9; ++i) {
      if (i >= 4) queue.wait_released(i - 4);
      data.begin(queue, i);
      queue.wait(i);
      data.check(i);
    }
    expect_error(comm, {"'in the place of another'", "no operation has the ticket 9"}, [&] { queue.wait(9); });
  }
  expect_error(comm, {"not open"}, [] { ReduceQueue().poll(); });
  comm.barrier("still in step");
}

inline void queue_traffic(const Communicator& comm) {
  const auto queue = comm.open_queue();
  Queued<float> data(comm, 6000);
  const auto before = comm.traffic();
  data.begin(queue, 0);
  data.begin(queue, 1);
  queue.wait(0);
  queue.wait_released(1);
  const auto after = comm.traffic();
  expect(after.calls == before.calls + 2, comm, "two calls");
  expect(after.data_bytes - before.data_bytes == 2 * (comm.size() - 1) * 6000 * 4, comm, "bytes of two operations");
  expect(after.control_bytes == before.control_bytes, comm, "no control bytes");
}

/// Each on a communicator of its own, which it breaks.
inline void queue_failures(const Communicator& comm) {
  const int last = comm.size() - 1;
  const bool is_last = comm.rank() == last;
  using Step = std::function<void(ReduceQueue&, const std::function<void(std::int64_t, const std::string&)>&)>;
  const auto lose = [&](const std::vector<std::string>& parts, const Step& step,
                        const std::function<void(Communicator&)>& end = {}, int timeout = 0) {
    auto doomed = comm.duplicate();
    if (timeout > 0) {
      WaitPolicy policy;
      policy.timeout = std::chrono::milliseconds(timeout);
      doomed.set_wait_policy(policy);
    }
    {
      auto queue = doomed.open_queue("gradients");
      Flat<float> input(doomed, 64 * comm.size(), true);
      Flat<float> output(doomed, 64, false);
      const auto begin = [&](std::int64_t k, const std::string& what) {
        queue.begin(input.tensor(0, k * comm.size()), output.tensor(0, k), 1, what);
      };
      comm.barrier();
      if (end && is_last) {
        end(doomed);
        if (!doomed.defined()) queue = ReduceQueue();
      } else {
        expect_error(comm, parts, [&] { step(queue, begin); });
        expect_error(comm, parts, [&] { queue.poll(); });
        expect_error(comm, parts, [&] { doomed.barrier("afterwards"); });
      }
      comm.barrier();
    }
  };
  const auto begin_and_wait = [](ReduceQueue& queue, const auto& begin) {
    begin(5, "bucket 3");
    queue.wait_released(0);
  };
  lose({"'bucket 3'", "Int"}, [&](ReduceQueue& queue, const auto&) {
    const auto numbers = at::from_blob(nullptr, {0}, at::kInt);
    queue.begin(numbers, numbers, 1, "bucket 3");
  });
  lose({"'gradients'", "not inside a Buffer"}, [&](ReduceQueue& queue, const auto&) {
    std::vector<float> heap(static_cast<std::size_t>(comm.size() + 1));
    queue.begin(at::from_blob(heap.data(), {comm.size()}, at::kFloat),
                at::from_blob(heap.data() + comm.size(), {1}, at::kFloat));
  });
  lose({"output lies inside input"}, [&](ReduceQueue& queue, const auto&) {
    std::vector<float> heap(static_cast<std::size_t>(comm.size()));
    queue.begin(at::from_blob(heap.data(), {comm.size()}, at::kFloat),
                at::from_blob(heap.data() + comm.rank(), {1}, at::kFloat));
  });
  if (last == 0) return;
  lose({"rank 0 calls queued reduce_scatter", "of 5 Float", rank_text(last) + " calls queued reduce_scatter", "of 6 Float"},
       [&](ReduceQueue& queue, const auto& begin) {
         begin(is_last ? 6 : 5, "bucket 3");
         queue.wait(0);
       });
  lose({"'bucket 3'", "'bucket 4'", "rank 0 calls", rank_text(last) + " calls"}, [&](ReduceQueue& queue, const auto& begin) {
    begin(5, is_last ? "bucket 4" : "bucket 3");
    queue.wait(0);
  });
  lose({rank_text(last) + " failed: no more paper"}, begin_and_wait,
       [](Communicator& doomed) { doomed.fail("no more paper"); });
  lose({rank_text(last) + " has destroyed its communicator"}, begin_and_wait,
       [](Communicator& doomed) { doomed = Communicator(); });
  lose(
      {"the timeout", rank_text(last)}, begin_and_wait, [](Communicator&) { nap(700); }, 300);
  if (comm.nodes() > 1) return;
  const auto told = [&](const std::string& message) {
    expect(message.find("queued reduce_scatter #0 of 5 Float, 'bucket 3'") != std::string::npos, comm, message);
  };
  auto doomed = comm.duplicate();
  {
    auto queue = doomed.open_queue();
    auto input = Flat<float>(doomed, 5 * comm.size(), true);
    Flat<float> output(doomed, 5, false);
    comm.barrier();
    if (is_last) {
      queue = ReduceQueue();
    } else {
      queue.begin(input.tensor(), output.tensor(), 1, "bucket 3");
      told(expect_error(comm, {rank_text(last) + " has closed its queue"}, [&] { queue.wait(0); }));
    }
    comm.barrier();
  }
  // Begun everywhere, but one rank doesn't go on to read the others' input.
  doomed = comm.duplicate();
  {
    WaitPolicy policy;
    policy.timeout = std::chrono::milliseconds(300);
    doomed.set_wait_policy(policy);
    const auto queue = doomed.open_queue();
    auto input = Flat<float>(doomed, 5 * comm.size(), true);
    Flat<float> output(doomed, 5, false);
    queue.begin(input.tensor(), output.tensor(), 1, "bucket 3");
    if (is_last) nap(900);
    if (!is_last) {
      queue.wait(0);
      told(expect_error(comm, {"the timeout, for " + rank_text(last) + " to read its input"}, [&] { queue.wait_released(0); }));
    }
    comm.barrier();
  }
  // Who leaves after its part is no failure.
  for (int i = 0; i < 20; ++i) {
    const auto brief = comm.duplicate();
    const auto queue = brief.open_queue();
    Queued<float> data(brief, 3000);
    data.begin(queue, 0);
    if (comm.rank() == 0) nap(1);
    queue.wait(0);
    data.check(0);
  }
}

}  // namespace zero::conformance
