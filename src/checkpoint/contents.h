// What a checkpoint of an optimizer and its model consists of, as this rank has it.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <map>
#include <string>
#include <vector>

#include "checkpoint/manifest.h"
#include "checkpoint/shard_file.h"
#include "optimizer/impl.h"
#include "zero/checkpoint.h"

namespace zero::checkpoint {

/// A tensor that every rank has as a whole: a parameter that isn't trained, a buffer.
struct Loose {
  std::string kind, name;
  at::Tensor tensor;
};

struct Contents {
  std::vector<std::string> names;  ///< of the optimizer's parameters; empty: not active
  std::vector<Loose> loose;
  std::map<std::string, std::string> also_called;  ///< another name of a tied tensor → its first

  bool placed(const ZeroOptimizer::Impl& impl, std::size_t parameter) const {
    return !names[parameter].empty() && impl.layout->slot(static_cast<int>(parameter)).space >= 0;
  }
};

/// @throws c10::Error if two tensors have one name
Contents list_contents(const ZeroOptimizer::Impl& impl, const ModelTensors& model);

/// The run of a tensor's elements that this rank has; the values are asked for when they are needed.
struct Piece {
  TensorEntry tensor;
  std::int64_t begin = 0, count = 0;
  std::function<at::Tensor()> values;  ///< 1-D, on any device
};

/// Parameters, masters and states that this rank updates, and by parameter what is there once. To be called while the parameters' memory
/// is looked at (see Quiet). Where every rank has everything (stage 0) each piece is a whole tensor.
struct Held {
  std::vector<Piece> pieces;
  std::map<std::string, Scalars> states;
};
Held held_pieces(ZeroOptimizer::Impl& impl, const Contents& contents);

/// A loose tensor's elements; a parameter that another optimizer has sharded is gathered.
at::Tensor loose_values(const Loose& loose);

/// Between steps, and nobody else reads or writes parameters: what residents->memory() says is all there is. Collective at both ends.
class Quiet {
 public:
  Quiet(ZeroOptimizer::Impl& impl, const std::string& label);
  /// The end after reading. Every rank has to come here, whatever has gone wrong.
  void end_reading();
  /// The end after writing: others get what this rank has written. `written` as for end_reading().
  void end_writing();

 private:
  ZeroOptimizer::Impl& impl_;
  std::string label_;
  std::unique_lock<std::shared_timed_mutex> lock_;
};

}  // namespace zero::checkpoint
