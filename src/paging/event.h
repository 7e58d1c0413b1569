// The end of an operator is not the end of its work on a device: memory may be taken away when its event is ready.
#pragma once

namespace zero {

class Event {
 public:
  virtual ~Event() = default;
  virtual bool ready() const = 0;
  virtual void wait() = 0;
};

}  // namespace zero
