#include "checkpoint/job.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <cstdio>
#include <cstring>

#include "checkpoint/checksum.h"
#include "checkpoint/types.h"
#include "core/agreement.h"
#include "core/check.h"
#include "precision/loss_scaling.h"
#include "update/state_fields.h"

namespace zero::checkpoint {
namespace {

// What all ranks have alike: each writes its share of the list, so that stage 0 writes in parallel too.
class Shared {
 public:
  Shared(std::vector<Run>& runs, int rank, int ranks) : runs_(runs), rank_(rank), ranks_(ranks) {}

  void add(Piece piece) { pieces_.push_back(std::move(piece)); }

  void cut() const {
    std::int64_t total = 0;
    for (const auto& piece : pieces_) total += piece.count * piece.tensor.itemsize();
    const auto [from, to] = share(total, rank_, ranks_);
    std::int64_t at = 0;
    for (const auto& piece : pieces_) {
      const std::int64_t itemsize = piece.tensor.itemsize();
      const auto element = [&](std::int64_t byte) {
        return (std::clamp(byte - at, std::int64_t{0}, piece.count * itemsize) + itemsize - 1) / itemsize;
      };
      const auto first = element(from), last = element(to);
      at += piece.count * itemsize;
      // One without elements is nobody's part, but has to be in the manifest.
      if (first == last && (piece.count > 0 || rank_ != 0)) continue;
      runs_.push_back(run_of(piece.tensor, first, last - first,
                             [values = piece.values, first, n = last - first] { return values().narrow(0, first, n); }));
    }
  }

