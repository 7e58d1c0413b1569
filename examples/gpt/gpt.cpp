// A byte-level GPT trained on several ranks, as an example of how an ordinary LibTorch trainer uses zero:
//
//   mpirun -n 2 build/examples/gpt --text FOLDER --model small --stage 1 --steps 200
//
// train() is the part to read. What it needs lies in files of their own: model.h, text.h, recorder.h (measurements), report.h
// (progress, tables, JSON), settings.h (the command line). docs/gpt.md describes all of it.
#include <ATen/Parallel.h>
#include <zero/nccl.h>
#include <zero/staged.h>
#include <zero/zero.h>

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <optional>

#include "checkpoints.h"
#include "generate.h"
#include "memory.h"
#include "model.h"
#include "ranks.h"
#include "recorder.h"
#include "sha256.h"
#include "text.h"
#include "train.h"

namespace gpt {
namespace {

zero::Communicator communicator_for(const Settings& settings, const zero::Communicator& comm) {
  if (settings.device == "cuda") return zero::make_nccl_communicator(comm);
  if (settings.device == "cuda-staged") return zero::make_staged_communicator(comm, zero::choose_device(comm));
  return comm;
}

/// Small gradients vanish in float16: losses are multiplied, and the step divides again.
std::optional<zero::LossScaler> make_scaler(const Settings& settings, zero::ZeroOptimizer& optimizer) {
  if (settings.loss_scale == "none") return std::nullopt;
  if (settings.loss_scale == "torch") return zero::LossScaler(optimizer, zero::LossScalerOptions::torch());
  if (settings.loss_scale == "deepspeed") return zero::LossScaler(optimizer, zero::LossScalerOptions::deepspeed());
  return zero::LossScaler(optimizer, zero::LossScalerOptions::fixed(std::stod(settings.loss_scale)));
}

}  // namespace

Run train(const Settings& settings, const std::string& text, const zero::Communicator& comm) {
  Recorder recorder(settings, comm);
  const Size& size = size_named(settings.model);
  std::optional<zero::DeferredInit> deferred;
  if (settings.deferred_init) deferred.emplace();
  auto model = std::make_shared<Model>(size);
  // On a GPU the ranks talk over another communicator; what is on the host goes on over the first.
  const zero::Communicator ranks = communicator_for(settings, comm);
  model->to(ranks.device(), type_named(settings.dtype));
  const Batches batches(text, size.context, settings.seed);

  // The one change: the optimizer is wrapped, with the ranks it works on.
  auto optimizer =
      zero::wrap(make_optimizer(settings, model->parameters()), zero::Options(ranks)
                                                                    .stage(static_cast<zero::Stage>(settings.stage))
                                                                    .bucket_bytes(settings.bucket_bytes)
                                                                    .memory_budget(settings.memory_budget)
                                                                    .module(*model));

  deferred.reset();
  const auto scaler = make_scaler(settings, optimizer);
  Checkpoints checkpoints(settings, *model, optimizer);
  recorder.start_at(checkpoints.resume());

  double loss = 0;
  do {
    recorder.begin_step();
    optimizer.zero_grad();
    loss = 0;
    for (std::int64_t micro = 0; micro < settings.accumulate; ++micro) {
      const auto [inputs, targets] =
          batches.get({recorder.step(), micro, settings.accumulate, comm.rank(), comm.size()}, settings.micro_batch);
      const auto micro_loss =
          model->forward(inputs.to(ranks.device()), targets.to(ranks.device())) / static_cast<double>(settings.accumulate);
      (scaler ? scaler->scale(micro_loss) : micro_loss).backward();
      loss += micro_loss.item<double>();
    }
    if (settings.clip > 0) zero::clip_grad_norm_(optimizer, settings.clip);
    recorder.before_update(optimizer.memory());
    optimizer.step();
  } while (checkpoints.end_step(recorder.end_step(loss, optimizer.last_step())));

  const auto measured = recorder.finish(model->parameter_count(), optimizer.padded_numel(), optimizer.memory_plan());
  if (settings.explain && comm.rank() == 0) std::printf("%s\n", optimizer.explain().c_str());
  if (!settings.export_to.empty()) zero::export_model(settings.export_to, *model, optimizer);
  if (settings.generate > 0 || settings.quickstart) optimizer.unshard();  // rank 0 generates text with the model alone
  return {measured, model};
}

namespace {

void print_info() {
  for (const Size& size : sizes()) {
    const Model model(size);
    std::printf("%s layers,d,heads,ctx (%lld, %lld, %lld, %lld) params %lld sha256 %s\n", size.name.c_str(),
                static_cast<long long>(size.layers), static_cast<long long>(size.width), static_cast<long long>(size.heads),
                static_cast<long long>(size.context), static_cast<long long>(model.parameter_count()),
                weights_sha256(model).c_str());
  }
}

/// What can be found wrong before training: the text, its length, the file for measurements. The same on all ranks, or an error.
std::string read_inputs(const Settings& settings, const zero::Communicator& comm) {
  std::string text;
  on_every_rank(comm, "reading the text", [&] {
    text = read_text(settings.text);
    const Batches check(text, size_named(settings.model).context);
    if (!settings.json.empty() && comm.rank() == 0)
      TORCH_CHECK(std::ofstream(settings.json, std::ios::app).good(), "--json: can't write ", settings.json);
  });
  const auto hashes = comm.exchange(sha256_hex(text), "sha256 of the text");
  for (std::size_t rank = 0; rank < hashes.size(); ++rank)
    TORCH_CHECK(hashes[rank] == hashes[0], "--text: ranks 0 and ", rank, " read different bytes");
  return text;
}

void run(const Settings& settings, const zero::Communicator& comm) {
  const bool speaks = comm.rank() == 0;
  if (settings.info) {
    if (speaks) print_info();
    return;
  }
  if (!settings.write_weights.empty()) {
    on_every_rank(comm, "writing the weights", [&] {
      if (speaks) write_weights(Model(size_named(settings.model)), settings.write_weights);
    });
    return;
  }
  TORCH_CHECK(!settings.plain || comm.size() == 1, "--plain trains in one process: start it without mpirun");
  // Ranks share the machine's cores; a thread each, unless the user says otherwise.
  if (comm.size() > 1 && std::getenv("OMP_NUM_THREADS") == nullptr) at::set_num_threads(1);

  const std::string text = read_inputs(settings, comm);
  if (settings.quickstart) {
    quickstart(settings, text, comm);
    return;
  }
  Run result = settings.plain ? train_plain(settings, text) : train(settings, text, comm);
  if (!speaks) return;
  result.measured.text_sha256 = sha256_hex(text);
  result.measured.text_bytes = static_cast<std::int64_t>(text.size());
  if (!settings.quiet) print_summary(result.measured);
  if (settings.generate > 0) std::printf("%s\n", generate(*result.model, settings.prompt, settings.generate).c_str());
  if (!settings.json.empty()) write_json(settings.json, result.measured);
}

/// One line for an error, from rank 0 if all ranks have it and can meet once more; a rank whose peers are gone or elsewhere
/// says its own. The barrier comes after rank 0's line because mpirun ends the others once a process has failed.
int report_error(const zero::Communicator& comm, const std::string& message) {
  const bool speaks = !comm.defined() || comm.rank() == 0;
  if (speaks) std::fprintf(stderr, "gpt: %s\n", message.c_str());
  if (!comm.defined()) return 1;
  try {
    comm.barrier(message);  // the name of this call tells ranks that are elsewhere what happened here
  } catch (const c10::Error&) {
    if (!speaks) std::fprintf(stderr, "gpt: rank %d: %s\n", comm.rank(), message.c_str());
  }
  return 1;
}

}  // namespace
}  // namespace gpt

int main(int argc, char** argv) {
  gpt::count_allocations();
  zero::Communicator comm;
  try {
    comm = zero::make_communicator();
    if (const auto settings = gpt::parse(argc, argv, comm.rank() == 0)) gpt::run(*settings, comm);
    return 0;
  } catch (const std::exception& e) {
    return gpt::report_error(comm, gpt::one_line(e));
  }
}
