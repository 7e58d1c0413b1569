// How parameters come under stage 3 and leave it, and the fence around updates. What operators meet is in parameter_pages.cpp.
#include "residency/paged_parameters.h"

#include <ATen/core/grad_mode.h>
#include <unistd.h>

#include <algorithm>

#include "core/check.h"
#include "core/memory.h"
#include "paging/page_table.h"
#include "paging/storage.h"

namespace zero {
namespace {

constexpr std::size_t kDefaultBuckets = 4;

}  // namespace

std::int64_t default_budget(const Layout& layout) { return layout.largest_buckets_bytes(kDefaultBuckets); }

PagedParameters::PagedParameters(const Communicator& comm, const std::vector<Parameter>& parameters, const Layout& layout,
                                 Settings settings, Callbacks callbacks)
    : comm_(comm),
      gathers_(comm.nodes() > 1 || !comm.device().is_cpu() ? comm.duplicate() : Communicator()),
      parameters_(parameters),
      layout_(layout),
      settings_(settings),
      callbacks_(std::move(callbacks)),
      pager_(*this, std::make_unique<LeastRecentlyUsed>(), settings.budget,
             Pager::Rules{true, settings.beyond == Settings::Beyond::refused}),
      prefetcher_(pager_),
      trainer_(std::this_thread::get_id()) {}

PagedParameters::~PagedParameters() {
  prefetcher_.pause();
  for (std::size_t i = 0; i < entries_.size(); ++i) {
    auto& entry = entries_[i];
    if (!entry.paged) continue;
    auto* storage = entry.storage.unsafeGetStorageImpl();
    PageTable::global().remove(storage);
    // What is resident stays with whoever holds it, what isn't says so.
    if (is_released(*storage))
      release_storage(*storage, parameters_[i].name +
                                    ": its values were with the other ranks when the optimizer was destroyed; call "
                                    "ZeroOptimizer::unshard() before, on every rank");
  }
}

bool PagedParameters::manages(int parameter) const {
  return parameter < static_cast<int>(entries_.size()) && static_cast<bool>(entries_[parameter].storage);
}

void PagedParameters::allocate() {
  prefetcher_.pause();  // its thread looks at what grows here
  entries_.resize(parameters_.size());
  units_.resize(static_cast<std::size_t>(layout_.units()));
  for (std::size_t s = shards_.size(); s < layout_.spaces().size(); ++s) place_shards(s);
  if (settings_.budget == 0) pager_.set_budget(default_budget(layout_));
  // Mapped buckets have no copy to be made ahead. Between nodes every rank has to fetch in one order, which a thread's timing must
  // not decide.
  prefetcher_.set_ahead(settings_.prefetch && !gathers_.defined() && 2 * mapped_bytes() < layout_.padded_bytes());
}

// Collective. The shards of a space's buckets one after the other, those that can be mapped on whole pages.
void PagedParameters::place_shards(std::size_t s) {
  const auto& space = layout_.spaces()[s];
  const auto least = settings_.mapped_shard_bytes;
  const bool maps = least > 0 && !settings_.debug && !gathers_.defined();  // debugging poisons what is released
  const auto page = static_cast<std::int64_t>(sysconf(_SC_PAGESIZE));
  std::int64_t end = 0;
  std::vector<int> mappable;
  for (std::size_t b = 0; b < space.buckets.size(); ++b) {
    const int unit = layout_.unit(static_cast<int>(s), static_cast<int>(b));
    const auto slice = layout_.shard_bytes(unit);
    if (maps && slice >= least && slice % page == 0) {
      end = (end + page - 1) / page * page;
      mappable.push_back(unit);
    }
    units_[unit].offset = end;
    end += slice;
  }
  shards_.push_back(comm_.allocate(end, "shards of the parameters of group " + std::to_string(space.group),
                                   mappable.empty() ? Backing::memory : Backing::file));
  for (const int unit : mappable)
    units_[unit].view = SideBySide::map(*shards_[s].impl(), units_[unit].offset, layout_.shard_bytes(unit));
}

bool PagedParameters::moved(int parameter) const {
  if (!manages(parameter)) return layout_.slot(parameter).space >= 0;  // left by unshard()
  const auto& entry = entries_[parameter];
  const auto& tensor = parameters_[parameter].tensor;
  if (entry.storage.unsafeGetStorageImpl() != tensor.storage().unsafeGetStorageImpl()) return true;
  return !entry.paged && entry.address != tensor.const_data_ptr();
}

void PagedParameters::adopt(int parameter) {
  if (layout_.slot(parameter).space < 0) return;
  entries_.resize(parameters_.size());
  auto& entry = entries_[parameter];
  if (entry.storage && !moved(parameter)) return;
  pager_.discard(layout_.unit_of(parameter));
  if (entry.paged) {  // aliases of what the tensor has left
    auto* storage = entry.storage.unsafeGetStorageImpl();
    PageTable::global().remove(storage);
    release_storage(*storage, "these values of " + parameters_[parameter].name + " were replaced (to(), load, set_data)");
  }
  entry = Entry{};
  const auto& tensor = parameters_[parameter].tensor;
  copy_in(parameter, tensor);
  entry.storage = tensor.storage();
  entry.address = tensor.const_data_ptr();
  const bool owns = owns_storage(tensor);
  entry.waits = owns && started_ && !updating_;
  entry.paged = owns && !entry.waits;
  if (!entry.paged) return;
  entry.refusal = "the values of " + parameters_[parameter].name +
                  " are not resident: every rank keeps its part. Operators gather them by themselves; for a raw pointer "
                  "(data_ptr(), accessor(), torch::save) hold a zero::GatherGuard";
  const_cast<at::Tensor&>(tensor).set_data(with_key(tensor));
  PageTable::global().add(tensor.storage().getWeakStorageImpl().lock(), weak_from_this(), parameter);
  release_storage(*entry.storage.unsafeGetStorageImpl(), entry.refusal);
}

void PagedParameters::copy_in(int parameter, const at::Tensor& values) {
  const at::NoGradGuard no_grad;
  const auto& slot = layout_.slot(parameter);
  const auto whole = is_dense(values) ? values.detach() : values.detach().contiguous();
  const auto itemsize = layout_.spaces()[slot.space].itemsize;
  const auto* from = static_cast<const char*>(whole.const_data_ptr());
  for (const auto& segment : layout_.segments(slot.space, slot.bucket, comm_.rank()))
    if (segment.parameter == parameter)
      copy_bytes(memory(slot.space, slot.bucket, segment), from + segment.in_parameter * itemsize, segment.numel * itemsize,
                 comm_.device());
}

void PagedParameters::leave(int parameter) {
  if (!manages(parameter)) return;
  prefetcher_.pause();
  auto& entry = entries_[parameter];
  if (entry.paged) {
    auto* storage = entry.storage.unsafeGetStorageImpl();
    const auto& tensor = parameters_[parameter].tensor;
    const std::vector<int> unit{layout_.unit_of(parameter)};
    pager_.pin(unit, true);
    detach_storage(*storage);
    pager_.unpin(unit, {});
    PageTable::global().remove(storage);
    if (tensor.storage().unsafeGetStorageImpl() == storage) const_cast<at::Tensor&>(tensor).set_data(without_key(tensor));
  }
  entry = Entry{};
}

void PagedParameters::leave_moved(const std::string& label) {
  for (std::size_t k = 0; k < entries_.size(); ++k) {
    const int i = static_cast<int>(k);
    if (!parameters_[k].active || !manages(i) || !entries_[k].paged || !moved(i)) continue;
    // Where gathering is collective, whatever this rank has to do, all do.
    if (entries_[k].storage.use_count() > 1 || gathers_.defined()) leave(i);
  }
  comm_.barrier(label + ": before replaced parameters are taken in");
}

void PagedParameters::leave_all() {
  prefetcher_.pause();
  for (std::size_t i = 0; i < entries_.size(); ++i) leave(static_cast<int>(i));
  pager_.release();
  memory_.trim();
  prefetcher_.forget();
}

void PagedParameters::ready() {
  comm_.barrier("parameters are in their shards");
  started_ = true;
  prefetcher_.forget();
  prefetcher_.learn({}, pager_.budget(), false);
}

void PagedParameters::write_back(const std::string& label) {
  prefetcher_.pause();
  comm_.barrier(label + ": before edited parameters are written back");
  if (settings_.debug) check_together(label);
  pager_.store();
  pager_.release();
  comm_.barrier(label + ": edited parameters have been written back");
  prefetcher_.resume_disturbed();
}

void PagedParameters::fence(const std::string& label) {
  trainer_.store(std::this_thread::get_id(), std::memory_order_relaxed);
  prefetcher_.pause();
  comm_.barrier(label + ": before parameters are updated");
  if (settings_.debug) check_together(label);
  pager_.store();
  pager_.release();
}

void PagedParameters::begin_update(const std::string& label) {
  fence(label);
  updating_ = true;
  for (std::size_t i = 0; i < entries_.size(); ++i) {
    if (entries_[i].waits) entries_[i] = Entry{};
    if (parameters_[i].active) adopt(static_cast<int>(i));
  }
  updating_ = false;
}

void PagedParameters::end_edit(const std::string& label) {
  comm_.barrier(label + ": parameters have been edited");
  copy_out_mirrored();
  prefetcher_.learn({}, pager_.budget(), false);
}

void PagedParameters::end_update(const std::string& label, StepReport& report) {
  comm_.barrier(label + ": parameters have been updated");
  copy_out_mirrored();
  take_stock(report);
  std::vector<std::int64_t> sizes(static_cast<std::size_t>(layout_.units()));
  for (std::size_t unit = 0; unit < sizes.size(); ++unit) sizes[unit] = bytes(static_cast<int>(unit));
  prefetcher_.learn(sizes, pager_.budget());  // from here on, what is fetched is the next step's
}

void PagedParameters::take_stock(StepReport& report) {
  const auto pages = pager_.take_stats();
  const auto ahead = prefetcher_.take_stats();
  report.faults = pages.fetches + pages.brought - ahead.ahead;
  report.prefetch_hits = ahead.hits;
  report.deviations = ahead.deviations;
  report.late_prefetch_seconds = pages.waited_seconds;
  report.seconds_gather += std::exchange(fetch_seconds_, 0) + pages.waited_seconds;
  report.evictions = pages.evictions;
  report.write_backs = pages.stores;
  report.bytes_gathered = bytes_gathered_.exchange(0);
  report.predicted_bytes = sharded_part(prefetcher_.plan().bytes);
  report.peak_resident_parameter_bytes = pages.peak_bytes;
}

std::string PagedParameters::problem() const {
  return held_.empty() ? "" : "step() within a zero::GatherGuard (or an operator that uses parameters); let it end first";
}

void* PagedParameters::memory(int space, int bucket, const Segment& segment) {
  return static_cast<char*>(shards_[space].data()) + units_[layout_.unit(space, bucket)].offset +
         segment.in_shard * layout_.spaces()[space].itemsize;
}

void PagedParameters::before_update(int space, int bucket) {
  for (const int i : layout_.spaces()[space].buckets[bucket].parameters)
    if (manages(i) && !entries_[i].paged) copy_in(i, parameters_[i].tensor);
}

// Parameters that stay whole where the user has them.
void PagedParameters::copy_out_mirrored() {
  const at::NoGradGuard no_grad;
  for (std::size_t k = 0; k < entries_.size(); ++k) {
    const int i = static_cast<int>(k);
    if (!manages(i) || entries_[k].paged || parameters_[k].tensor.numel() == 0) continue;
    const std::vector<int> unit{layout_.unit_of(i)};
    pager_.pin(unit, true);
    const auto& tensor = parameters_[k].tensor;
    tensor.detach().copy_(tensor_over(units_[unit[0]].block.get() + layout_.bytes_in_bucket(i), nullptr, tensor.sizes(),
                                      layout_strides(tensor), tensor.scalar_type(), tensor.device()));
    pager_.unpin(unit, {});
  }
}

std::int64_t PagedParameters::parameter_bytes() const {
  std::int64_t sum = 0;
  for (const auto& shard : shards_) sum += shard.bytes();
  for (std::size_t i = 0; i < parameters_.size(); ++i)
    if (!manages(static_cast<int>(i)) || !entries_[i].paged) sum += static_cast<std::int64_t>(parameters_[i].tensor.nbytes());
  return sum;
}

std::int64_t PagedParameters::buffer_bytes() const {
  std::int64_t sum = memory_.bytes();
  for (int unit = 0; unit < layout_.units(); ++unit)
    if (units_[unit].own_pages) sum += bytes(unit);  // at most
  return sum;
}

}  // namespace zero
