// What p.grad() is. Between backward and the end of the step it is a tensor of the parameter's shape that stands for the average over
// ranks (a *page*, see src/paging/): an operator that reads it has its bucket gathered, an in-place operator edits it, one that
// overwrites it gathers nothing, and nothing at all happens if nobody looks. A raw pointer to it is refused with the way out.
//
// Where there is nothing to average (one rank, divisor 1) p.grad() is an ordinary tensor over the arena.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "paging/page_owner.h"
#include "paging/pager.h"
#include "reduce/gradient_store.h"
#include "reduce/hooks.h"

namespace zero {

class ArenaStore;
class ShardStore;

class Gradients final : public GradientEvents,
                        public PageOwner,
                        private Transport,
                        public std::enable_shared_from_this<Gradients> {
 public:
  struct Settings {
    bool sharded = false;        ///< stage ≥ 2 on several ranks
    bool paged = true;           ///< p.grad() stands for an average that isn't the local gradient
    bool refuse_graphs = false;  ///< create_graph in backward() is an error
    std::int64_t budget = 0;     ///< bytes of gathered gradients at a time, beyond those in use; sharded only
  };
  struct Callbacks {
    std::function<void()> ended;             ///< a backward has ended: all ranks have to agree on what it brought
    std::function<void()> agree;             ///< now, please: somebody is going to use the averages
    std::function<void(int unit)> announce;  ///< a unit is going to be gathered
    /// Runs something whose traffic is the step's.
    std::function<void(const std::function<void()>&)> counted;
  };

  /// @param context its parameters and layout may grow
  Gradients(GradientContext context, Settings settings, Callbacks callbacks);
  ~Gradients() override;

  /// Collective. Makes memory for spaces that have none yet.
  void allocate();
  /// (Re-)installs the hooks of parameters that have a place: after allocate(), and when a tensor was replaced or converted.
  void watch();
  /// The parameter's tensor will be replaced by another: takes our hooks off it and leaves it its gradient, in memory of its own
  /// if it has any.
  void leave(int parameter);

  /// Why the present gradients can't be reduced, or empty: sparse, of another shape or type.
  std::string problem() const;
  /// The layout that this object works on is going to be replaced: it does nothing any more.
  void end_of_life();
  /// What has happened since the ranks last agreed; agree() is due before anything relies on averages.
  bool unfinished() const { return unfinished_; }
  /// Backwards bring local gradients only: agree() comes with the first that is not deferred, or when it is needed.
  void defer(bool on) { deferring_ = on; }
  bool deferring() const { return deferring_; }
  /// Buckets are under way at the end of a backward only.
  void hold_back(bool on);

  /// Some rank has joined: it can't follow edits of gradients other than zero_().
  void forbid_edits(bool on) { no_edits_ = on; }
  /// On a rank that has joined: gradients as the others have them, before it takes part in what they do.
  /// @param others flags of ranks that haven't joined
  void follow(const std::vector<std::vector<std::uint8_t>>& others);
  /// Its part in the gathering of a unit.
  void gather_for_others(int unit);

  /// Before an agreement: this rank's part of it.
  void prepare();
  std::vector<std::uint8_t> flags() const;
  std::int64_t under_way() const;
  std::vector<int> completion_order() const;
  /// Parameters that have just got a place: what LibTorch has accumulated for them is what a backward has brought.
  /// @param placed those that had one before
  void take_new(const std::vector<char>& placed);
  /// Collective, after it: averages what waits (stage 2), and lets every rank see the same gradients.
  void finish(const GradientAgreement& agreed);
  /// Collective, before a step or a norm: takes in gradients that the user assigned.
  void collect(const GradientAgreement& agreed);

  bool sharded() const { return settings_.sharded; }
  bool averaged(int unit) const { return store_->averaged(unit); }
  at::Tensor average(int unit) { return store_->average(unit); }
  at::Tensor bucket(int unit) { return store_->bucket(unit); }

  /// Everything is as it was at the last mark(): same tensors, same versions, no edit.
  void mark();
  bool unchanged() const;
  /// Which gradients have been edited in place since the ranks last met: the same on every rank, or their shards don't fit together.
  /// Clearing isn't counted: on a rank where nothing has arrived there is nothing to clear.
  std::uint64_t edited() const { return edited_; }
  void forget_edited() { edited_ = 0; }

  /// Clipping: every gradient counts as multiplied by this from now on. It reaches memory only when somebody builds upon it.
  void multiply_later(double factor);
  /// The same for whoever reads p.grad(), ordinary tensors included.
  void multiply(double factor);

  /// From now on (until the next call) this rank's own gradients are looked at as they come: which is the first that isn't finite?
  void look_for_nonfinite(bool on);
  int first_nonfinite() const { return first_nonfinite_; }  ///< -1: none, or not looked for
  /// The same without the host's knowing: what is found stays in the device's memory.
  /// @param nothing what first_nonfinite_there() is while all has been finite
  void look_in_device(bool on, std::int64_t nothing);
  bool looking() const { return looking_; }
  /// int64 without dimensions; undefined: not looked for.
  at::Tensor first_nonfinite_there() const { return looking_ ? first_there_ : at::Tensor(); }

  /// Collective. All gradients resident until release(): raw pointers to them are valid, and written values count.
  void gather_all();
  /// The end of a step: what was gathered goes, after edits have been stored.
  void release();
  void store_edits();

  at::Tensor scratch(std::size_t first_space) const { return store_->scratch(first_space); }
  std::int64_t bytes() const;
  std::int64_t buffer_bytes() const { return store_->buffer_bytes(); }

  // GradientEvents
  void before_accumulation(int parameter) override;
  void arrived(int parameter, const at::Tensor& tensor) override;
  void backward_ended(bool nested) override;
  void backward_aborted() override { aborted_ = true; }
  // PageOwner
  void begin(const std::vector<Touch>& touches, const std::string& op) override;
  void end(const std::vector<Touch>& touches) noexcept override;
  bool edit_in_parts(const Touch& touch, const std::function<void(const at::Tensor&)>& run) override;

 private:
  struct Entry {
    at::Tensor page;                                               ///< what p.grad() is set to
    at::Tensor deferred;                                           ///< sharded: what came while deferring
    double factor = 1;                                             ///< see multiply_later
    bool onto = false;                                             ///< what arrives comes on top of what is there
    bool foreign = false;                                          ///< … of a tensor of the user's
    bool told_onto = false, told_arrived = false, zeroed = false;  ///< since the last agreement
    const void* marked_grad = nullptr;
    std::uint32_t marked_version = 0;
  };

  bool is_ours(int parameter, const at::Tensor& grad) const;
  void leave_pages();
  bool holds_average(int parameter) const;
  bool has_place(int parameter) const { return context_.layout.slot(parameter).space >= 0; }
  bool fits(int parameter, const at::Tensor& grad) const;
  void expect_end();
  void take(int parameter, at::Tensor gradient);
  void look_at(int parameter, const at::Tensor& gradient);
  void show(int parameter);
  void make_page(int parameter);
  void leave_to_holders(int parameter);
  void drop_page(int parameter);
  void apply_factor(int parameter);
  void apply_factors(int unit);
  void retire(int unit);
  std::vector<int> units_of(const std::vector<Touch>& touches, bool written_only = false) const {
    return groups_of(touches, written_only, [this](int page) { return context_.layout.unit_of(page); });
  }
  std::string how_to(int parameter) const;
  void refuse_edit(int parameter) const;
  bool gives_zeros(int parameter, const std::function<void(const at::Tensor&)>& run) const;
  void count_edit(int parameter);
  void check_cleared(const GradientAgreement& agreed) const;
  at::Tensor resident_values(int parameter) const;
  at::Tensor& grad_of(int parameter) const;

  void gather(int unit);

  // Transport
  void fetch(int unit) override;
  void store(int unit) override { store_->store(unit); }
  void release(int unit) override;
  std::int64_t bytes(int unit) const override { return store_->bytes(unit); }

  GradientContext context_;
  Settings settings_;
  Callbacks callbacks_;
  ArenaStore* arena_ = nullptr;   ///< one of
  ShardStore* shards_ = nullptr;  ///< these
  std::unique_ptr<GradientStore> store_;
  Pager pager_;
  Hooks hooks_;
  std::vector<Entry> entries_;  ///< per parameter
  std::vector<int> held_;       ///< units that gather_all() holds
  int seen_backward_ = -1;
  bool all_deferred_ = true;  ///< of what has arrived since the last agreement
  bool looking_ = false;
  int first_nonfinite_ = -1;
  at::Tensor first_there_;  ///< look_in_device()
  std::int64_t nothing_there_ = 0;
  bool unfinished_ = false, aborted_ = false, deferring_ = false, no_edits_ = false, over_ = false;
  std::uint64_t edits_ = 0, marked_edits_ = 0, edited_ = 0;
};

}  // namespace zero
