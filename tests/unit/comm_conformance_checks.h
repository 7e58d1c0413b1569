// The part of comm_conformance.h that is about collectives, buffers and splits.
#pragma once

#include <unistd.h>

#include <ATen/core/Tensor.h>
#include <ATen/ops/from_blob.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <chrono>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#include "comm/window.h"
#include "core/check.h"
#include "zero/communicator.h"

namespace zero::conformance {

/// `what`: parts of a message, put together only when they are needed (there is a check for every element).
template <typename... Parts>
void expect(bool condition, const Communicator& comm, const Parts&... what) {
  if (!condition) throw std::runtime_error(detail::text("rank ", comm.rank(), " of ", comm.size(), ": ", what...));
}

/// The message of the c10::Error that `action` throws, which has to contain all of `parts`, within two seconds.
inline std::string expect_error(const Communicator& comm, const std::vector<std::string>& parts,
                                const std::function<void()>& action) {
  const auto began = std::chrono::steady_clock::now();
  std::string message;
  try {
    action();
  } catch (const c10::Error& error) {
    message = error.msg();
  }
  expect(!message.empty(), comm, "no error, but one should have said ", parts.at(0));
  for (const auto& part : parts) expect(message.find(part) != std::string::npos, comm, "no '", part, "' in: ", message);
  expect(std::chrono::steady_clock::now() - began < std::chrono::seconds(2), comm, "it took too long to notice: ", message);
  return message;
}

inline std::string rank_text(int rank) { return "rank " + std::to_string(rank); }

/// Flat memory of this rank, on the heap or in a Buffer, as a tensor.
template <typename T>
class Flat {
 public:
  Flat(const Communicator& comm, std::int64_t count, bool in_buffer) : count_(count) {
    if (in_buffer) {
      buffer_ = comm.allocate(count * static_cast<std::int64_t>(sizeof(T)), "a test");
      data_ = static_cast<T*>(buffer_.data());
    } else {
      heap_.resize(static_cast<std::size_t>(count));
      data_ = heap_.data();
    }
  }
  T& operator[](std::int64_t i) { return data_[i]; }
  at::Tensor tensor(std::int64_t begin, std::int64_t count) const {
    return at::from_blob(data_ + begin, {count}, at::TensorOptions().dtype(c10::CppTypeToScalarType<T>::value));
  }
  at::Tensor tensor() const { return tensor(0, count_); }