 private:
  std::vector<Run>& runs_;
  int rank_, ranks_;
  std::vector<Piece> pieces_;
};

Run whole(const std::string& kind, const std::string& name, const std::string& field, const at::Tensor& tensor) {
  auto entry = entry_of(kind, name, field, tensor);
  return run_of(entry, 0, tensor.numel(), [tensor] { return flat_in(tensor, layout_strides(tensor)); });
}

at::Tensor random_state(at::Generator generator) {
  const std::lock_guard<std::mutex> lock(generator.mutex());
  return generator.get_state();
}

at::Tensor bytes_tensor(const std::string& bytes) {
  auto out = at::empty({static_cast<std::int64_t>(bytes.size())}, at::kByte);
  if (!bytes.empty()) std::memcpy(out.mutable_data_ptr(), bytes.data(), bytes.size());
  return out;
}

Manifest head_of(const ZeroOptimizer::Impl& impl, const Extra& extra) {
  Manifest head;
  head.step = impl.report.number;
  head.ranks = impl.comm.size(), head.stage = static_cast<int>(impl.options.stage());
  head.optimizer = impl.wrapped_name;
  head.groups = static_cast<int>(impl.groups->size());
  for (std::size_t g = 0; g < impl.groups->size(); ++g)
    for (auto& [name, value] : describe_options(impl.kind, (*impl.groups)[g].options(), "group " + std::to_string(g)))
      head.options.emplace(name, value);
  if (impl.scaling) {
    const auto& s = impl.scaling->state;
    head.loss_scale = {{"scale", s.scale},
                       {"clean", static_cast<std::int64_t>(s.clean)},
                       {"tolerated", static_cast<std::int64_t>(s.tolerated)},
                       {"skipped_in_a_row", static_cast<std::int64_t>(s.skipped_in_a_row)}};
  }
  for (const auto& [name, value] : extra)
    std::visit(
        [&, key = name](const auto& x) {
          if constexpr (!std::is_same_v<std::decay_t<decltype(x)>, at::Tensor>) head.extra.emplace(key, x);
        },
        value.value());
  return head;
}

}  // namespace

Run run_of(TensorEntry entry, std::int64_t begin, std::int64_t count, std::function<at::Tensor()> values) {
  return {std::move(entry), begin, count, [values = std::move(values)]() -> std::shared_ptr<const void> {
            auto held = std::make_shared<at::Tensor>(values().cpu());
            return {held, held->const_data_ptr()};
          }};
}

std::string shard_name(int rank, int ranks) {
  char name[64];
  (void)std::snprintf(name, sizeof name, "rank-%05d-of-%05d.safetensors", rank, ranks);
  return name;
}

std::vector<char> buffers_that_differ(const ZeroOptimizer::Impl& impl, const Contents& contents) {
  std::vector<std::uint64_t> sums(contents.loose.size(), 0);
  for (std::size_t i = 0; i < sums.size(); ++i) {
    if (contents.loose[i].kind != "buffer") continue;
    const auto values = loose_values(contents.loose[i]).cpu();
    sums[i] = checksum_of(values.const_data_ptr(), static_cast<std::int64_t>(values.nbytes()));
  }
  const auto all = impl.comm.exchange(std::string(reinterpret_cast<const char*>(sums.data()), sums.size() * sizeof sums[0]),
                                      "comparing buffers");
  ZERO_CHECK(std::all_of(all.begin(), all.end(), [&](const std::string& s) { return s.size() == all[0].size(); }),
             "zero::save(): the ranks' models have different numbers of tensors");
  std::vector<char> differs(sums.size(), 0);
  for (std::size_t i = 0; i < sums.size(); ++i)
    differs[i] = std::memcmp(all[0].data() + i * sizeof sums[0], &sums[i], sizeof sums[0]) != 0;
  return differs;
}

Job make_job(ZeroOptimizer::Impl& impl, const Contents& contents, const std::vector<char>& differs, const Extra& extra) {
  Job job;
  job.head = head_of(impl, extra);
  const int rank = impl.comm.rank();
  const bool first = rank == 0;
  auto held = held_pieces(impl, contents);
  job.head.states = std::move(held.states);
  Shared shared(job.runs, rank, impl.comm.size());
  for (auto& piece : held.pieces) {
    if (impl.replicated()) {
      shared.add(std::move(piece));
    } else {
      job.runs.push_back(run_of(piece.tensor, piece.begin, piece.count, piece.values));
    }
  }
  // Those without elements are in nobody's shard.
  for (std::size_t i = 0; i < impl.parameters.size(); ++i)
    if (first && contents.placed(impl, i) && impl.parameters[i].tensor.numel() == 0)
      job.runs.push_back(run_of(entry_of("parameter", contents.names[i], "", impl.parameters[i].tensor), 0, 0, {}));
  for (std::size_t i = 0; i < contents.loose.size(); ++i) {
    const auto& loose = contents.loose[i];
    Piece piece{entry_of(loose.kind, loose.name, "", loose.tensor), 0, loose.tensor.numel(),
                [loose] { return loose_values(loose); }};
    if (loose.kind == "parameter") {
      shared.add(std::move(piece));
    } else if (first || differs[i]) {  // a rank's own buffers
      if (!first) piece.tensor.field = std::to_string(rank);
      job.runs.push_back(run_of(piece.tensor, 0, piece.count, piece.values));
    }
  }
  shared.cut();
  if (first) {
    job.runs.push_back(whole("options", "options", "", bytes_tensor(archive_of_options(*impl.inner, *impl.groups))));
    for (const auto& [name, value] : extra)
      if (const auto* tensor = std::get_if<at::Tensor>(&value.value())) {
        ZERO_CHECK(tensor->defined() && tensor->layout() == at::kStrided, "extra '", name, "' is no dense tensor");
        job.runs.push_back(whole("extra", name, "", tensor->detach()));
      }
  }
  const auto field = std::to_string(rank);
  job.runs.push_back(whole("random", "cpu", field, random_state(at::detail::getDefaultCPUGenerator())));
  if (impl.device.is_cuda())
    job.runs.push_back(whole("random", "cuda", field, random_state(at::globalContext().defaultGenerator(impl.device))));
  return job;
}

void copy_to_host(std::vector<Run>& runs) {
  for (auto& run : runs) {
    if (run.count == 0) continue;
    const auto bytes = run.bytes();
    auto copy = std::shared_ptr<char[]>(new char[static_cast<std::size_t>(run.size())]);
    std::memcpy(copy.get(), bytes.get(), static_cast<std::size_t>(run.size()));
    run.bytes = [copy]() -> std::shared_ptr<const void> { return {copy, copy.get()}; };
  }
}

}  // namespace zero::checkpoint
