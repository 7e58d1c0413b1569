// The CUDA kernels on a GPU, bit for bit against the CPU kernels: the cases of the test on the host. Where there is no GPU the program
// says so and exits with 77, which CTest reports as skipped.
#define CATCH_CONFIG_RUNNER
#include <cuda_runtime_api.h>

#include <cstdio>
#include <cstdlib>
#include <memory>

#include "catch.h"
#include "kernels/cuda/cuda_kernels.h"
#include "support/update_cases.h"

using namespace update_cases;

namespace {

void ok(cudaError_t code) {
  if (code != cudaSuccess) throw std::runtime_error(cudaGetErrorString(code));
}

/// A copy in device memory of an array on the host, as far off the beginning of a line, between guards.
class DeviceCopy {
 public:
  DeviceCopy(void* host, std::size_t bytes) : host_(host), bytes_(bytes), shift_(reinterpret_cast<std::uintptr_t>(host) % 64) {
    if (host_ == nullptr) return;
    ok(cudaMalloc(reinterpret_cast<void**>(&memory_), size()));
    ok(cudaMemset(memory_, 0xA5, size()));
    if (bytes_ > 0) ok(cudaMemcpy(data(), host_, bytes_, cudaMemcpyHostToDevice));
  }
  DeviceCopy(const DeviceCopy&) = delete;
  DeviceCopy& operator=(const DeviceCopy&) = delete;
  ~DeviceCopy() { cudaFree(memory_); }

  template <class T = void>
  T* data() const {
    return host_ == nullptr ? nullptr : static_cast<T*>(static_cast<void*>(memory_ + kGuard + shift_));
  }
  /// Back to the host, when what is around has been looked at.
  void fetch() const {
    if (host_ == nullptr) return;
    std::vector<unsigned char> all(size());
    ok(cudaMemcpy(all.data(), memory_, size(), cudaMemcpyDeviceToHost));
    const std::size_t first = kGuard + shift_;
    for (std::size_t i = 0; i < all.size(); ++i) {
      if ((i < first || i >= first + bytes_) && all[i] != 0xA5) throw std::runtime_error("memory around an array was written");
    }
    if (bytes_ > 0) std::memcpy(host_, all.data() + first, bytes_);
  }

 private:
  static constexpr std::size_t kGuard = 256;
  std::size_t size() const { return bytes_ + 2 * kGuard + 64; }
  void* host_;
  std::size_t bytes_, shift_;
  unsigned char* memory_ = nullptr;
};

template <class T>
DeviceCopy copy_of(const T* host, std::size_t count) {
  return DeviceCopy(const_cast<T*>(host), count * sizeof(T));
}

/// Tables of a shard in device memory.
struct DeviceSegments {
  DeviceCopy segments, first;
  SegmentTable table;
  explicit DeviceSegments(const SegmentTable& host)
      : segments(copy_of(host.segments, static_cast<std::size_t>(host.count))),
        first(copy_of(host.first, static_cast<std::size_t>((host.elements + kMaxPack - 1) / kTile + 3))),
        table{segments.data<Segment>(), first.data<std::int32_t>(), host.count, host.elements} {}
};

/// Runs an update on the GPU on memory of the host.
struct OnGpu {
  int blocks;

  void adam(AdamSpans spans, const AdamTables& tables) const {
    run({&spans.param, &spans.grad, &spans.exp_avg, &spans.exp_avg_sq, &spans.max_exp_avg_sq, &spans.master}, tables,
        [&](const AdamTables& device) { zero::kernels::cuda::adam(spans, device, nullptr, blocks); });
  }
  void sgd(SgdSpans spans, const SgdTables& tables) const {
    run({&spans.param, &spans.grad, &spans.momentum_buffer, &spans.master}, tables,
        [&](const SgdTables& device) { zero::kernels::cuda::sgd(spans, device, nullptr, blocks); });
  }

 private:
  template <template <class> class Plan, class Update>
  static void run(const std::vector<Span*>& spans, const UpdateTables<Plan>& tables, const Update& update) {
    const auto count = static_cast<std::size_t>(tables.segments.count);
    const DeviceSegments segments(tables.segments);
    const DeviceCopy plans = copy_of(tables.plans, count), wide = copy_of(tables.plans_double, count),
                     skip = copy_of(tables.skip, 1);
    std::vector<std::unique_ptr<DeviceCopy>> copies;
    for (Span* span : spans) {
      copies.push_back(std::make_unique<DeviceCopy>(
          span->data, static_cast<std::size_t>(tables.segments.elements) * static_cast<std::size_t>(size_of(span->dtype))));
      span->data = copies.back()->data();
    }
    update({segments.table, plans.data<const Plan<float>>(), wide.data<const Plan<double>>(), skip.data<const std::int32_t>()});
    ok(cudaDeviceSynchronize());
    for (const auto& copy : copies) copy->fetch();
  }
};

}  // namespace

