// What the ranks tell each other at the start of every collective call: which call it is, what each knows about gradients, and
// whether something is wrong. One small exchange; nothing has been written before it, and after it all ranks go on or all throw.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "reduce/gradient_store.h"
#include "zero/communicator.h"
#include "zero/report.h"

namespace zero {

enum class Call : std::int32_t {
  kStep,
  kNorm,
  kClip,
  kBackward,
  kRead,
  kReduce,
  kWriteBack,
  kGather,
  kUnshard,
  kEdit,
  kSave,
  kLoad,
  kExport,
  kConsolidate,
  kJoined
};

struct Header {
  Call call = Call::kStep;
  std::int32_t unit = -1;      ///< kRead: which bucket is wanted
  std::int64_t step = 0;       ///< steps made
  std::int32_t backwards = 0;  ///< since
  std::uint8_t needs_set_up = 0, moved = 0, unchanged = 0;
  std::uint8_t scaled = 0;    ///< a loss was multiplied by the loss scale since the last step
  std::uint8_t unscaled = 0;  ///< and gradients were divided by it
  std::uint64_t options_hash = 0;
  std::uint64_t which = 0;  ///< kGather: hash of the parameters' numbers
  std::uint64_t parameters = 0;
  std::uint64_t edited = 0;    ///< Gradients::edited()
  std::int64_t under_way = 0;  ///< see GradientAgreement
  std::int64_t order = 0;      ///< length of rank 0's
  double weight = 0;
  double value = 0;  ///< kClip: max_norm
};

struct Message {
  Header header;
  std::vector<std::uint8_t> flags;  ///< per parameter, see GradientFlags
  std::vector<std::int32_t> order;
  std::string problem;

  std::string pack() const;
  static Message unpack(const std::string& packed);
};

/// Adds the bytes that a scope sends to a report: the communicator may have other users between our calls. Scopes may be nested.
class Counted {
 public:
  Counted(const Communicator& comm, StepReport& report);
  ~Counted();
  Counted(const Counted&) = delete;
  Counted& operator=(const Counted&) = delete;

 private:
  const Communicator& comm_;
  StepReport& report_;
  Traffic start_;
  std::int64_t data_before_, control_before_;
};

}  // namespace zero
