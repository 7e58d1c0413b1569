// Where gradients lie, by stage: this rank's own in an arena until they are averaged (ArenaStore, stages 0 and 1), or this rank's
// shard of the averages alone (ShardStore, stage 2). `Gradients` decides what p.grad() is; a store knows nothing of autograd.
//
// A unit is a bucket. It is *averaged* when its memory on this rank holds averages over ranks: of this rank's shard at least.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "core/parameter.h"
#include "layout/layout.h"
#include "paging/transport.h"
#include "zero/communicator.h"

namespace zero {

/// What a sum over ranks is divided by. Known only at the end where the ranks report weights.
struct Division {
  double by = 1;
  bool late = false;
};

struct GradientContext {
  Communicator comm;
  const std::vector<Parameter>& parameters;
  const Layout& layout;     ///< of gradients: the parameters' places, in the types in which gradients are kept and sent
  const Layout& own_types;  ///< the same places in the parameters' own types, as registered
  const Division& division;
  const std::int64_t& steps;  ///< made so far
  c10::Device device;

  /// What a sum that is divided late is divided by at once, so that 16-bit sums don't overflow: a power of two, which rounds nothing.
  double early(int space) const;
  at::ScalarType dtype(int space) const { return static_cast<at::ScalarType>(layout.spaces()[space].dtype); }
  at::TensorOptions bytes() const { return at::TensorOptions().dtype(at::kByte).device(device); }
  /// In which type backward brings a gradient.
  at::ScalarType arrives_as(int space) const { return static_cast<at::ScalarType>(own_types.spaces()[space].dtype); }
  /// The parameter's gradient, given where its bucket begins.
  void* in_bucket(void* bucket_memory, int parameter) const;
  /// As a tensor of the parameter's shape, in the layout's order of elements.
  at::Tensor region(void* bucket_memory, std::shared_ptr<void> keep, int parameter) const;
  /// "step 7: reducing bucket 2 ('fc.weight' … 'out.bias')": for errors of waits.
  std::string label(const char* what, int unit) const;
  /// The part from "bucket" on.
  std::string name(int unit) const;
};

/// Copies a gradient to its place. Past the caches where it is large: an ordinary store reads first what it overwrites.
void place_gradient(const at::Tensor& region, const at::Tensor& gradient);

/// What one rank tells the others about its gradients at the end of a backward; per parameter, as bits.
enum GradientFlags : std::uint8_t {
  kOurs = 1,       ///< p.grad() is what this library put there
  kForeign = 2,    ///< p.grad() was assigned by the user: local, averaged by step()
  kArrived = 4,    ///< something arrived in this backward
  kOnto = 8,       ///< … on top of what was there
  kWaiting = 16,   ///< what arrived is not under way yet
  kAgain = 32,     ///< … though its bucket was under way once in this backward
  kAveraged = 64,  ///< the unit is averaged here
  kZeroed = 128,   ///< has been overwritten with zeros since the last agreement
};

/// The same after all ranks have told: by rank, then by parameter.
struct GradientAgreement {
  std::vector<std::vector<std::uint8_t>> flags;
  std::int64_t under_way = 0;  ///< most buckets of the plan that a rank has under way
  std::vector<int> order;      ///< in which rank 0 had its buckets complete
  bool any(int parameter, int bits) const {
    for (const auto& rank : flags)
      if (rank[parameter] & bits) return true;
    return false;
  }
};

class GradientStore : public Transport {
 public:
  /// Called before the averages of a unit change or go: whoever shows them has to stop.
  std::function<void(int unit)> before_change;
  /// Is there a gradient of this parameter that what arrives comes on top of?
  std::function<bool(int parameter)> has_gradient;

  /// Collective. Makes memory for the layout as it is now.
  virtual void allocate() = 0;

  /// This rank's own contribution to a parameter's gradient. Not under way until the bucket is complete, or finish().
  /// @param onto on top of what is there, otherwise instead of it
  virtual void add(int parameter, const at::Tensor& gradient, bool onto) = 0;
  /// This rank has none where others have one, now local.
  virtual void add_nothing(int parameter) = 0;
  virtual void multiply(int parameter, double factor) = 0;
  /// Runs an in-place operator on what this rank keeps of an average without gathering it; false if it can't.
  virtual bool edit(int parameter, bool overwrites, const std::function<void(const at::Tensor&)>& run) = 0;

  /// Of the flags above: kWaiting, kAgain, kAveraged.
  virtual std::uint8_t flags(int parameter) const = 0;
  virtual std::int64_t under_way() const { return 0; }
  virtual std::vector<int> completion_order() const { return {}; }
  /// Collective, with the same agreement on every rank: whatever waits is averaged (stage 2), and all ranks see each unit alike.
  virtual void finish(const GradientAgreement& agreed) = 0;

  virtual bool averaged(int unit) const = 0;
  /// This rank's shard of an averaged unit.
  virtual at::Tensor average(int unit) = 0;
  /// A whole bucket of this rank's own gradients (ArenaStore only), or of the averages if resident.
  virtual at::Tensor bucket(int unit) = 0;
  /// Where the parameter's whole gradient lies: always for an arena, for a shard store while its unit is resident.
  virtual void* memory(int parameter) const = 0;
  virtual std::shared_ptr<void> keeper(int unit) const = 0;

  /// Memory that peers can reach, as bytes, for use while no gradient lies in it; whoever uses it leaves zeros.
  virtual at::Tensor scratch(std::size_t first_space) const = 0;
  virtual void forget(int parameter) = 0;  ///< its shape or strides may be others from now on

  virtual std::int64_t gradient_bytes() const = 0;
  virtual std::int64_t buffer_bytes() const = 0;
};

}  // namespace zero
