#include "support/step_on_host.h"

#include <cstdlib>

#include "kernels/cuda/bind.h"
#include "kernels/cuda/decide_body.h"

namespace step_on_host {
namespace {

using namespace zero::kernels;
using namespace zero::kernels::cuda;

constexpr int kBlocks = 3;

class HostLauncher final : public zero::DeviceLauncher {
 public:
  void begin_step(StepRecord* record) override { begin(*record); }

  void add_statistics(Span grad, const SegmentTable& segments, const ParameterStep* parameters, StatisticsWorkspace* workspace,
                      StepRecord* record) override {
    const int blocks = statistics_blocks(segments.elements);
    bind_statistics(grad, segments, parameters, [&](const auto& body) {
      for (int block = 0; block < blocks; ++block) {
        Statistics sum;
        for (int thread = 0; thread < kThreads; ++thread) sum = both(sum, body(Place{block, blocks, thread}));
        workspace->partial[block] = sum;
      }
    });
    Statistics all;
    for (int block = 0; block < blocks; ++block) all = both(all, workspace->partial[block]);
    add(all, *record);
  }

  void combine(const Statistics* of_ranks, int ranks, StepRecord* record) override { cuda::combine(of_ranks, ranks, *record); }

  void decide(const AdamDecision& tables, AdamPlan<float>* plans, AdamPlan<double>* plans_double) override {
    decide_with(DecideBody<AdamPlan, AdamGroup>{tables, plans, plans_double});
  }
  void decide(const SgdDecision& tables, SgdPlan<float>* plans, SgdPlan<double>* plans_double) override {
    decide_with(DecideBody<SgdPlan, SgdGroup>{tables, plans, plans_double});
  }

  void update(const AdamSpans& spans, const AdamTables& tables) override {
    with_any_type(spans.param.dtype,
                  [&](auto p) { bind_adam<decltype(p)>(spans, tables, [](const auto& body) { run_on_host(body, kBlocks); }); });
  }
  void update(const SgdSpans& spans, const SgdTables& tables) override {
    with_any_type(spans.param.dtype,
                  [&](auto p) { bind_sgd<decltype(p)>(spans, tables, [](const auto& body) { run_on_host(body, kBlocks); }); });
  }

 private:
  template <class Body>
  static void decide_with(const Body& body) {
    StepRecord record{};
    for (int thread = 0; thread < kThreads; ++thread) record = body(Place{0, 1, thread});
    body.finish(record);
  }
};

// Whole test programs, by the environment.
const bool from_environment = [] {
  if (std::getenv("ZERO_TEST_DEVICE_STEP") != nullptr) zero::launcher_for_cpu_tensors() = make_launcher;
  return true;
}();

}  // namespace

std::unique_ptr<zero::DeviceLauncher> make_launcher() { return std::make_unique<HostLauncher>(); }

}  // namespace step_on_host
