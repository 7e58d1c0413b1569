// What can be said on the command line.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace gpt {

struct Settings {
  std::vector<std::string> text;
  std::string model = "small";
  int stage = 1;
  std::string device = "cpu";  ///< cpu, cuda (NCCL) or cuda-staged
  std::string dtype = "float32";
  std::string loss_scale;  ///< torch, deepspeed, none or a number
  std::string optimizer = "adamw";
  std::int64_t steps = 20;
  double seconds = 0;  ///< stop after this long instead of after `steps`; 0: no
  std::int64_t micro_batch = 4;
  std::int64_t accumulate = 1;
  double clip = 0;  ///< 0: no clipping
  double lr = 1e-3;
  std::uint64_t seed = 0;
  std::int64_t bucket_bytes = std::int64_t{25} << 20;
  std::int64_t memory_budget = 0;  ///< 0: the library's default
  bool deferred_init = false;
  bool explain = false;
  std::string save;  ///< directory of checkpoints; empty: none are made
  std::int64_t save_every = 0, keep = 3;
  std::string resume;
  std::string export_to;
  std::string json;
  std::int64_t generate = 0;
  std::string prompt = "#include <";
  bool plain = false;
  bool quickstart = false;
  bool quiet = false;
  bool info = false;
  std::string write_weights;
};

/// Nothing: help was asked for and has been printed (if `speaks`).
/// @throws std::runtime_error with one line about the first argument that is wrong
std::optional<Settings> parse(int argc, char** argv, bool speaks);

}  // namespace gpt
