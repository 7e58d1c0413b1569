// What a fused pass hands to a GPU, checked with a launcher that runs the kernels' bodies on the host: the bits of the CPU's pass.
#include "kernels/table.h"
#include "support/catch.h"
#include "support/kernel_numbers.h"
#include "update/device_tables.h"

using namespace kernel_numbers;

namespace {

namespace cuda = zero::kernels::cuda;

template <typename F>
void with_parameter(DType type, F&& f) {
  if (type == DType::f64) return f(double{});
  cuda::with_float_type(type, f);
}

class HostLauncher final : public zero::DeviceLauncher {
 public:
  void adam(const AdamSpans& spans, const Adam& tables) override {
    with_parameter(spans.param.dtype, [&](auto p) {
      cuda::bind_adam<decltype(p)>(spans, tables, [](const auto& body) { cuda::run_on_host(body, 3); });
    });
  }
  void sgd(const SgdSpans& spans, const Sgd& tables) override {
    with_parameter(spans.param.dtype, [&](auto p) {
      cuda::bind_sgd<decltype(p)>(spans, tables, [](const auto& body) { cuda::run_on_host(body, 3); });
    });
  }
};

struct State {
  Buffer p, g, m, v, w, master;
  State(DType type, std::size_t n)
      : p(type, random_values(n, 1), 3),
        g(type, random_values(n, 2), 1),
        m(type == DType::f64 ? type : DType::f32, random_values(n, 3), 2),
        v(type == DType::f64 ? type : DType::f32, random_values(n, 4, 0.1, 2)),
        w(type == DType::f64 ? type : DType::f32, random_values(n, 5, 0.1, 2)),
        master(DType::f32, random_values(n, 6)) {}
  Span master_span() { return size_of(p.type) == 2 ? master.span() : Span{}; }
  std::string bits() { return p.bits() + m.bits() + v.bits() + w.bits() + master.bits(); }
};

}  // namespace

TEST_CASE("a device's pass has the bits of the CPU's, whatever the length, type and options") {
  zero::DevicePass pass(c10::Device(c10::kCPU), std::make_unique<HostLauncher>());
  for (const DType type : kTypes) {
    for (const std::size_t n : {std::size_t{1}, std::size_t{7}, std::size_t{2048}, std::size_t{2049}, std::size_t{9001}}) {
      for (int variant = 0; variant < 6; ++variant) {
        INFO("type " << int(type) << ", " << n << " elements, variant " << variant);
        const auto count = static_cast<std::int64_t>(n);
        State a(type, n), b(type, n);
        AdamArgs adam_args;
        adam_args.step = 1 + variant, adam_args.weight_decay = variant % 3 == 0 ? 0 : 0.1,
        adam_args.decoupled = variant % 3 == 1;
        adam_args.grad_scale = 0.25;
        const bool amsgrad = variant >= 3;
        const auto adam_spans = [&](State& s) {
          return AdamSpans{s.p.span(), s.g.span(), s.m.span(), s.v.span(), amsgrad ? s.w.span() : Span{}, s.master_span()};
        };
        adam(adam_spans(a), count, adam_args, 1);
        pass.adam(adam_spans(b), count, adam_args);
        REQUIRE(a.bits() == b.bits());
        SgdArgs sgd_args;
        sgd_args.lr = 0.1, sgd_args.momentum = variant % 2 == 0 ? 0.9 : 0, sgd_args.nesterov = variant == 2;
        sgd_args.first = variant == 4, sgd_args.weight_decay = variant >= 3 ? 0.01 : 0;
        const auto sgd_spans = [&](State& s) {
          return SgdSpans{s.p.span(), s.g.span(), sgd_args.momentum != 0 ? s.m.span() : Span{}, s.master_span()};
        };
        sgd(sgd_spans(a), count, sgd_args, 1);
        pass.sgd(sgd_spans(b), count, sgd_args);
        REQUIRE(a.bits() == b.bits());
        REQUIRE((b.p.surroundings_untouched() && b.m.surroundings_untouched() && b.master.surroundings_untouched()));
      }
    }
  }
}
