// Where parameters lie between steps, by stage: whole on every rank (ResidentParameters, stages 0 to 2), or this rank's shard alone
// (PagedParameters, stage 3). A step asks for the pieces it updates and says when it begins and ends.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>

#include "layout/layout.h"

namespace zero {

struct StepReport;

/// May the storage's memory be exchanged under the tensor? Only if the tensor is all of it, and LibTorch allocated it: memory behind
/// from_blob is somebody else's, who expects to find the values there.
bool owns_storage(const at::Tensor& t);

class ParameterStore {
 public:
  virtual ~ParameterStore() = default;

  /// Collective. Makes memory for spaces that have none yet.
  virtual void allocate() = 0;
  /// Takes the parameter's present values and memory, where it isn't taken already.
  virtual void adopt(int parameter) = 0;
  /// Gives the tensor (and whoever shares its storage) memory of its own again, with the values it has: its place goes to another
  /// tensor, or to nobody.
  virtual void leave(int parameter) = 0;
  /// All have been adopted: from now on other ranks may ask for what this one keeps. Collective.
  virtual void ready() {}
  /// Every parameter is whole and in memory of its own, as if there were no optimizer.
  virtual void leave_all() = 0;

  /// Has the tensor got other memory since it was adopted (to(), torch::load, set_data)? Its values are then whatever the user put
  /// there; the next update takes them in.
  virtual bool moved(int parameter) const = 0;

  /// Collective: no rank reads parameters any more, and what has moved is adopted / all have been written.
  /// @param report gets what has happened since the step before
  virtual void begin_update(const std::string& label) = 0;
  virtual void end_update(const std::string& /*label*/, StepReport& /*report*/) {}
  /// The same after an edit that wasn't a step.
  virtual void end_edit(const std::string& /*label*/) {}
  /// Where a run of elements lies that this rank updates.
  virtual void* memory(int space, int bucket, const Segment& segment) = 0;
  /// Around the update of a bucket. after_update() is collective where the ranks share what they have updated.
  virtual void before_update(int space, int bucket) = 0;
  virtual void after_update(int space, int bucket, const std::string& label) = 0;

  /// Bytes of parameters that this rank keeps, and of memory in which they are copied.
  virtual std::int64_t parameter_bytes() const = 0;
  virtual std::int64_t buffer_bytes() const = 0;
};

}  // namespace zero
