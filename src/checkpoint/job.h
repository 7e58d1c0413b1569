// What one rank writes into a checkpoint.
#pragma once

#include <string>
#include <vector>

#include "checkpoint/contents.h"
#include "checkpoint/manifest.h"
#include "checkpoint/shard_file.h"
#include "zero/checkpoint.h"

namespace zero::checkpoint {

struct Job {
  Manifest head;          ///< without files and tensors
  std::vector<Run> runs;  ///< together with the other ranks': every element once
};

/// Which buffers of this rank are other than rank 0's, by their number in `contents.loose`. Collective.
std::vector<char> buffers_that_differ(const ZeroOptimizer::Impl& impl, const Contents& contents);

/// @param differs see buffers_that_differ
Job make_job(ZeroOptimizer::Impl& impl, const Contents& contents, const std::vector<char>& differs, const Extra& extra);

/// Copies what the runs refer to into host memory, so that they can be written while training goes on.
void copy_to_host(std::vector<Run>& runs);

/// The name of a rank's file.
std::string shard_name(int rank, int ranks);

/// A run over a tensor that is asked for when it is written.
Run run_of(TensorEntry entry, std::int64_t begin, std::int64_t count, std::function<at::Tensor()> values);

}  // namespace zero::checkpoint
