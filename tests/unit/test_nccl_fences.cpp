// What waits for what on the streams of an NCCL communicator, and its queues, on doubles; and that a fence left out is seen.
#include <ATen/ops/from_blob.h>

#include "comm_conformance.h"
#include "nccl_runs.h"
#include "support/catch.h"

using namespace zero;
using namespace fake::runs;

TEST_CASE("a collective is fenced on both sides, in this order") {
  Run how;
  run_nccl(how, [](const Communicator& comm, fake::FakeDevice& device) {
    std::vector<float> numbers(10, 1.0f);
    const auto tensor = at::from_blob(numbers.data(), {10}, at::kFloat);
    const auto before = device.log().size();
    comm.all_reduce(tensor, 3);
    device.synchronize();
    auto log = device.log();
    log.erase(log.begin(), log.begin() + static_cast<std::ptrdiff_t>(before));
    // The second record on the private stream tells whether the device gets on.
    const std::vector<std::string> wanted{"record compute", "private waits",  "divide private",
                                          "record private", "record private", "compute waits"};
    conformance::expect(log == wanted, comm, "other calls: ", log.size());
    conformance::expect(numbers[9] == 2.0f / 3, comm, "sum");
  });
}

namespace {

enum class Way { reduce_scatter, all_gather, all_reduce, broadcast, queue };

// The compute stream writes the input late and copies the output right after: what does it copy? 3 if all is right.
float through_streams(Way way, fake::Omit omit, bool slow_private) {
  std::atomic<float> result{-1};
  Run how;
  run_nccl(how, [&](const Communicator& comm, fake::FakeDevice& device) {
    const auto buffer = comm.allocate(2 * 4000, "numbers");
    const auto queue = comm.open_queue("q");
    const auto first = floats(buffer, 0, 1000);
    const auto second = floats(buffer, 1000, 1000);
    const auto both = floats(buffer, 0, 2000);
    std::vector<float> output(1000, -2.0f);
    const auto apart = at::from_blob(output.data(), {1000}, at::kFloat);
    const auto own = comm.rank() == 0 ? first : second;
    device.synchronize();
    comm.barrier();
    device.omit = omit;
    auto& compute = device.compute();
    auto* numbers = static_cast<float*>(buffer.data());
    const float mine = way == Way::all_gather || way == Way::broadcast ? 3.0f : static_cast<float>(comm.rank() + 1);
    compute.push([=] {
      if (!slow_private) nap(100);
      std::fill(numbers, numbers + 2000, mine);
    });
    if (slow_private) device.private_stream().push([] { nap(100); });
    const float* seen_at = numbers + (comm.rank() == 0 ? 1500 : 500);
    if (way == Way::reduce_scatter) {
      comm.reduce_scatter(both, own);
      seen_at = numbers + comm.rank() * 1000 + 500;
    } else if (way == Way::all_gather) {
      comm.all_gather(own, both);
    } else if (way == Way::all_reduce) {
      comm.all_reduce(both);
    } else if (way == Way::broadcast) {
      comm.broadcast(both, 0);
    } else {
      const auto ticket = queue.begin(both, apart);
      queue.wait(ticket);
      seen_at = output.data() + 500;
    }
    float seen = -1;
    // Of what a gather or a broadcast brings, the receiver's part was the same before: spoilt in between by the stream itself.
    compute.push([&seen, seen_at] { seen = *seen_at; });
    compute.synchronize();
    device.omit = fake::Omit::nothing;
    device.synchronize();
    if (comm.rank() == 1) result = seen;
    comm.barrier();
  });
  return result;
}

}  // namespace

TEST_CASE("the private stream waits for the input; a test without that fence sees it") {
  for (const auto way : {Way::reduce_scatter, Way::all_reduce, Way::queue}) {
    INFO(static_cast<int>(way));
    CHECK(through_streams(way, fake::Omit::nothing, false) == 3.0f);
    if (fake::kMayRace) CHECK(through_streams(way, fake::Omit::waits_of_private_streams, false) != 3.0f);
  }
}

