// Stage 3: this rank keeps its shard of every parameter, in memory that peers can reach, and a bucket's parameters are whole only
// while operators use them (src/paging/). Each parameter's own storage comes and goes, so that views, aliases and tensors that
// autograd has saved stay right.
//
// Inside a node nothing is asked of the peers: ranks may touch different parameters in different order. Large buckets are read where
// they lie: the ranks' shards, mapped side by side (SideBySide). Small ones are copied out of the shards. Between nodes a bucket is
// gathered by a collective, on a communicator of its own, in which a different order is an error. Either way step() is the fence:
// shards change between begin_update(), when nobody reads, and end_update(), when all have been written.
//
// An in-place edit between steps changes this rank's copy (of a mapped bucket, the pages that are written become one), which stays
// whole until the next fence writes the rank's own slice of it to the shard.
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "comm/window.h"
#include "core/parameter.h"
#include "layout/layout.h"
#include "paging/page_owner.h"
#include "paging/pager.h"
#include "paging/prefetcher.h"
#include "residency/parameter_store.h"
#include "residency/unit_memory.h"
#include "zero/communicator.h"
#include "zero/report.h"

namespace zero {

/// Options::memory_budget where the user names none.
std::int64_t default_budget(const Layout& layout);

class PagedParameters final : public ParameterStore,
                              public PageOwner,
                              private Transport,
                              public std::enable_shared_from_this<PagedParameters> {
 public:
  struct Settings {
    std::int64_t budget = 0;  ///< bytes of whole parameters at a time; 0: four of the largest buckets
    bool prefetch = true;
    /// What becomes of an operator that needs more than the budget.
    enum class Beyond { refused, warned, allowed } beyond = Beyond::refused;
    std::int64_t mapped_shard_bytes = 0;  ///< see Options::mapped_shard_bytes
    bool debug = false;                   ///< see Options::debug
  };
  struct Callbacks {
    /// Collective. Edited parameters don't fit the budget any more: all ranks call write_back() now.
    std::function<void()> write_back;
    /// "step 7", for messages.
    std::function<std::string()> when;
    /// "step 7: gathering parameters, bucket 2 ('fc.weight' … 'out.bias')"
    std::function<std::string(int unit)> label;
  };

  /// Collective over several nodes.
  PagedParameters(const Communicator& comm, const std::vector<Parameter>& parameters, const Layout& layout, Settings settings,
                  Callbacks callbacks);
  ~PagedParameters() override;

  // ParameterStore
  void allocate() override;
  void adopt(int parameter) override;
  void leave(int parameter) override;
  void leave_all() override;
  void ready() override;
  bool moved(int parameter) const override;
  void begin_update(const std::string& label) override;
  void end_update(const std::string& label, StepReport& report) override;
  void end_edit(const std::string& label) override;
  /// Collective: nobody reads shards any more, edits are written, nothing is whole.
  void fence(const std::string& label);
  void* memory(int space, int bucket, const Segment& segment) override;
  void before_update(int space, int bucket) override;
  void after_update(int /*space*/, int /*bucket*/, const std::string& /*label*/) override {}
  std::int64_t parameter_bytes() const override;
  std::int64_t buffer_bytes() const override;

  /// Nothing is fetched ahead until the next fence is over: this rank is about to tell the others that it reads no shards.
  void pause() { prefetcher_.pause(); }
  /// Collective. Tensors that share the memory which a parameter has left keep its values.
  void leave_moved(const std::string& label);
  /// Collective: this rank's slices of edited parameters go to its shard, and the copies go.
  void write_back(const std::string& label);
  /// Keeps parameters whole, whatever the budget, until unhold(); `written`: as after an edit.
  void hold(const std::vector<int>& parameters);
  void unhold(const std::vector<int>& parameters, bool written) noexcept;
  bool manages(int parameter) const;

  Plan plan() const { return prefetcher_.plan(); }
  /// Why a step can't be made now, or empty.
  std::string problem() const;
  std::int64_t budget() const { return pager_.budget(); }
  /// Of the buckets that are read where they lie.
  std::int64_t mapped_bytes() const;

  // PageOwner
  void begin(const std::vector<Touch>& touches, const std::string& op) override;
  void end(const std::vector<Touch>& touches) noexcept override;
  bool edit_in_parts(const Touch&, const std::function<void(const at::Tensor&)>&) override { return false; }

 private:
  struct Entry {
    c10::Storage storage;  ///< of the tensor when it was adopted
    const void* address = nullptr;
    bool waits = false;   ///< is paged from the next update on: graphs that exist have saved it without the key
    bool paged = false;   ///< false: it doesn't own its storage, and stays whole where it is (mirrored)
    std::string refusal;  ///< what a raw pointer meets while it is released
  };

  std::vector<int> units_of(const std::vector<Touch>& touches, bool written_only = false) const {
    return groups_of(touches, written_only, [this](int page) { return layout_.unit_of(page); });
  }
  std::vector<Touch> paged_of(const std::vector<int>& parameters, Access access) const;
  /// A bucket on this rank.
  struct Unit {
    std::int64_t offset = 0;           ///< of its shard, in every rank's Buffer of the space
    std::shared_ptr<SideBySide> view;  ///< null: is copied when it is fetched
    bool own_pages = false;            ///< of the view: some may have been written
    UnitMemory::Block block{};         ///< while it is resident
  };
  void begin(const std::vector<Touch>& touches, const std::string& op, bool may_exceed);
  void place_shards(std::size_t space);
  void mark_own_pages(const std::vector<int>& units) noexcept;
  char* shard_of(int unit, int member) const;
  void check_together(const std::string& label);
  void log_fault(const std::vector<Touch>& touches, const std::string& op) const;
  void copy_in(int parameter, const at::Tensor& values);
  void copy_out_mirrored();
  void take_stock(StepReport& report);
  void warn_beyond();
  void settle_written(const std::vector<int>& units);
  std::int64_t unwritten_bytes(const std::vector<int>& units) const;
  [[noreturn]] void refuse(const std::vector<Touch>& touches, const std::string& op, std::int64_t needed) const;
  std::int64_t sharded_part(std::int64_t bytes) const { return bytes / layout_.ranks() * (layout_.ranks() - 1); }

  // Transport
  void fetch(int unit) override;
  void store(int unit) override;
  void release(int unit) override;
  std::int64_t bytes(int unit) const override { return layout_.bytes(unit); }

  Communicator comm_;
  Communicator gathers_;  ///< over several nodes
  const std::vector<Parameter>& parameters_;
  const Layout& layout_;
  Settings settings_;
  Callbacks callbacks_;
  std::vector<Buffer> shards_;  ///< per space: this rank's shards of all its buckets
  std::vector<Entry> entries_;  ///< per parameter
  UnitMemory memory_{comm_.device()};
  std::vector<Unit> units_;
  Pager pager_;
  Prefetcher prefetcher_;
  bool started_ = false, updating_ = false;
  std::atomic<std::thread::id> trainer_;  ///< the thread whose touches are traced
  std::vector<int> held_;                 ///< units that its operators use now, the innermost last
  std::atomic<std::int64_t> bytes_gathered_{0};
  double fetch_seconds_ = 0;  ///< the trainer's, since the last step
};

}  // namespace zero
