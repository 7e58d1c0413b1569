// Ranks that are threads of this process, and the world of one. Made by thread.cpp and self.cpp.
#pragma once

#include <memory>
#include <vector>

#include "comm/node_impl.h"

namespace zero {

class ThreadImpl final : public NodeImpl {
 public:
  using NodeImpl::NodeImpl;

  static std::shared_ptr<Slot> make_slots(int ranks);
  static std::shared_ptr<ThreadImpl> make(int rank, int size, std::shared_ptr<Slot> slots, const char* backend);

 protected:
  std::shared_ptr<CommunicatorImpl> form(const std::vector<int>& members, int color, int key) override;
};

}  // namespace zero