 private:
  std::int64_t count_;
  Buffer buffer_;
  std::vector<T> heap_;
  T* data_ = nullptr;
};

/// Numbers whose sum depends on the order of adding.
template <typename T>
T value(int rank, std::int64_t i) {
  const auto mixed = static_cast<std::uint64_t>(i * 31 + rank + 1) * 0x9E3779B97F4A7C15ull;
  const double fraction = static_cast<double>(mixed >> 40) / (1 << 24) - 0.5;
  return static_cast<T>(static_cast<float>(fraction * ((mixed & 7) == 0 ? 100 : 1)));
}

/// What the sum has to be: in rank order, in float (double for double), rounded once. Over nodes of several ranks the order is
/// another one; then this is only near.
template <typename T>
T sum(const Communicator& comm, std::int64_t i, double divisor) {
  using Wide = std::conditional_t<std::is_same_v<T, double>, double, float>;
  auto total = static_cast<Wide>(value<T>(0, i));
  for (int r = 1; r < comm.size(); ++r) total += static_cast<Wide>(value<T>(r, i));
  return static_cast<T>(total / static_cast<Wide>(divisor));
}

template <typename T>
bool right(const Communicator& comm, T got, std::int64_t i, double divisor) {
  const T wanted = sum<T>(comm, i, divisor);
  if (comm.nodes() == 1 || comm.nodes() == comm.size()) return std::memcmp(&got, &wanted, sizeof(T)) == 0;
  const double tolerance = std::is_same_v<T, double> ? 1e-12 : sizeof(T) == 4 ? 1e-4 : 1;
  return std::abs(static_cast<double>(got) - static_cast<double>(wanted)) < tolerance;
}

/// Counts per slice: nothing, odd, through the control block, more than one chunk when ZERO_STAGING_BYTES is small.
inline std::vector<std::int64_t> counts() { return {0, 1, 7, 333, 20011}; }

template <typename T>
void sums_of(const Communicator& comm) {
  const int n = comm.size();
  for (const std::int64_t k : counts()) {
    for (const bool in_buffer : {false, true}) {
      const auto name =
          detail::text(c10::toString(c10::CppTypeToScalarType<T>::value), ' ', k, in_buffer ? " in a buffer" : "");
      Flat<T> input(comm, n * k, in_buffer);
      Flat<T> output(comm, k, false);
      const auto fill = [&] {
        for (std::int64_t i = 0; i < n * k; ++i) input[i] = value<T>(comm.rank(), i);
      };
      const auto check_slice = [&](Flat<T>& from, std::int64_t offset, const char* how) {
        for (std::int64_t i = 0; i < k; ++i) {
          expect(right(comm, from[offset + i], comm.rank() * k + i, n), comm, "reduce_scatter ", how, ' ', name, " at ", i);
        }
      };
      fill();
      comm.reduce_scatter(input.tensor(), output.tensor(), n, name);
      check_slice(output, 0, "apart");
      comm.reduce_scatter(input.tensor(), input.tensor(comm.rank() * k, k), n, name);
      check_slice(input, comm.rank() * k, "in place");

      fill();
      comm.all_reduce(input.tensor(), 3, name);
      for (std::int64_t i = 0; i < n * k; ++i) {
        expect(right(comm, input[i], i, 3), comm, "all_reduce ", name, " at ", i);
      }
    }
  }
}

inline void reductions(const Communicator& comm) {
  sums_of<float>(comm);
  sums_of<double>(comm);
  sums_of<c10::Half>(comm);
  sums_of<c10::BFloat16>(comm);
}

inline void complex_numbers(const Communicator& comm) {
  using Complex = c10::complex<float>;
  std::vector<Complex> numbers(1001);
  for (std::size_t i = 0; i < numbers.size(); ++i) numbers[i] = Complex(1, static_cast<float>(comm.rank()));
  comm.all_reduce(at::from_blob(numbers.data(), {1001}, at::kComplexFloat));
  const int n = comm.size();
  for (const auto number : numbers) {
    expect(number == Complex(static_cast<float>(n), static_cast<float>(n * (n - 1) / 2)), comm, "a complex sum is wrong");
  }
}

template <typename T>
void gathers_of(const Communicator& comm) {
  const int n = comm.size();
  for (const std::int64_t k : counts()) {
    for (const bool shard_in_buffer : {false, true}) {
      for (const bool full_in_buffer : {false, true}) {
        Flat<T> shard(comm, k, shard_in_buffer);
        Flat<T> full(comm, n * k, full_in_buffer);
        const auto check = [&](const char* how) {
          for (std::int64_t i = 0; i < n * k; ++i) {
            const T wanted = value<T>(static_cast<int>(i / k), i % k);
            expect(std::memcmp(&full[i], &wanted, sizeof(T)) == 0, comm, "all_gather ", how, " of ", k, " at ", i);
          }
        };
        for (std::int64_t i = 0; i < k; ++i) shard[i] = value<T>(comm.rank(), i);
        comm.all_gather(shard.tensor(), full.tensor(), "apart");
        check("apart");
        comm.barrier();
        for (std::int64_t i = 0; i < n * k; ++i)
          full[i] = i / std::max<std::int64_t>(k, 1) == comm.rank() ? shard[i % k] : T(0);
        comm.all_gather(full.tensor(comm.rank() * k, k), full.tensor(), "in place");
        check("in place");
      }
    }
  }
}

inline void gathers(const Communicator& comm) {
  gathers_of<float>(comm);
  gathers_of<c10::BFloat16>(comm);
  gathers_of<std::int64_t>(comm);
  gathers_of<std::uint8_t>(comm);
}

inline void broadcasts(const Communicator& comm) {
  for (int root = 0; root < comm.size(); ++root) {
    for (const std::int64_t k : counts()) {
      for (const bool in_buffer : {false, true}) {
        Flat<std::int32_t> data(comm, k, in_buffer);
        for (std::int64_t i = 0; i < k; ++i) data[i] = comm.rank() == root ? static_cast<std::int32_t>(i * 3 + root) : -1;
        comm.broadcast(data.tensor(), root, "everything");
        for (std::int64_t i = 0; i < k; ++i) expect(data[i] == i * 3 + root, comm, "broadcast from ", root, " at ", i);
      }
    }
  }
}

inline void messages(const Communicator& comm) {
  for (const std::size_t scale : {0, 1, 1000, 9000, 100000}) {
    const auto of = [&](int r) { return std::string(scale * static_cast<std::size_t>(r), static_cast<char>('a' + r)); };
    const auto all = comm.exchange(of(comm.rank()), "letters");
    expect(static_cast<int>(all.size()) == comm.size(), comm, "exchange: a message of each rank");
    for (int r = 0; r < comm.size(); ++r) expect(all[static_cast<std::size_t>(r)] == of(r), comm, "exchange × ", scale);
  }
  for (int i = 0; i < 100; ++i) comm.barrier();
}

inline void mismatches(const Communicator& comm) {
  const int last = comm.size() - 1;
  if (last == 0) return;
  const bool other = comm.rank() == last;
  std::vector<float> numbers(64, 1.0f);
  const auto tensor = [&](std::int64_t count, at::ScalarType type = at::kFloat) {
    return at::from_blob(numbers.data(), {count}, type);
  };
  expect_error(comm, {"rank 0 calls all_reduce", rank_text(last) + " calls barrier", "'flag'", "'wrong'"},
               [&] { other ? comm.barrier("wrong") : comm.all_reduce(tensor(3), 1, "flag"); });
  expect_error(comm, {"rank 0 calls all_reduce", "of 3 Float", rank_text(last) + " calls all_reduce", "of 4 Float"},
               [&] { comm.all_reduce(tensor(other ? 4 : 3)); });
  expect_error(comm, {"of 3 Float", "of 3 Double"}, [&] { comm.all_reduce(tensor(3, other ? at::kDouble : at::kFloat)); });
  expect_error(comm, {"from rank 0", "from rank " + std::to_string(last)},
               [&] { comm.broadcast(tensor(3), other ? last : 0); });
  comm.barrier("still in step");
}

inline void bad_arguments(const Communicator& comm) {
  const int last = comm.size() - 1;
  std::vector<float> numbers(64, 1.0f);
  const auto tensor = [&](std::int64_t count, at::ScalarType type = at::kFloat) {
    return at::from_blob(numbers.data(), {count}, type);
  };
  const int n = comm.size();
  expect_error(comm, {"rank " + std::to_string(comm.rank()), "not defined"}, [&] { comm.all_reduce(at::Tensor()); });
  expect_error(comm, {"cannot add", "Int"}, [&] { comm.all_reduce(tensor(4, at::kInt)); });
  expect_error(comm, {"not contiguous"},
               [&] { comm.all_reduce(at::from_blob(numbers.data(), {4}, {2}, at::TensorOptions().dtype(at::kFloat))); });
  expect_error(comm, {"times the elements", std::to_string(3 * n + 1)}, [&] { comm.all_gather(tensor(3), tensor(3 * n + 1)); });
  expect_error(comm, {"Double"}, [&] { comm.all_gather(tensor(2, at::kDouble), tensor(2 * n)); });
  expect_error(comm, {"overlaps"},
               [&] { comm.reduce_scatter(tensor(2 * n), at::from_blob(numbers.data() + 2 * n - 1, {2}, at::kFloat)); });
  expect_error(comm, {"root is"}, [&] { comm.broadcast(tensor(3), n); });
  expect_error(comm, {"divisor"}, [&] { comm.all_reduce(tensor(3), 0); });
  // On one rank only: all of them hear of it.
  expect_error(comm, {rank_text(last), "cannot add"},
               [&] { comm.all_reduce(tensor(3, comm.rank() == last ? at::kInt : at::kFloat)); });
  comm.barrier("still in step");
}

/// The ways in which `gone`'s peers lose it. Each on a communicator of its own; `comm` brings the ranks together again.
inline void failures(const Communicator& comm) {
  const int gone = comm.size() - 1;
  if (gone == 0) return;
  const bool is_gone = comm.rank() == gone;
  const auto lose = [&](const std::vector<std::string>& parts, const std::function<void(Communicator&)>& how) {
    auto doomed = comm.duplicate();
    WaitPolicy policy;
    policy.timeout = std::chrono::milliseconds(600);
    policy.warn_after = std::chrono::seconds(10);
    if (parts.at(0) == "timeout") doomed.set_wait_policy(policy);
    doomed.barrier();
    comm.barrier();  // all have done with that: a failure may also reach a call that could still have been completed
    if (is_gone) {
      how(doomed);
    } else {
      std::vector<float> numbers(5000, 1.0f);
      const auto message =
          expect_error(comm, parts, [&] { doomed.all_reduce(at::from_blob(numbers.data(), {5000}, at::kFloat), 1, "lost"); });
      expect(message.find("all_reduce") != std::string::npos && message.find("'lost'") != std::string::npos, comm, message);
      expect_error(comm, parts, [&] { doomed.barrier("again"); });
    }
    comm.barrier();
  };
  lose({rank_text(gone) + " failed: no more paper"}, [](Communicator& doomed) { doomed.fail("no more paper"); });
  lose({rank_text(gone) + " has destroyed its communicator"}, [](Communicator& doomed) { doomed = Communicator(); });
  lose({rank_text(gone) + " failed: an exception"}, [](Communicator& doomed) {
    try {
      const auto last_handle = std::exchange(doomed, Communicator());
      throw std::runtime_error("a trainer's own");
    } catch (const std::runtime_error&) {
    }
  });
  lose({"timeout", rank_text(gone)}, [](Communicator&) { std::this_thread::sleep_for(std::chrono::milliseconds(900)); });

  // A rank that the others don't wait for.
  auto doomed = comm.duplicate();
  if (is_gone) doomed.fail("out of order");
  comm.barrier();
  expect_error(comm, {rank_text(gone) + " failed: out of order"}, [&] { doomed.barrier(); });

  // Ranks that leave right after their last collective are no failure for a slower one.
  for (int i = 0; i < 20; ++i) {
    auto brief = comm.duplicate();
    std::vector<float> numbers(3000, 1.0f);
    brief.all_reduce(at::from_blob(numbers.data(), {3000}, at::kFloat));
  }
}

/// With too little room allocate() throws everywhere, says how much there is, and the communicator works on.
inline void little_room(const Communicator& comm) {
  comm.barrier();
  if (comm.rank() == 0 || std::string(comm.backend()) != "thread") setenv("ZERO_SHM_LIMIT_BYTES", "3000000", 1);
  comm.barrier();
  expect_error(comm, {"'the moon'", "3.815 MiB", "ZERO_SHM_LIMIT_BYTES"}, [&] { comm.allocate(4000000, "the moon"); });
  const auto small = comm.allocate(1000, "a pebble");
  expect(small.bytes() == 1000 && static_cast<const char*>(small.data())[999] == 0, comm, "a small buffer");
  comm.barrier();
  if (comm.rank() == 0 || std::string(comm.backend()) != "thread") unsetenv("ZERO_SHM_LIMIT_BYTES");
  comm.barrier();
  expect_error(comm, {"room for"}, [&] { comm.allocate(std::int64_t{1} << 50, "a petabyte"); });
}

/// Memory of files can be seen once more, side by side; what is written there stays there.
inline void mapped(const Communicator& comm) {
  const auto page = static_cast<std::int64_t>(sysconf(_SC_PAGESIZE));
  const auto buffer = comm.allocate(5 * page, "seen twice", Backing::file);
  const auto& impl = *buffer.impl();
  const auto members = static_cast<std::int64_t>(impl.parts.size());
  auto* own = static_cast<char*>(buffer.data());
  const auto set_all = [&](int value) {
    comm.barrier();
    std::memset(own, value + comm.rank(), static_cast<std::size_t>(5 * page));
    comm.barrier();
  };
  const auto view = SideBySide::map(impl, page, 3 * page);
  expect(view != nullptr, comm, "no view");
  if (view == nullptr) return;
  const auto at = [&](std::int64_t member, std::int64_t offset) -> char& { return view->data()[member * 3 * page + offset]; };
  const auto shows = [&](std::int64_t member, std::int64_t offset) {
    return at(member, offset) == impl.data(static_cast<int>(member))[page + offset];
  };
  for (const int value : {10, 20, 30}) {
    set_all(value);
    for (std::int64_t member = 0; member < members; ++member)
      for (const std::int64_t offset : {std::int64_t{0}, page, 3 * page - 1})
        expect(shows(member, offset), comm, "what rank ", member, " has written isn't seen at ", offset);
    comm.barrier();
  }
  // Own pages: the write isn't seen by anybody else, and later writes of others not in that page.
  for (std::int64_t member = 0; member < members; ++member) at(member, page) = 99;
  comm.barrier();
  for (std::int64_t member = 0; member < members; ++member)
    expect(impl.data(static_cast<int>(member))[2 * page] != 99, comm, "a write to a view reached the memory of rank ", member);
  set_all(40);
  for (std::int64_t member = 0; member < members; ++member) {
    expect(at(member, page) == 99, comm, "a page of its own has changed");
    expect(shows(member, 0), comm, "a page that wasn't written doesn't follow");
  }
  view->forget_writes();
  for (std::int64_t member = 0; member < members; ++member)
    expect(shows(member, page), comm, "a forgotten write is still seen");
  comm.barrier();
  expect(SideBySide::map(impl, page, page / 2) == nullptr, comm, "half a page");
  expect(SideBySide::map(impl, 1, page) == nullptr, comm, "from within a page");
  expect(SideBySide::map(impl, 0, 0) == nullptr, comm, "nothing");
  expect(SideBySide::map(*comm.allocate(page, "plain").impl(), 0, page) == nullptr, comm, "memory without a file");
}

inline void traffic(const Communicator& comm) {
  const std::int64_t n = comm.size();
  const std::int64_t k = 6000;
  Flat<float> full(comm, n * k, true);
  const auto spent = [&](const std::function<void()>& action) {
    const auto before = comm.traffic();
    action();
    const auto after = comm.traffic();
    expect(after.calls == before.calls + 1, comm, "one call");
    return std::pair(after.data_bytes - before.data_bytes, after.between_nodes_bytes - before.between_nodes_bytes);
  };
  const auto scatter = spent([&] { comm.reduce_scatter(full.tensor(), full.tensor(comm.rank() * k, k)); });
  const auto gather = spent([&] { comm.all_gather(full.tensor(comm.rank() * k, k), full.tensor()); });
  const auto reduce = spent([&] { comm.all_reduce(full.tensor()); });
  expect(scatter.first == (n - 1) * k * 4, comm, "bytes of reduce_scatter");
  expect(gather.first == (n - 1) * k * 4, comm, "bytes of all_gather");
  expect(reduce.first == 2 * (n - 1) * k * 4, comm, "bytes of all_reduce");
  const bool apart = comm.nodes() == comm.size() && n > 1;
  if (apart || comm.nodes() == 1) {
    expect(scatter.second == (apart ? scatter.first : 0), comm, "bytes of reduce_scatter between nodes");
    expect(gather.second == (apart ? gather.first : 0), comm, "bytes of all_gather between nodes");
  }
  const auto before = comm.traffic().control_bytes;
  comm.exchange("12345");
  expect(comm.traffic().control_bytes - before == 5 * (n - 1), comm, "control bytes");
}

inline void splits(const Communicator& comm) {
  const auto half = comm.split(comm.rank() % 2, -comm.rank());  // in reverse order
  const auto all = half.exchange(std::to_string(comm.rank()));
  for (std::size_t i = 0; i + 1 < all.size(); ++i)
    expect(std::stoi(all[i]) == std::stoi(all[i + 1]) + 2, comm, "order of a split");
  expect(std::stoi(all[static_cast<std::size_t>(half.rank())]) == comm.rank(), comm, "place in a split");
  const auto some = comm.split(comm.rank() == 0 ? 5 : -1, 0);
  expect(some.defined() == (comm.rank() == 0), comm, "a negative color");
  const auto copy = comm.duplicate();
  expect(copy.size() == comm.size() && copy.rank() == comm.rank() && !(copy == comm), comm, "a duplicate");
  // Interleaved, in an order of their own each.
  Flat<float> here(comm, 3000, true);
  Flat<float> there(copy, 3000, true);
  for (int i = 0; i < 20; ++i) {
    here[0] = there[0] = static_cast<float>(i);
    comm.all_reduce(here.tensor());
    copy.all_reduce(there.tensor());
    half.barrier();
    expect(here[0] == static_cast<float>(i * comm.size()) && there[0] == here[0], comm, "interleaved communicators");
  }
}

}  // namespace zero::conformance
