// A group of ranks that work on one training job: who they are, and the collectives between them.
//
// `Communicator` is a small value handle over an abstract `CommunicatorImpl`; the backends (self, thread, MPI) implement the
// latter and pass one conformance suite (tests/unit/comm_conformance.h). Users make one with make_communicator(), or with
// zero/mpi.h or zero/thread.h, and hand it to zero::Options.
#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "zero/export.h"

namespace zero {

/// How long the ranks wait for each other.
struct ZERO_API WaitPolicy {
  /// After this long a wait throws, naming the ranks that did not arrive. Default 10 minutes (rank 0 may be evaluating);
  /// the environment variable ZERO_TIMEOUT_SECONDS sets another default.
  std::chrono::milliseconds timeout;
  /// After this long one warning names who is missing. Default 30 s; environment: ZERO_WARN_SECONDS.
  std::chrono::milliseconds warn_after;

  WaitPolicy();  ///< the defaults above, after the environment
};

/// Bytes that one rank sent through a communicator since it was made. A reduce-scatter or all-gather of n padded elements
/// counts n × size × (N−1)/N, an all-reduce twice that, whatever the transport.
struct ZERO_API Traffic {
  std::int64_t data_bytes = 0;           ///< tensors: reduce_scatter, all_gather, all_reduce, broadcast
  std::int64_t control_bytes = 0;        ///< exchange() and barriers
  std::int64_t between_nodes_bytes = 0;  ///< the part of both that was handed to the network
  std::int64_t calls = 0;                ///< collectives of any kind
};

/// What is behind a Buffer. file: memory of a file without a name, open in each rank as long as the Buffer lives, so that the ranks'
/// parts can be mapped once more; costs a file descriptor per rank of the node.
enum class Backing : std::uint8_t { memory, file };

/// Memory that the peers of a communicator can reach, so that collectives on it need no staging copy. A handle: copies share
/// the memory, the last one releases it, locally and at any time (peers keep what they have mapped).
class ZERO_API Buffer {
 public:
  struct Impl;  ///< owned by the backend
  Buffer() = default;
  explicit Buffer(std::shared_ptr<Impl> impl);
  bool defined() const { return impl_ != nullptr; }
  void* data() const;  ///< 64-byte aligned; zero-filled when allocated
  std::int64_t bytes() const;
  const std::shared_ptr<Impl>& impl() const { return impl_; }

 private:
  std::shared_ptr<Impl> impl_;
};

class CommunicatorImpl;  // src/comm/communicator_impl.h
class QueueImpl;         // src/comm/queue_impl.h

/// Reduce-scatters that a rank begins without waiting for its peers: each rank sums its slice when all have begun. Opened by
/// Communicator::open_queue(). A handle: copies are the same queue, the last one closes it on this rank. Keeps its communicator
/// alive; the same thread uses both.
///
/// Every rank begins the same operations in the same order (count, dtype, divisor and `what` are compared) and finds out about
/// them when it likes. Inside a node every wait on the communicator, in a queue or in a collective, serves all its queues, so
/// the ranks may wait for different things, and queues and collectives may be in another order on each rank. Over several
/// nodes begin() is itself a collective: there the order of begin() among all calls has to be the same on every rank.
///
/// Errors: c10::Error, as of Communicator, but all of them (a mismatch, a wrong tensor, a lost peer) break the communicator.
class ZERO_API ReduceQueue {
 public:
  ReduceQueue() = default;  ///< not open: defined() is false
  explicit ReduceQueue(std::shared_ptr<QueueImpl> impl);
  bool defined() const { return impl_ != nullptr; }

  /// Begins output = (sum over ranks, in rank order, of their r-th slices of input; r = this rank) / divisor: the bits of
  /// Communicator::reduce_scatter. Waits only if four operations are under way that some rank hasn't summed yet.
  /// @param input   N × k elements, contiguous, inside one Buffer of this communicator (the same on all ranks of a node, at
  ///                any offset). Not to be written before released().
  /// @param output  k elements, contiguous, same dtype, in memory of this rank's own, outside input. Not to be
  ///                touched before finished().
  /// @param what    says in error messages what it is for; otherwise they give the queue's own
  /// @returns the operation's ticket: 0, 1, 2, …
  /// Sends (N−1)·k elements per rank.
  std::int64_t begin(const at::Tensor& input, const at::Tensor& output, double divisor = 1, const std::string& what = {}) const;

  /// Does what can be done without waiting: sums this rank's slice of every operation that all ranks have begun. With nothing
  /// to do it costs a few atomic loads per rank of the node.
  void poll() const;

  /// Has this rank's output been written? Makes no progress by itself.
  bool finished(std::int64_t ticket) const;
  /// Has every rank read this rank's input, so that it may be overwritten? Makes no progress by itself.
  bool released(std::int64_t ticket) const;

  /// Until finished, or released. Serves the other operations meanwhile. A ticket not yet given away is an error.
  void wait(std::int64_t ticket) const;
  void wait_released(std::int64_t ticket) const;

