// What a backend provides for a ReduceQueue: the operations on checked arguments. Implemented by NodeQueue (shared memory: nobody
// waits) and ClusterQueue (nodes: each operation is a collective).
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "comm/call.h"

namespace zero {

class CommunicatorImpl;

class QueueImpl {
 public:
  explicit QueueImpl(std::string what) : what_(std::move(what)) {}
  virtual ~QueueImpl() = default;
  QueueImpl(const QueueImpl&) = delete;
  QueueImpl& operator=(const QueueImpl&) = delete;

  /// @param call an Op::queued, all but the number filled in; output is apart from input
  virtual std::int64_t begin(Call call, const at::Tensor& input, const at::Tensor& output) = 0;
  /// This rank can't begin an operation that its peers will wait for: breaks the communicator.
  [[noreturn]] virtual void refuse(const std::string& message) = 0;
  virtual void poll() = 0;
  virtual void wait(std::int64_t ticket) = 0;
  virtual void wait_released(std::int64_t ticket) = 0;

  // How many operations: 0 to one less are.
  virtual std::int64_t begun() const = 0;
  virtual std::int64_t finished() const = 0;
  virtual std::int64_t released() const = 0;

  const std::string& what() const { return what_; }
  const CommunicatorImpl& owner() const { return *owner_; }
  void keep(std::shared_ptr<CommunicatorImpl> owner) { owner_ = std::move(owner); }

 private:
  std::string what_;
  std::shared_ptr<CommunicatorImpl> owner_;  ///< outlives what derived classes do at their end
};

}  // namespace zero