TEMPLATE_TEST_CASE_SIG("GPU: updates have the CPU's bits in every type, cut, place and launch", "[gpu]", ((bool kAdam), kAdam),
                       true, false) {
  int number = 0;
  for_each_mix<kAdam>([&](const Mix& mix) {
    for (const std::int64_t n : {std::int64_t{9}, kTile - 1, 4 * kTile + 3, 100 * kTile + 5}) {
      const auto all = cuts(n);
      const Cut& cut = all[static_cast<std::size_t>(++number) % all.size()];
      const Places places = kPlaces[static_cast<std::size_t>(number / 2) % kPlaces.size()];
      const int blocks = std::array<int, 3>{0, 2, 64}[static_cast<std::size_t>(number / 3) % 3];
      INFO(mix.name() << ", " << n << " elements, cut " << cut.name << ", places " << places[0] << places[1] << places[2]
                      << ", " << blocks << " blocks");
      Problem<kAdam> ours(mix, cut, n, places), theirs(mix, cut, n, places);
      for (int step = 0; step < 2; ++step) {
        ours.new_gradients(step);
        theirs.new_gradients(step);
        ours.update(OnGpu{blocks});
        theirs.update_on_cpu();
      }
      REQUIRE(ours.differences(theirs) == "");
    }
  });
}

TEST_CASE("GPU: a skipped step writes nothing", "[gpu]") {
  const std::int64_t n = kTile + 5;
  const Mix mix{DType::bf16, DType::bf16, DType::f32, true, true};
  Problem<true> ours(mix, cuts(n)[1], n, kPlaces[0]), before(mix, cuts(n)[1], n, kPlaces[0]);
  ours.new_gradients(1);
  before.new_gradients(1);
  ours.skip = 1;
  ours.update(OnGpu{0});
  CHECK(ours.differences(before) == "");
}