TEST_CASE("the compute stream waits for the output; a test without that fence sees it") {
  for (const auto way : {Way::reduce_scatter, Way::all_reduce, Way::queue}) {
    INFO(static_cast<int>(way));
    CHECK(through_streams(way, fake::Omit::nothing, true) == 3.0f);
    if (fake::kMayRace) CHECK(through_streams(way, fake::Omit::waits_of_the_compute_stream, true) != 3.0f);
  }
  CHECK(through_streams(Way::all_gather, fake::Omit::nothing, true) == 3.0f);
  CHECK(through_streams(Way::broadcast, fake::Omit::nothing, true) == 3.0f);
}

TEST_CASE("the fence is on the stream that is current, and the host waits for neither") {
  Run how;
  run_nccl(how, [](const Communicator& comm, fake::FakeDevice& device) {
    fake::Stream other("another");
    std::vector<float> numbers(1000, 0.0f);
    const auto tensor = at::from_blob(numbers.data(), {1000}, at::kFloat);
    device.use(other);
    std::atomic<bool> go{false};
    other.push([&] {
      while (!go) std::this_thread::yield();
      std::fill(numbers.begin(), numbers.end(), 1.0f);
    });
    comm.all_reduce(tensor);
    const auto queue = comm.open_queue();
    const bool before = other.idle();
    go = true;
    float seen = -1;
    other.push([&] { seen = numbers[999]; });
    other.synchronize();
    device.use(device.default_stream());
    conformance::expect(!before, comm, "the host has waited");
    conformance::expect(seen == 2.0f, comm, "sum");
  });
}

// --- queues ---------------------------------------------------------------------------------------------------------------------

TEST_CASE("operations of a queue run beside the compute stream until it waits for them") {
  Run how;
  run_nccl(how, [](const Communicator& comm, fake::FakeDevice& device) {
    const auto buffer = comm.allocate(4 * 2000, "input");
    device.synchronize();
    std::fill_n(static_cast<float*>(buffer.data()), 2000, 1.0f);
    auto output = std::vector<std::vector<float>>(6, std::vector<float>(1000, -1.0f));
    const auto queue = comm.open_queue("gradients");
    std::atomic<bool> go{false};
    device.private_stream().push([&] {
      while (!go) std::this_thread::yield();
    });
    for (int i = 0; i < 6; ++i) {  // none waits for another
      const auto ticket =
          queue.begin(floats(buffer, 0, 2000), at::from_blob(output[static_cast<std::size_t>(i)].data(), {1000}, at::kFloat));
      conformance::expect(ticket == i && queue.begun() == i + 1, comm, "ticket");
    }
    conformance::expect(!queue.finished(0) && !queue.released(0), comm, "nothing can be finished");
    device.compute().synchronize();  // nor does the compute stream wait
    queue.wait(3);
    conformance::expect(!queue.finished(3), comm, "wait() is the stream's");
    float seen = 0;
    device.compute().push([&] { seen = output[3][999]; });
    go = true;
    device.compute().synchronize();
    conformance::expect(seen == 2.0f && queue.finished(3) && queue.released(3), comm, "sum of the queue");
    while (!queue.finished(5)) queue.poll();
    conformance::expect(output[5][0] == 2.0f, comm, "finished() is the host's");
    queue.wait(0);
    conformance::expect_error(comm, {"no operation has the ticket 6"}, [&] { queue.wait(6); });
  });
}

TEST_CASE("a queue's input lies in a Buffer, as everywhere") {
  Run how;
  how.ranks = 1;
  run_nccl(how, [](const Communicator& comm, fake::FakeDevice&) {
    std::vector<float> heap(4);
    const auto queue = comm.open_queue("gradients");
    const auto message = conformance::expect_error(
        comm, {"queued reduce_scatter #0", "'gradients'", "not inside a Buffer"},
        [&] { queue.begin(at::from_blob(heap.data(), {2}, at::kFloat), at::from_blob(heap.data() + 2, {2}, at::kFloat)); });
    conformance::expect(message_of([&] { comm.barrier(); }) == message, comm, "not broken");
  });
  CHECK(fake::nccl_state().aborts == 1);
}

// --- sums -----------------------------------------------------------------------------------------------------------------------
