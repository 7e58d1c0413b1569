// The command line.
#include "settings.h"

#include <CLI/CLI.hpp>

#include <iostream>
#include <stdexcept>

namespace gpt {

std::optional<Settings> parse(int argc, char** argv, bool speaks) {
  Settings s;
  CLI::App app{"Trains a byte-level GPT on text. Start it by `mpirun -n N` to train on N ranks, or as it is to train on one."};
  app.add_option("--text", s.text, "Files, or folders (all files in them)");
  app.add_option("--model", s.model, "Size of the model")
      ->check(CLI::IsMember({"tiny", "small", "medium", "wide"}))
      ->capture_default_str();
  auto* stage = app.add_option("--stage", s.stage,
                               "0: everything on every rank; 1: optimizer state sharded; 2: and gradients; 3: and parameters")
                    ->check(CLI::IsMember({0, 1, 2, 3}))
                    ->capture_default_str();
  app.add_option("--device", s.device,
                 "cpu; cuda: a GPU for each rank, over NCCL; cuda-staged: over the CPU's memory, ranks may share a GPU")
      ->check(CLI::IsMember({"cpu", "cuda", "cuda-staged"}))
      ->capture_default_str();
  app.add_option("--dtype", s.dtype, "Type of parameters and arithmetic; 16-bit ones have float32 masters in the optimizer")
      ->check(CLI::IsMember({"float32", "bfloat16", "float16"}))
      ->capture_default_str();
  app.add_option(
         "--loss-scale", s.loss_scale,
         "torch or deepspeed: dynamic, by their rules; a number: fixed; none. Default: torch for float16, none otherwise")
      ->check(CLI::IsMember({"torch", "deepspeed", "none"}) | CLI::PositiveNumber);
  app.add_option("--optimizer", s.optimizer, "Class in torch::optim")
      ->check(CLI::IsMember({"adamw", "adam", "sgd"}))
      ->capture_default_str();
  auto* steps = app.add_option("--steps", s.steps, "Optimizer steps")->check(CLI::PositiveNumber)->capture_default_str();
  app.add_option("--seconds", s.seconds, "Train this long instead of a number of steps")
      ->check(CLI::PositiveNumber)
      ->excludes(steps);
  auto* micro_batch = app.add_option("--micro-batch", s.micro_batch, "Sequences per rank and forward")
                          ->check(CLI::PositiveNumber)
                          ->capture_default_str();
  app.add_option("--accumulate", s.accumulate, "Micro-batches per step")->check(CLI::PositiveNumber)->capture_default_str();
  app.add_option("--clip", s.clip, "Largest 2-norm of the gradient; 0: no clipping")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  app.add_option("--lr", s.lr, "Learning rate")->check(CLI::NonNegativeNumber)->capture_default_str();
  app.add_option("--seed", s.seed, "Order of the data")->capture_default_str();
  auto* bucket_bytes = app.add_option("--bucket-bytes", s.bucket_bytes, "Gradients that are reduced together")
                           ->check(CLI::PositiveNumber)
                           ->capture_default_str();
  app.add_option("--memory-budget", s.memory_budget, "Stage 3: bytes of parameters that are whole at a time; 0: four buckets")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  app.add_flag("--deferred-init", s.deferred_init,
               "Build the model in files (zero::DeferredInit): it may be larger than memory");
  app.add_flag("--explain", s.explain, "After training: what a step sends and when, in words (rank 0)");
  auto* save = app.add_option("--save", s.save,
                              "Directory for checkpoints: at the end, at SIGTERM (which ends the run after the step), and");
  app.add_option("--save-every", s.save_every, "after so many steps, in the background")
      ->check(CLI::PositiveNumber)
      ->needs(save);
  app.add_option("--keep", s.keep, "Newest checkpoints that stay; 0: all")
      ->check(CLI::NonNegativeNumber)
      ->needs(save)
      ->capture_default_str();
  app.add_option("--resume", s.resume, "Go on from the newest good checkpoint of this directory, if there is one");
  app.add_option("--export", s.export_to, "After training: write the model to this file in safetensors' format, float32");
  app.add_option("--json", s.json, "Write measurements to this file (rank 0)");
  app.add_option("--generate", s.generate, "Bytes of text to generate after training")->check(CLI::NonNegativeNumber);
  app.add_option("--prompt", s.prompt, "What generated text begins with")->capture_default_str();
  app.add_flag("--plain", s.plain, "torch::optim without zero, one process: for comparison");
  app.add_flag("--quickstart", s.quickstart, "Measure every stage, train for two minutes, show a table and generated text");
  app.add_flag("--quiet", s.quiet, "No progress");
  app.add_flag("--info", s.info, "Print the models' sizes and the sha256 of their initial weights, and end");
  app.add_option("--write-weights", s.write_weights, "Write the model's initial weights as raw float32, and end");
  try {
    app.parse(argc, argv);
    if (s.quickstart && s.plain) throw CLI::ValidationError("--plain", "can't be combined with --quickstart");
    if (s.plain && s.dtype == "float16")
      throw CLI::ValidationError("--dtype float16", "needs a loss scale, which --plain has not");
    if ((s.plain || s.quickstart) && (!s.save.empty() || !s.resume.empty() || !s.export_to.empty()))
      throw CLI::ValidationError("--save, --resume, --export", "can't be combined with --plain or --quickstart");
    if (s.plain && s.device != "cpu") throw CLI::ValidationError("--device", "can't be combined with --plain");
    if (s.text.empty() && !s.info && s.write_weights.empty()) throw CLI::RequiredError("--text");
  } catch (const CLI::CallForHelp&) {
    if (speaks) std::cout << app.help();
    return std::nullopt;
  } catch (const CLI::ParseError& e) {
    throw std::runtime_error(std::string(e.what()) + " (--help lists the options)");
  }
  if (s.loss_scale.empty()) s.loss_scale = s.dtype == "float16" ? "torch" : "none";
  if (s.quickstart) {
    if (steps->count() == 0 && s.seconds == 0) s.seconds = 120;
    if (micro_batch->count() == 0) s.micro_batch = 8;
    if (stage->count() == 0) s.stage = 3;
    if (bucket_bytes->count() == 0) s.bucket_bytes = std::int64_t{1} << 20;  // a small model in more than one bucket
    if (s.generate == 0) s.generate = 400;
  }
  return s;
}

}  // namespace gpt
