// Stage 2: this rank keeps its shard of the averages. Gradients are collected in a buffer per bucket that is being filled; a full
// bucket is under way at once and its buffer free again when every rank has read it (BucketStream).
#pragma once

#include <memory>

#include "reduce/bucket_stream.h"
#include "reduce/gradient_store.h"

namespace zero {

class ShardStore final : public GradientStore {
 public:
  explicit ShardStore(GradientContext context);

  void allocate() override;
  void add(int parameter, const at::Tensor& gradient, bool onto) override;
  void add_nothing(int parameter) override;
  void multiply(int parameter, double factor) override;
  bool edit(int parameter, bool overwrites, const std::function<void(const at::Tensor&)>& run) override;
  std::uint8_t flags(int parameter) const override;
  std::int64_t under_way() const override { return stream_.under_way(); }
  std::vector<int> completion_order() const override { return stream_.completion_order(); }
  void finish(const GradientAgreement& agreed) override;
  bool averaged(int) const override { return true; }
  at::Tensor average(int unit) override;
  at::Tensor bucket(int unit) override;
  void* memory(int parameter) const override;
  std::shared_ptr<void> keeper(int unit) const override;
  at::Tensor scratch(std::size_t) const override { return stream_.scratch(); }
  void forget(int) override {}
  std::int64_t gradient_bytes() const override;
  std::int64_t buffer_bytes() const override;

  /// What has arrived for this parameter and is not under way yet counts no longer.
  void drop(int parameter) { stream_.drop(parameter); }
  /// Buckets are under way at the end of a backward only.
  void hold_back(bool on) { stream_.hold_back(on); }
  void complete_plan() { stream_.complete_plan(); }

  // Transport. Collective: fetch().
  void fetch(int unit) override;
  void store(int unit) override;
  void release(int unit) override;
  std::int64_t bytes(int unit) const override { return context_.layout.bytes(unit); }

 private:
  struct Shard {
    bool divided = true;  ///< false: still the sum (Division::late)
    double by = 1;
    at::Tensor whole;  ///< the bucket's averages while it is resident, as bytes
  };
  at::Tensor raw(int unit) const;
  void divide(int unit);
  void undivide(int unit);
  void merge(int unit, const at::Tensor& sum, const std::vector<char>& onto);
  void for_each_part(int parameter, const std::function<void(const at::Tensor&)>& run);

  GradientContext context_;
  BucketStream stream_;
  std::vector<Buffer> shards_;      ///< per space: this rank's shards of all its buckets
  std::vector<Shard> units_;        ///< per unit
  std::vector<at::Tensor> spares_;  ///< memory of units that were resident
};

}  // namespace zero
