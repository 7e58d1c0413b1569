// The Buffers of a communicator whose memory is a device's: each rank knows its own part only.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "comm/call.h"
#include "comm/window.h"

namespace zero {

class DeviceWindows {
 public:
  /// Collective over `control`. If `make` throws on some rank, this throws AgreedError on all: "`here`: …".
  std::shared_ptr<Buffer::Impl> allocate(const Communicator& control, const Call& call, const std::string& here,
                                         const std::function<std::shared_ptr<Mapping>()>& make);
  /// The Buffer that this memory lies in; null: none.
  std::shared_ptr<Buffer::Impl> find(const void* data, std::int64_t bytes);

 private:
  std::int64_t next_ = 0;
  std::vector<std::weak_ptr<Buffer::Impl>> windows_;
};

}  // namespace zero
