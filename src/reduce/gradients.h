// This rank's own gradients: one flat, peer-reachable arena per space, into which a hook moves each gradient as it is produced.
//
// p.grad() is then a tensor over the arena, so that nothing is copied at the step and peers can sum it in place. Everything that
// LibTorch allows stays allowed: gradients may be cleared in any way or kept, assigned by hand, or read; a tensor that somebody still
// holds from an earlier step keeps its values. What lies here is local; averages are made by src/reduce/reducer.h and never
// written back.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <vector>

#include "core/parameter.h"
#include "layout/layout.h"
#include "zero/communicator.h"

namespace torch::autograd {
struct Node;
}

namespace zero {

class Gradients : public std::enable_shared_from_this<Gradients> {
 public:
  /// @param parameters, layout owned by the caller, which outlives this object; both may grow
  /// @param refuse_graphs create_graph in backward() is an error (stages ≥ 1)
  Gradients(Communicator comm, const std::vector<Parameter>& parameters, const Layout& layout, bool refuse_graphs);
  ~Gradients();

  /// Collective. Makes arenas for spaces that have none yet.
  void allocate();
  /// (Re-)installs the hooks of parameters that have a slot: after allocate(), and when a tensor was replaced or converted.
  void watch();
  /// The parameter's tensor will be replaced by another: takes our hooks off it and leaves it its gradient, in memory of its own.
  void leave(int parameter);

  /// Why the present gradients can't be reduced, or empty: sparse, of another shape or type.
  std::string problem() const;

  /// Brings everything into the arenas: gradients that we did not place are copied, and where only other ranks have one ours is 0.
  /// @param anywhere per parameter: some rank has a gradient
  void collect(const std::vector<char>& anywhere);

  /// Everything is as it was at the last mark(): same tensors, same versions.
  void mark();
  bool unchanged() const;

  /// Clipping: every gradient counts as multiplied by this from now on. It reaches memory only when a later backward or
  /// step() builds upon what is there.
  void multiply_later(double factor);

  /// One bucket of the arena, as a 1-D tensor.
  at::Tensor bucket(int space, int bucket) const;

  /// An arena of the spaces from `first_space` on, as bytes (none: 0 of them), for use while no gradient lies in it; whoever
  /// uses it leaves zeros.
  at::Tensor scratch(std::size_t first_space) const;

  /// Bytes of the arenas, and of gradients that lie elsewhere.
  std::int64_t bytes() const;

 private:
  friend class ArrivalHook;
  friend class AccumulationHook;

  struct Entry {
    at::Tensor view;                              ///< what p.grad() is set to
    std::shared_ptr<torch::autograd::Node> node;  ///< the parameter's AccumulateGrad, which our pre-hook sits on
    double factor = 1;                            ///< see multiply_later
    const void* marked_grad = nullptr;
    std::uint32_t marked_version = 0;
  };

  void arrived(int parameter, const at::Tensor& tensor);
  void apply_factor(int parameter);
  bool is_ours(int parameter, const at::Tensor& grad) const;
  void forget(int parameter);
  void make_view(int parameter);
  void leave_to_holders(int parameter);
  bool fits(int parameter, const at::Tensor& grad) const;

  Communicator comm_;
  const std::vector<Parameter>& parameters_;
  const Layout& layout_;
  bool refuse_graphs_;
  std::vector<Buffer> arenas_;  ///< per space
  std::vector<Entry> entries_;  ///< per parameter
};

}  // namespace zero
