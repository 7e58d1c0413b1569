// Building a model that is larger than memory.
#pragma once

#include <cstdint>
#include <string>

#include "zero/export.h"

namespace zero {

/// While the scope lives, large tensors that this thread makes lie in unlinked files instead of memory, so that a model can be built
/// by its ordinary constructors, whose values are the same to the bit, and handed to zero::wrap at stage 3: each parameter is in memory
/// only while it is initialised and while its shard is taken, and its file is gone after that.
///
///   std::optional<zero::DeferredInit> deferred(std::in_place);
///   auto model = std::make_shared<Model>();
///   auto opt = zero::wrap<torch::optim::AdamW>(model->parameters(), …, zero::Options(comm).stage(zero::Stage::kParameters));
///   deferred.reset();
///
/// Peak memory while building: shards and a few parameters; the kernel writes pages of the files to disk when memory is short. Disk: the
/// model's size, per rank. Tensors that stay (buffers, frozen parameters) stay in their files, which is slow on a slow disk; clone()
/// them. A file needs a file system on a disk: a folder in memory (tmpfs) is passed over.
///
/// The first scope puts an allocator in front of LibTorch's for good; outside of scopes it only passes requests on.
class ZERO_API DeferredInit {
 public:
  /// @param folder for the files; empty: the first on a disk of $TMPDIR, /var/tmp, /tmp and the current folder
  /// @param least_bytes smaller tensors are made in memory
  /// @throws c10::Error if no file can be made there
  explicit DeferredInit(const std::string& folder = {}, std::int64_t least_bytes = 64 << 10);
  ~DeferredInit();
  DeferredInit(const DeferredInit&) = delete;
  DeferredInit& operator=(const DeferredInit&) = delete;

 private:
  DeferredInit* outer_;
  std::string folder_;
  std::int64_t least_bytes_;
  void* latest_ = nullptr;  ///< what was made last may be worked on; what came before needs no memory
  friend class FileAllocator;
};

}  // namespace zero
