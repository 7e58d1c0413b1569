// Checkpoints: every rank writes its shards, in parallel, and any number of ranks at any stage loads them.
//
//   zero::save("runs/a", *model, opt, {{"epoch", epoch}}, zero::SaveOptions().keep(3));
//   if (const auto newest = zero::latest("runs/a")) {
//     const auto loaded = zero::load(*newest, *model, opt);
//     epoch = loaded.number("epoch");
//   }
//
// A checkpoint is a folder DIR/step-00000012 of safetensors files and a manifest. It comes into being as a whole: whatever kills a save,
// the folder isn't there, and older ones are untouched. docs/checkpoints.md has the format.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "zero/export.h"
#include "zero/optimizer.h"

namespace zero {

/// What the optimizer doesn't know: names of its parameters, parameters that it doesn't train, buffers. An nn::Module says all that.
/// For tensors without a module: pairs of a name and a parameter (the optimizer's or not). Nothing: the optimizer's parameters,
/// named as Options::module or Options::names did, or by group and number ("parameter #2 of group 0").
class ZERO_API ModelTensors {
 public:
  struct Entry {
    std::string name;
    at::Tensor tensor;
    bool buffer = false;
  };
  ModelTensors() = default;
  ModelTensors(const torch::nn::Module& module);                                    // NOLINT(google-explicit-constructor)
  ModelTensors(const std::vector<std::pair<std::string, at::Tensor>>& parameters);  // NOLINT(google-explicit-constructor)

  /// A tensor that stands there twice (tied weights) goes by its first name.
  const std::vector<Entry>& entries() const { return entries_; }

 private:
  std::vector<Entry> entries_;
};

/// A value of the user's own: a number, a text, or a tensor of any strided type.
class ZERO_API ExtraValue {
 public:
  using Variant = std::variant<bool, std::int64_t, double, std::string, at::Tensor>;
  template <typename T, typename = std::enable_if_t<std::is_arithmetic_v<T>>>
  ExtraValue(T x) : value_(widened(x)) {}                // NOLINT(google-explicit-constructor)
  ExtraValue(const char* x) : value_(std::string(x)) {}  // NOLINT(google-explicit-constructor)
  ExtraValue(std::string x) : value_(std::move(x)) {}    // NOLINT(google-explicit-constructor)
  ExtraValue(const at::Tensor& x) : value_(x) {}         // NOLINT(google-explicit-constructor)
  const Variant& value() const { return value_; }

 private:
  template <typename T>
  static Variant widened(T x) {
    if constexpr (std::is_same_v<T, bool>)
      return x;
    else if constexpr (std::is_integral_v<T>)
      return static_cast<std::int64_t>(x);
    else
      return static_cast<double>(x);
  }
  Variant value_;
};
/// Data position, schedules, anything. Rank 0's are saved, and everybody gets them.
using Extra = std::map<std::string, ExtraValue>;

class ZERO_API SaveOptions {
 public:
  /// After a save the newest `n` checkpoints of the directory stay; older ones are removed once the new one is on the disk. Default 0:
  /// all stay.
  SaveOptions& keep(int n) { return keep_ = n, *this; }
  /// save() copies what this rank writes (its shard, in host memory) and returns; a thread writes it. The checkpoint is there when
  /// wait_for_save() returns, or some time before. What fails is an error of the next step(), save() or wait_for_save().
  /// Default false.
  SaveOptions& async(bool on = true) { return async_ = on, *this; }

  int keep() const { return keep_; }
  bool async() const { return async_; }

 private:
  int keep_ = 0;
  bool async_ = false;
};

class ZERO_API LoadOptions {
 public:
  /// true (default): whatever doesn't fit is an error, and nothing is loaded. false: what fits is loaded, the rest is in
  /// Loaded::skipped.
  LoadOptions& strict(bool on) { return strict_ = on, *this; }
  bool strict() const { return strict_; }

 private:
  bool strict_ = true;
};

/// What load() found.
struct ZERO_API Loaded {
  std::string path;                  ///< the checkpoint's folder
  std::int64_t step = 0;             ///< steps that had been made; the next one's last_step().number is one more
  Extra extra;                       ///< tensors on the CPU
  bool random = false;               ///< random generators continue as they were: only with as many ranks as had saved
  std::vector<std::string> skipped;  ///< what didn't fit (strict(false)), in words

  /// A value of `extra`. @throws c10::Error if there is none of this name and kind
  std::int64_t integer(const std::string& name) const;
  double number(const std::string& name) const;  ///< also of an integer
  const std::string& text(const std::string& name) const;
  const at::Tensor& tensor(const std::string& name) const;
  bool has(const std::string& name) const { return extra.count(name) != 0; }
};

/// Collective, between steps (gradients aren't saved). Writes a checkpoint of parameters, float32 masters, optimizer state and options,
/// loss scale, random generators, buffers and `extra` to directory/step-N, N steps having been made. Each rank writes its shards (at
/// stage 0 its share of what all have) to a file of its own; all see one file system. Buffers that differ between ranks are saved of
/// each.
/// Memory: no copies on the CPU, one tensor's shard at a time on a GPU; with async() a copy of the shard. Sends the manifest's entries
/// only (about 200 bytes per tensor and rank).
/// @returns the checkpoint's folder
/// @throws c10::Error, the same on every rank: a full disk, a folder that can't be written, a class without serialisation of its
/// own. Then there is no such checkpoint, and older ones are as they were.
ZERO_API std::string save(const std::string& directory, const ModelTensors& model, ZeroOptimizer& optimizer,
                          const Extra& extra = {}, const SaveOptions& options = {});

/// Collective. Waits for a save with async(), if there is one. @throws c10::Error, the same on every rank, if it failed
ZERO_API void wait_for_save(ZeroOptimizer& optimizer);

/// Collective. Loads a checkpoint, at whatever stage, world size, bucket size and types of masters and state it was saved; the same world
/// size continues bit for bit. First everything is checked on all ranks, including the checksum of every byte (each rank reads its
/// part of them); only then is anything written.
/// Memory: each rank reads straight into its shard; tensors whose type or order of dimensions changes go through memory of one tensor.
/// @param path a checkpoint's folder, or a directory of checkpoints (its latest())
/// @throws c10::Error, the same on every rank, naming the first thing that doesn't fit or is damaged; then model and optimizer are as
/// they were
ZERO_API Loaded load(const std::string& path, const ModelTensors& model, ZeroOptimizer& optimizer,
                     const LoadOptions& options = {});

/// The newest checkpoint in a directory: of the highest step that has a good manifest and files of the right sizes. None, also if
/// there is no such directory. Doesn't communicate: let one rank ask, or all while nobody saves.
ZERO_API std::optional<std::string> latest(const std::string& directory);

/// Collective. Writes the whole model (parameters by name, and buffers) to one file in safetensors' format, which Python's safetensors
/// reads, for PyTorch's load_state_dict. All ranks write their parts to it; it is there when everything is.
/// @param dtype of floating point parameters: at::kFloat (default; from the masters where there are some), at::kHalf or at::kBFloat16.
/// Others (complex ones, buffers) keep their type. Tied weights are there once; the header's metadata name the others.
/// Memory: one tensor's shard at a time, in that type; tensors that aren't row-major are gathered one by one.
/// @throws c10::Error, the same on every rank; a file that was there before then stays
ZERO_API void export_model(const std::string& path, const ModelTensors& model, ZeroOptimizer& optimizer,
                           at::ScalarType dtype = at::kFloat);

}  // namespace zero