  /// How many operations this rank has begun: the next ticket.
  std::int64_t begun() const;

 private:
  std::shared_ptr<QueueImpl> impl_;
};

/// Handle to a group of ranks. Cheap to copy; copies are the same communicator. One thread at a time may use a communicator on
/// each rank, and every rank calls its collectives in the same order with the same sizes: a difference is detected and named.
///
/// Errors: every call throws c10::Error on all ranks (at once where a peer has died or failed, after the timeout otherwise),
/// naming this rank, the call and its number, `what` and the ranks that are missing. After such an error the communicator is
/// broken and each further call repeats it.
class ZERO_API Communicator {
 public:
  Communicator() = default;  ///< not attached to anything: defined() is false
  explicit Communicator(std::shared_ptr<CommunicatorImpl> impl);

  bool defined() const { return impl_ != nullptr; }
  int rank() const;
  int size() const;
  /// "self", "thread", "mpi", "launched", "nccl" or "staged".
  const char* backend() const;
  /// Ranks that share memory with this one (itself included) and the number of nodes.
  int local_size() const;
  int nodes() const;
  /// Where the tensors of its collectives lie: the CPU, or a GPU (see zero/nccl.h and zero/staged.h).
  c10::Device device() const;

  /// Collective. `bytes` (equal on every rank) of zero-filled memory that peers can reach. Room is checked before anything
  /// is used; too little throws on every rank, says how much is there, and leaves the communicator usable.
  /// @param what says in error messages what the memory is for
  Buffer allocate(std::int64_t bytes, const std::string& what, Backing backing = Backing::memory) const;

  /// Collective. `input`: N × k elements, contiguous; `output`: k elements, contiguous, same dtype. Afterwards output is the
  /// sum over ranks, in rank order, of every rank's r-th slice (r = this rank), divided by `divisor`: added in float (double
  /// for float64) and rounded once. output may be this rank's own slice of input. Float types of any width and complex
  /// (as pairs of reals), on the CPU. Input inside a Buffer of this communicator on every rank: no staging copy.
  /// Sends (N−1)·k elements per rank.
  void reduce_scatter(const at::Tensor& input, const at::Tensor& output, double divisor = 1,
                      const std::string& what = {}) const;

  /// Collective. `shard`: k elements; `full`: N × k elements; both contiguous, same dtype (any type: bytes are moved).
  /// shard may be this rank's own slice of full. Zero-copy as above when `full` (in-place shard) or `shard` lies in a Buffer.
  /// Sends (N−1)·k elements per rank (as the ring algorithm counts; k to each of N−1 peers).
  /// @param what the same on every rank: it is compared
  void all_gather(const at::Tensor& shard, const at::Tensor& full, const std::string& what = {}) const;

  /// Collective, in place: sum in rank order / divisor, the same bits on every rank. Sends 2(N−1)/N of the tensor.
  void all_reduce(const at::Tensor& tensor, double divisor = 1, const std::string& what = {}) const;

  /// Collective, in place: everybody gets root's bytes. Any dtype, contiguous.
  void broadcast(const at::Tensor& tensor, int root, const std::string& what = {}) const;

  /// Collective. Every rank's bytes, of any length each, in rank order: small control messages (agreement, flags, norms).
  std::vector<std::string> exchange(const std::string& mine, const std::string& what = {}) const;

  void barrier(const std::string& what = {}) const;

  /// Collective. As MPI_Comm_split: ranks of one color form a communicator, ordered by key, then by rank.
  /// A negative color gives an undefined communicator.
  Communicator split(int color, int key) const;

  /// Collective. A second, independent communicator over the same ranks.
  Communicator duplicate() const;

  /// Collective. A queue of reduce-scatters that don't wait, see ReduceQueue. Eight may be open at a time; a place is free again
  /// when every rank has dropped its handles. One too many throws on every rank and leaves the communicator usable.
  /// @param what names operations that have no name of their own
  ReduceQueue open_queue(const std::string& what = {}) const;

  /// Tells the peers, without waiting, that this rank has failed: their current or next call throws and repeats `why`.
  void fail(const std::string& why) const;

  void set_wait_policy(const WaitPolicy& policy) const;
  WaitPolicy wait_policy() const;
  Traffic traffic() const;

  /// Same underlying communicator?
  friend bool operator==(const Communicator& a, const Communicator& b) { return a.impl_ == b.impl_; }
  const std::shared_ptr<CommunicatorImpl>& impl() const { return impl_; }

 private:
  std::shared_ptr<CommunicatorImpl> impl_;
};

/// The default: under zero-run or mpirun (or in a program that has initialised MPI) all ranks of the job; otherwise a world of one.
/// A job started by mpirun with a build that has no MPI is refused: it would silently train N separate models.
ZERO_API Communicator make_communicator();

/// A world of one rank.
ZERO_API Communicator make_self_communicator();

}  // namespace zero