TEST_CASE("GPU: statistics and decision are the CPU's, in a CUDA graph as well", "[gpu]") {
  const std::int64_t n = 300 * kTile + 77;
  for (const DType type : kTypes) {
    for (const bool overflow : {false, true}) {
      INFO("type " << name_of(type) << (overflow ? ", overflow" : ""));
      const Cut cut = cuts(n)[1];
      const auto map = make_tile_map(cut.segments, n);
      Buffer grad(type, random_values(static_cast<std::size_t>(n), 5));
      if (overflow) grad.set(static_cast<std::size_t>(cut.segments[4].begin), kNan);
      std::vector<ParameterStep> parameters(cut.segments.size(), ParameterStep{3, 0, 0, 0});
      Real sum = 0;
      for (const Segment& s : cut.segments) {
        for (std::int64_t i = s.begin; i < s.end; ++i) {
          const Real x = grad.get(static_cast<std::size_t>(i));
          sum += x * x;
        }
      }
      StepRecord record{};
      StepSettings settings{};
      settings.clip_factor = 1;
      settings.max_norm = 1;
      settings.skip_nonfinite = 1;
      const AdamGroup group{1e-3, 0.9, 0.999, 1e-8, 0.1, 1, 0};
      LossScaleRule rule;
      LossScaleState scale{1024, 0, 1, 0};
      std::vector<AdamPlan<float>> plans(parameters.size());

      const DeviceSegments segments({cut.segments.data(), map.data(), static_cast<std::int32_t>(cut.segments.size()), n});
      const DeviceCopy device_grad(grad.data(), static_cast<std::size_t>(n) * static_cast<std::size_t>(size_of(type)));
      const DeviceCopy device_parameters = copy_of(parameters.data(), parameters.size()), device_record = copy_of(&record, 1),
                       device_settings = copy_of(&settings, 1), device_group = copy_of(&group, 1),
                       device_rule = copy_of(&rule, 1), device_scale = copy_of(&scale, 1),
                       device_plans = copy_of(plans.data(), plans.size());
      StatisticsWorkspace* workspace = nullptr;
      ok(cudaMalloc(reinterpret_cast<void**>(&workspace), sizeof *workspace));

      cudaStream_t stream = nullptr;
      cudaGraph_t graph = nullptr;
      cudaGraphExec_t executable = nullptr;
      ok(cudaStreamCreate(&stream));
      ok(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
      begin_step(device_record.data<StepRecord>(), stream);
      add_statistics({device_grad.data(), type}, segments.table, device_parameters.data<ParameterStep>(), workspace,
                     device_record.data<StepRecord>(), stream);
      decide_adam({device_record.data<StepRecord>(), device_settings.data<StepSettings>(), device_rule.data<LossScaleRule>(),
                   device_scale.data<LossScaleState>(), device_group.data<AdamGroup>(), device_parameters.data<ParameterStep>(),
                   static_cast<std::int32_t>(parameters.size())},
                  device_plans.data<AdamPlan<float>>(), nullptr, stream);
      ok(cudaStreamEndCapture(stream, &graph));
      ok(cudaGraphInstantiate(&executable, graph, 0));
      double sums[2];
      for (double& each : sums) {  // the same bits each time; steps and the scale go on
        ok(cudaGraphLaunch(executable, stream));
        ok(cudaStreamSynchronize(stream));
        device_record.fetch();
        each = record.sum_of_squares;
      }
      for (const DeviceCopy* copy : {&device_parameters, &device_scale, &device_plans}) copy->fetch();
      ok(cudaGraphExecDestroy(executable));
      ok(cudaGraphDestroy(graph));
      ok(cudaStreamDestroy(stream));
      ok(cudaFree(workspace));

      if (overflow) {
        CHECK(record.first_nonfinite == cut.segments[4].parameter);
        CHECK(record.skip == 1);
        CHECK(scale.scale == 256);
        CHECK(parameters[0].steps == 3);
        continue;
      }
      CHECK(sums[0] == sums[1]);
      CHECK(std::fabs(Real(record.sum_of_squares) - sum) <= 1e-13L * sum);
      CHECK(record.first_nonfinite == kAllFinite);
      CHECK(record.grad_norm == std::sqrt(record.sum_of_squares) / 1024);
      CHECK(scale.clean == 2);
      CHECK(parameters[0].steps == 5);
      AdamArgs args;
      args.lr = group.lr, args.beta1 = group.beta1, args.beta2 = group.beta2, args.eps = group.eps;
      args.weight_decay = group.weight_decay, args.decoupled = true, args.step = 5, args.grad_scale = record.grad_factor;
      const auto expected = make_adam_scalars<float>(args);
      // CUDA's pow is within two units of the last place of a double: in float that is the same number, but for a tie now and then.
      const auto& found = plans[0].scalars;
      CHECK(std::fabs(found.minus_step_size - expected.minus_step_size) <= 1.2e-7f * std::fabs(expected.minus_step_size));
      CHECK(std::fabs(found.sqrt_bias_correction2 - expected.sqrt_bias_correction2) <=
            1.2e-7f * expected.sqrt_bias_correction2);
      CHECK(found.grad_scale == expected.grad_scale);
      CHECK(found.decay == expected.decay);
    }
  }
}

TEST_CASE("GPU: conversion and accumulation have the bits of the same loops on the host", "[gpu]") {
  for (const DType to : kTypes) {
    for (const DType from : kTypes) {
      for (const std::size_t n : {1, 7, 9001}) {
        for (const bool add : {false, true}) {
          const std::size_t shift = n % 5;
          Buffer out(to, random_values(n, 1), shift), in(from, random_values(n, 2), n % 3);
          Buffer expected(to, out.values(), shift);
          ConvertArgs args;
          args.factor = 0.3;
          args.add = add;
          bind_convert(expected.span(), in.span(), static_cast<std::int64_t>(n), args,
                       [](const auto& body) { run_on_host(body, 1); });
          const DeviceCopy device_out(out.data(), n * static_cast<std::size_t>(size_of(to)));
          const DeviceCopy device_in(in.data(), n * static_cast<std::size_t>(size_of(from)));
          convert({device_out.data(), to}, {device_in.data(), from}, static_cast<std::int64_t>(n), args, nullptr);
          ok(cudaDeviceSynchronize());
          device_out.fetch();
          INFO(name_of(to) << " from " << name_of(from) << ", " << n << " elements" << (add ? ", added" : ""));
          CHECK(out.bits() == expected.bits());
        }
      }
    }
  }
}

int main(int argc, char** argv) {
  int devices = 0;
  const cudaError_t code = cudaGetDeviceCount(&devices);
  if (code != cudaSuccess || devices == 0) {
    std::printf("skipped: no CUDA device (%s)\n", code == cudaSuccess ? "none found" : cudaGetErrorString(code));
    return 77;
  }
  return Catch::Session().run(argc, argv);
}
