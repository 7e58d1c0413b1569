// What Options::debug adds: what ranks do differently, and who faults.
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstdio>

#include "core/agreement.h"
#include "core/check.h"
#include "paging/page_table.h"
#include "residency/paged_parameters.h"

namespace zero {
namespace {

std::string packed(const std::vector<std::int64_t>& numbers) {
  return {reinterpret_cast<const char*>(numbers.data()), numbers.size() * sizeof(std::int64_t)};
}

std::vector<std::int64_t> unpacked(const std::string& bytes) {
  std::vector<std::int64_t> out(bytes.size() / sizeof(std::int64_t));
  std::copy(bytes.begin(), bytes.end(), reinterpret_cast<char*>(out.data()));
  return out;
}

}  // namespace

void PagedParameters::log_fault(const std::vector<Touch>& touches, const std::string& op) const {
  for (const auto& touch : touches) {
    const int unit = layout_.unit_of(touch.page);
    if (pager_.resident(unit)) continue;
    std::fprintf(stderr, "zero: rank %d, %s: %s touches %s, %lld bytes are gathered\n", comm_.rank(), callbacks_.when().c_str(),
                 op.c_str(), parameters_[touch.page].name.c_str(), static_cast<long long>(sharded_part(bytes(unit))));
  }
}

// Rank 0 warns. Nothing of it is an error: inside a node the ranks may take different paths, and of what they have written differently
// each element is its owner's.
void PagedParameters::check_together(const std::string& label) {
  std::string problem;
  for (std::size_t i = 0; i < entries_.size(); ++i) {
    const auto& entry = entries_[i];
    if (!entry.paged) continue;
    const auto found = PageTable::global().find(entry.storage.unsafeGetStorageImpl());
    if (!found || found->owner.get() != this || found->page != static_cast<int>(i))
      problem = "debug: " + parameters_[i].name + " is not in the page table as this optimizer's";
  }
  throw_together(comm_, problem);
  const auto orders = comm_.exchange(packed(prefetcher_.touched()), label + ": debug, order of touches");
  std::vector<std::int64_t> written;  // unit, hash of its content
  for (int unit = 0; unit < layout_.units(); ++unit)
    if (pager_.written(unit)) {
      written.push_back(unit);
      const auto values =
          tensor_over(units_[unit].block.get(), nullptr, {bytes(unit)}, {1}, at::kByte, comm_.device()).to(at::kCPU);
      written.push_back(static_cast<std::int64_t>(hash_bytes(values.const_data_ptr(), values.nbytes())));
    }
  const auto contents = comm_.exchange(packed(written), label + ": debug, edited parameters");
  if (comm_.rank() != 0) return;
  for (int r = 1; r < comm_.size(); ++r) {
    if (orders[r] != orders[0]) {
      const auto a = unpacked(orders[0]), b = unpacked(orders[r]);
      std::size_t at = 0;
      while (at < a.size() && at < b.size() && a[at] == b[at]) ++at;
      const auto name = [&](const std::vector<std::int64_t>& order) {
        return at < order.size() ? callbacks_.label(static_cast<int>(order[at])) : std::string("the end of the step");
      };
      TORCH_WARN(label, ": debug: ranks 0 and ", r, " touched buckets in different order; touch ", at, " is of ", name(a),
                 " on rank 0 and of ", name(b), " on rank ", r);
    }
    if (contents[r] != contents[0]) {
      TORCH_WARN(label, ": debug: ranks 0 and ", r, " have written different values to parameters between steps: each element ",
                 "becomes what the rank that keeps it has written");
    }
  }
}

}  // namespace zero
