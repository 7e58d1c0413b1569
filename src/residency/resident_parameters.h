// Where this rank's parameters lie in memory, and how a rank gets the parts that others have updated.
//
// Stage 0: where the user's tensors are. Stage 1: in one flat, peer-reachable arena per space; each parameter's own storage is
// repointed into it, so that every tensor that shares the storage (views, aliases, tensors saved by autograd) stays right. A
// parameter that doesn't own its whole storage densely (a slice of something, memory from from_blob) stays where it is and is
// mirrored in the arena: copied in before the update, out after the gather.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "core/parameter.h"
#include "layout/layout.h"
#include "residency/parameter_store.h"
#include "zero/communicator.h"

namespace zero {

class ResidentParameters final : public ParameterStore {
 public:
  /// @param flat keep parameters in arenas (stages ≥ 1), of which each rank updates its shards; otherwise every rank updates all
  ResidentParameters(Communicator comm, const std::vector<Parameter>& parameters, const Layout& layout, bool flat);

  void allocate() override;
  void adopt(int parameter) override;
  void leave(int parameter) override;
  void leave_all() override;
  bool moved(int parameter) const override;
  void begin_update(const std::string& label) override;
  void* memory(int space, int bucket, const Segment& segment) override;
  void before_update(int space, int bucket) override;
  void after_update(int space, int bucket, const std::string& label) override;
  std::int64_t parameter_bytes() const override;
  std::int64_t buffer_bytes() const override;  ///< mirrors outside arenas

 private:
  struct Entry {
    void* memory = nullptr;
    c10::Storage storage;           ///< of the tensor when adopted, and
    const void* address = nullptr;  ///< its address: a difference means that it has moved
    bool mirrored = false;
    at::Tensor mirror;  ///< over `memory`
  };

  void repoint(int parameter, void* memory);
  void gather(int space, int bucket, const std::string& label);

  Communicator comm_;
  const std::vector<Parameter>& parameters_;
  const Layout& layout_;
  bool flat_;
  std::vector<Buffer> arenas_;
  std::vector<Entry> entries_;
};

}  // namespace zero
