// What of a checkpoint goes where: the comparison of a manifest with an optimizer and its model.
#pragma once

#include <string>
#include <vector>

#include "checkpoint/contents.h"
#include "checkpoint/manifest.h"

namespace zero::checkpoint {

/// What fits. Pointers into the manifest and the contents.
struct Match {
  std::vector<const TensorEntry*> parameters;  ///< by number in the optimizer; null: isn't loaded
  std::vector<const TensorEntry*> loose;       ///< by number in Contents::loose
  bool optimizer = true;                       ///< states, masters, options, loss scale
  std::vector<std::string> differences;        ///< in words, the first first
};

Match match(const Manifest& manifest, const ZeroOptimizer::Impl& impl, const Contents& contents);

}  // namespace zero::checkpoint
