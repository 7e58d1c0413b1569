// Ranks on doubles of devices, and communicators on them whose results the host may look at: what comm_conformance.h needs.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "comm/communicator_impl.h"
#include "support/fake_cuda.h"
#include "zero/communicator.h"

namespace fake {

class SyncedQueue final : public zero::QueueImpl {
 public:
  SyncedQueue(std::shared_ptr<zero::QueueImpl> inner, std::shared_ptr<zero::CommunicatorImpl> owner, FakeDevice& device)
      : QueueImpl(inner->what()), inner_(std::move(inner)), device_(device) {
    inner_->keep(std::move(owner));
  }
  std::int64_t begin(zero::Call call, const at::Tensor& input, const at::Tensor& output) override {
    return inner_->begin(call, input, output);
  }
  [[noreturn]] void refuse(const std::string& message) override {
    inner_->refuse(message);
    throw std::logic_error("refuse() returned");
  }
  void poll() override { inner_->poll(); }
  void wait(std::int64_t ticket) override {
    inner_->wait(ticket);
    device_.compute().synchronize();
  }
  void wait_released(std::int64_t ticket) override {
    inner_->wait_released(ticket);
    device_.compute().synchronize();
  }
  std::int64_t begun() const override { return inner_->begun(); }
  // The host looks at what the compute stream sees.
  std::int64_t finished() const override {
    const auto count = inner_->finished();
    device_.compute().synchronize();
    return count;
  }
  std::int64_t released() const override { return inner_->released(); }

 private:
  std::shared_ptr<zero::QueueImpl> inner_;
  FakeDevice& device_;
};

/// The host waits for the compute stream after each call, as a program does before it looks at a result: that is all it waits for.
class Synced final : public zero::CommunicatorImpl {
 public:
  /// @param nodes what it says: sums aren't compared bit by bit if it is neither 1 nor the number of ranks
  Synced(std::shared_ptr<zero::CommunicatorImpl> inner, FakeDevice& device, int nodes)
      : inner_(std::move(inner)), device_(device), nodes_(nodes) {}

  const char* backend() const override { return inner_->backend(); }
  int rank() const override { return inner_->rank(); }
  int size() const override { return inner_->size(); }
  int local_size() const override { return inner_->local_size(); }
  int nodes() const override { return nodes_; }
  c10::Device device() const override { return inner_->device(); }
  void reduce_scatter(zero::Call call, const void* input, void* output) override {
    then_wait([&] { inner_->reduce_scatter(call, input, output); });
  }
  void all_gather(zero::Call call, const void* shard, void* full) override {
    then_wait([&] { inner_->all_gather(call, shard, full); });
  }
  void all_reduce(zero::Call call, void* data) override {
    then_wait([&] { inner_->all_reduce(call, data); });
  }
  void broadcast(zero::Call call, void* data) override {
    then_wait([&] { inner_->broadcast(call, data); });
  }
  std::vector<std::string> exchange(zero::Call call, const std::string& mine) override { return inner_->exchange(call, mine); }
  std::shared_ptr<zero::Buffer::Impl> allocate(zero::Call call) override {
    auto buffer = inner_->allocate(call);
    device_.compute().synchronize();
    return buffer;
  }
  std::shared_ptr<zero::CommunicatorImpl> split(zero::Call call, int color, int key) override {
    auto formed = inner_->split(call, color, key);
    if (formed == nullptr) return nullptr;
    return std::make_shared<Synced>(std::move(formed), device_, nodes_);
  }
  std::shared_ptr<zero::QueueImpl> open_queue(zero::Call call) override {
    return std::make_shared<SyncedQueue>(inner_->open_queue(call), inner_, device_);
  }
  [[noreturn]] void refuse(const std::string& message) override {
    inner_->refuse(message);
    throw std::logic_error("refuse() returned");
  }
  void group_begin() override { inner_->group_begin(); }
  void group_end() override { inner_->group_end(); }
  void group_drop() noexcept override { inner_->group_drop(); }
  void fail(const std::string& why) override { inner_->fail(why); }
  void check_failures() override { inner_->check_failures(); }
  void set_wait_policy(const zero::WaitPolicy& policy) override { inner_->set_wait_policy(policy); }
  zero::WaitPolicy wait_policy() const override { return inner_->wait_policy(); }
  zero::Traffic traffic() const override { return inner_->traffic(); }

 private:
  void then_wait(const std::function<void()>& call) {
    struct Wait {  // also after an error: the tests' memory is the heap's, which knows no streams
      FakeDevice& device;
      ~Wait() { device.compute().synchronize(); }
    } wait{device_};
    call();
  }
  std::shared_ptr<zero::CommunicatorImpl> inner_;
  FakeDevice& device_;
  int nodes_;
};

inline zero::Communicator synced(const zero::Communicator& comm, FakeDevice& device, int nodes) {
  return zero::Communicator(std::make_shared<Synced>(comm.impl(), device, nodes));
}

}  // namespace fake
