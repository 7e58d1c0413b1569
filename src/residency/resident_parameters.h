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
#include "zero/communicator.h"

namespace zero {

class ResidentParameters {
 public:
  /// @param flat keep parameters in arenas (stages ≥ 1)
  ResidentParameters(Communicator comm, const std::vector<Parameter>& parameters, const Layout& layout, bool flat);

  /// Collective. Makes arenas for spaces that have none yet.
  void allocate();
  /// Takes the parameter's present values and memory, where it isn't taken already. Returns true if it has moved since last time
  /// (to(), torch::load, set_data): its values are then whatever the user put there.
  bool adopt(int parameter);

  /// Gives the tensor (and whoever shares its storage) memory of its own again, with the values it has: its place in the arena
  /// goes to another tensor, or to nobody.
  void release(int parameter);

  /// The parameter's elements in the order the layout counts them.
  void* memory(int parameter) const;

  /// Mirrored parameters of a bucket: the user's values in, and the updated ones out.
  void copy_in(int space, int bucket);
  void copy_out(int space, int bucket);

  /// Collective. Everybody gets every rank's shard of the bucket. Stages ≥ 1.
  void gather(int space, int bucket, const std::string& label);

  /// Bytes of all parameters (arenas with their padding and mirrors), and of mirrors outside arenas.
  std::int64_t parameter_bytes() const;
  std::int64_t mirror_bytes() const;

 private:
  struct Entry {
    void* memory = nullptr;
    c10::Storage storage;           ///< of the tensor when adopted, and
    const void* address = nullptr;  ///< its address: a difference means that it has moved
    bool mirrored = false;
    at::Tensor mirror;  ///< over `memory`
  };

  void repoint(int parameter, void* memory);

  Communicator comm_;
  const std::vector<Parameter>& parameters_;
  const Layout& layout_;
  bool flat_;
  std::vector<Buffer> arenas_;
  std::vector<Entry> entries_;
};

}  // namespace zero
