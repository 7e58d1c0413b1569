// Stages 0 and 1: this rank's own gradients in one flat, peer-reachable arena per space. They stay local until somebody reads
// one: then the bucket is averaged in place, each rank its shard, and gathered in place, so that reading costs no memory.
#pragma once

#include "reduce/gradient_store.h"

namespace zero {

class ArenaStore final : public GradientStore {
 public:
  explicit ArenaStore(GradientContext context) : context_(std::move(context)) {}

  void allocate() override;
  void add(int parameter, const at::Tensor& gradient, bool onto) override;
  void add_nothing(int parameter) override;
  void multiply(int parameter, double factor) override;
  bool edit(int parameter, bool overwrites, const std::function<void(const at::Tensor&)>& run) override;
  std::uint8_t flags(int parameter) const override;
  void finish(const GradientAgreement& agreed) override;
  bool averaged(int unit) const override { return averaged_[unit].by != 0; }
  at::Tensor average(int unit) override;
  at::Tensor bucket(int unit) override;
  void* memory(int parameter) const override;
  std::shared_ptr<void> keeper(int unit) const override { return arenas_[context_.layout.place(unit).space].impl(); }
  at::Tensor scratch(std::size_t first_space) const override;
  void forget(int parameter) override;
  std::int64_t gradient_bytes() const override;
  std::int64_t buffer_bytes() const override { return 0; }

  /// The parameter's gradient in the arena, as a tensor.
  const at::Tensor& region(int parameter);
  /// Averages become this rank's part of them, so that more can be added: what a later reduction makes of equal parts on all ranks
  /// is the average again.
  void make_local(int unit);

  // Transport. Collective: fetch().
  void fetch(int unit) override;
  void store(int) override {}
  void release(int) override {}
  std::int64_t bytes(int) const override { return 0; }

 private:
  struct Averaged {
    double by = 0;  ///< what the sum was divided by; 0: not averaged
  };
  double share(double divided_by) const { return divided_by / context_.comm.size(); }

  GradientContext context_;
  std::vector<Buffer> arenas_;       ///< per space
  std::vector<Averaged> averaged_;   ///< per unit
  std::vector<at::Tensor> regions_;  ///< per parameter
};

}  // namespace zero
