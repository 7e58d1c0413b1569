// The fused pass by a device's kernels: one launch per stretch in which all that belongs to an element lies equally far from the
// stretch's beginning, whatever the parameters and their step counts. Sharded, that is one launch per bucket.
#include "update/device_step.h"
#include "update/fused_state.h"

namespace zero {

namespace cuda = kernels::cuda;

namespace {

using kernels::Span;

class DeviceUpdater final : public Updater {
 public:
  explicit DeviceUpdater(const UpdateContext& context) : context_(context), state_(context), step_(*context.device_step) {}
  bool wants_everything() const override { return false; }

  void update(const std::vector<Piece>& pieces, const Groups& groups, StateMap& states, double /*factor*/,
              int /*threads*/) override {
    Stretch stretch;
    for (const auto& piece : pieces) {
      const auto found = state_.of(piece, groups[context_.parameters[piece.parameter].group].options(), states);
      if (found.is_new) step_.made_state(piece.parameter, *found.state);
      if (found.new_master) step_.made_master(piece.parameter);
      if (stretch.segments.empty() || !stretch.takes(piece, found)) {
        launch(stretch);
        stretch.begin(piece, found);
      }
      const auto at = piece.in_held - stretch.begins;
      stretch.segments.push_back({at, at + piece.numel, piece.parameter, piece.parameter});
    }
    launch(stretch);
  }

 private:
  struct Stretch {
    FusedPiece memory;  // where it begins
    std::int64_t begins = 0;
    SegmentTables::Key key{-1, -1, 0};
    std::vector<cuda::Segment> segments;

    void begin(const Piece& piece, const FusedPiece& found) {
      key = {piece.space, piece.bucket, in_bucket(piece) ? key[2] + 1 : 0};
      memory = found;
      begins = piece.in_held;
      segments.clear();
    }
    bool in_bucket(const Piece& piece) const { return key[0] == piece.space && key[1] == piece.bucket; }
    bool takes(const Piece& piece, const FusedPiece& found) const {
      const auto far = piece.in_held - begins;
      const auto fits = [far](Span mine, Span next) {
        if (mine.data == nullptr || mine.dtype != next.dtype) return mine.data == next.data;
        return static_cast<const char*>(mine.data) + far * kernels::size_of(mine.dtype) == next.data;
      };
      return in_bucket(piece) && far > 0 && fits(memory.param, found.param) && fits(memory.grad, found.grad) &&
             fits(memory.first, found.first) && fits(memory.second, found.second) && fits(memory.third, found.third) &&
             fits(memory.master, found.master);
    }
  };

  void launch(const Stretch& s) {
    if (s.segments.empty()) return;
    const auto elements = s.segments.back().end;
    const auto& m = s.memory;
    if (is_adam(context_.kind))
      step_.launcher().update(kernels::AdamSpans{m.param, m.grad, m.first, m.second, m.third, m.master},
                              step_.adam_tables(s.key, s.segments, elements));
    else
      step_.launcher().update(kernels::SgdSpans{m.param, m.grad, m.first, m.master},
                              step_.sgd_tables(s.key, s.segments, elements));
  }

  UpdateContext context_;
  FusedState state_;
  DeviceStep& step_;
};

}  // namespace

std::unique_ptr<Updater> make_device_updater(const UpdateContext& context) { return std::make_unique<DeviceUpdater>(context); }

}  // namespace zero
