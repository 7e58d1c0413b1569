// What the model reads: the bytes of files and folders, and which of them each rank sees in each step.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace gpt {

/// The bytes of all `paths`, one after the other: a file's as they are, a folder's regular files recursively, in the order of
/// their path's bytes, without links to files of the same folder. @throws c10::Error when a path is missing or unreadable, or when all of them together are empty
std::string read_text(const std::vector<std::string>& paths);

/// Made-up words of a small vocabulary: a text that needs no file and is the same everywhere, for tests and benchmarks.
std::string pseudo_text(std::size_t bytes);

/// Where a micro-batch is in a run. Sequence numbers ascend over steps, micro-steps, ranks and rows, so that one process with
/// micro-batch W·B sees what W ranks with micro-batch B see side by side.
struct Position {
  std::int64_t step = 0, micro = 0, micros = 1, rank = 0, ranks = 1;
};

class Batches {
 public:
  /// Sequences of context + 1 bytes from `text`, which must outlive this object. `seed` chooses another order.
  /// @throws c10::Error when the text is shorter than one such window
  Batches(const std::string& text, std::int64_t context, std::uint64_t seed = 0);

  /// Inputs and targets (the inputs one byte on), each (rows, context) int64.
  std::pair<at::Tensor, at::Tensor> get(const Position& position, std::int64_t rows) const;

 private:
  const std::string& text_;
  std::int64_t context_;
  std::uint64_t key_;
};

}  // namespace gpt
