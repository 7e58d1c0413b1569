#include <ATen/core/grad_mode.h>

#include <utility>

#include "checkpoint/background_save.h"
#include "checkpoint/contents.h"
#include "checkpoint/folder.h"
#include "checkpoint/job.h"
#include "checkpoint/manifest.h"
#include "checkpoint/shard_file.h"
#include "checkpoint/together.h"
#include "core/check.h"
#include "optimizer/impl.h"
#include "zero/checkpoint.h"

namespace zero {

using namespace checkpoint;

void wait_for_save(ZeroOptimizer& optimizer) {
  auto& impl = optimizer.impl();
  if (!impl.saving) return;
  const auto saving = std::exchange(impl.saving, nullptr);
  const auto problem = saving->wait(impl.comm);
  if (!problem.empty()) ZERO_FAIL(problem);
}

std::string save(const std::string& directory, const ModelTensors& model, ZeroOptimizer& optimizer, const Extra& extra,
                 const SaveOptions& options) {
  auto& impl = optimizer.impl();
  const at::NoGradGuard no_grad;
  const Counted counted(impl.comm, impl.pending);
  wait_for_save(optimizer);
  impl.meet_between_steps(Call::kSave, options.keep() < 0 ? "zero::save(): SaveOptions::keep is negative" : "");
  const auto& comm = impl.comm;

  Contents contents;
  exchange_or_throw(comm, attempt([&] { contents = list_contents(impl, model); }), "", "zero::save()");
  const auto differs = buffers_that_differ(impl, contents);

  // From here to end_reading() ranks go on together whatever happens.
  Quiet quiet(impl, "zero::save()");
  Job job;
  std::optional<NewFolder> folder;
  auto problem = attempt([&] {
    job = make_job(impl, contents, differs, extra);
    if (options.async()) copy_to_host(job.runs);
    if (comm.rank() == 0) folder.emplace(NewFolder::make(directory, impl.report.number));
  });
  const auto begun = exchange(comm, problem, folder ? folder->path() : "", "zero::save(): the new folder");
  Manifest part;
  if (begun.problem.empty() && !options.async())
    problem = attempt([&] { part = write_shard(begun.values[0], shard_name(comm.rank(), comm.size()), job.runs); });
  quiet.end_reading();
  if (!begun.problem.empty()) ZERO_FAIL(begun.problem);

  if (options.async()) {
    BackgroundSave::Plan plan;
    plan.job = std::move(job);
    plan.folder = begun.values[0];
    if (folder) plan.commit.emplace(std::move(*folder));
    plan.rank = comm.rank(), plan.ranks = comm.size(), plan.keep = options.keep();
    plan.timeout = comm.wait_policy().timeout;
    impl.saving = std::make_shared<BackgroundSave>(std::move(plan));
    return step_folder(directory, impl.report.number);
  }

  job.runs.clear();
  auto manifest = std::move(job.head);
  manifest.files = std::move(part.files), manifest.tensors = std::move(part.tensors);
  std::string text;
  if (problem.empty()) problem = attempt([&] { text = to_json(manifest); });
  const auto parts = exchange_or_throw(comm, problem, text, "zero::save(): the ranks' files");
  std::string committed;
  if (comm.rank() == 0)
    problem = attempt([&] {
      std::vector<Manifest> manifests;
      for (const auto& one : parts) manifests.push_back(from_json(one, "a rank's part"));
      const auto whole = merge(manifests);
      check_complete(whole, folder->path());
      committed = folder->commit(to_json(whole), options.keep());
      folder.reset();
    });
  return exchange_or_throw(comm, problem, committed, "zero::save(): the commit")[0];
}

std::optional<std::string> latest(const std::string& directory) {
  auto all = checkpoints_in(directory);
  if (all.empty()) return std::nullopt;
  return std::move(all.back());
}

}  // namespace zero
