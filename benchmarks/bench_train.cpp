// Training the GPT of examples/gpt at each stage, and in one process without zero on the same global batch.
//
//   mpirun -n 2 --bind-to none build/benchmarks/bench_train --model small --micro-batch 8 --rounds 9 --steps 3 --json FILE
//
// All contestants live in this program and take turns in every round, in an order that rotates, so that a machine whose speed
// drifts treats them alike. `plain` runs on rank 0 alone, with as many threads as there are ranks, while the others wait
// asleep: what the same cores do without communication. Figures are medians over rounds of a turn's median step, of the
// slowest rank; [least .. most] is the spread over rounds. Ratios are of the same round.
#include <ATen/Parallel.h>
#include <sched.h>
#include <torch/optim/adamw.h>
#include <zero/zero.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "model.h"
#include "ranks.h"
#include "text.h"

namespace {

using Json = nlohmann::ordered_json;

struct Settings {
  std::string model = "small", json;
  std::vector<std::string> text;
  std::int64_t micro_batch = 8;
  int rounds = 9, steps = 3;
  std::int64_t bucket_bytes = std::int64_t{25} << 20;
};

/// Medians over the steps of one turn, of the slowest rank.
struct Turn {
  double step = 0, forward_backward = 0, reduce = 0, update = 0, gather = 0;
};

double median(std::vector<double> values) {
  if (values.empty()) return 0;
  std::sort(values.begin(), values.end());
  const std::size_t n = values.size();
  return n % 2 == 1 ? values[n / 2] : (values[n / 2 - 1] + values[n / 2]) / 2;
}

class Contestant {
 public:
  /// @param stage < 0: plain torch::optim on rank 0
  /// @param budget stage 3: bytes of whole parameters at a time; 0: only what operators use at the moment
  Contestant(const char* called, int stage, std::int64_t budget, const Settings& settings, const gpt::Batches& batches,
             const zero::Communicator& comm)
      : name(called), stage_(stage), settings_(settings), batches_(batches), comm_(comm) {
    if (!takes_part()) return;
    model_ = std::make_unique<gpt::Model>(gpt::size_named(settings.model));
    auto inner = std::make_unique<torch::optim::AdamW>(
        model_->parameters(), torch::optim::AdamWOptions(1e-3).betas({0.9, 0.95}).eps(1e-8).weight_decay(0.1));
    if (stage < 0) {
      plain_ = std::move(inner);
    } else {
      sharded_ = zero::wrap(std::move(inner), zero::Options(comm)
                                                  .stage(static_cast<zero::Stage>(stage))
                                                  .bucket_bytes(settings.bucket_bytes)
                                                  .memory_budget(budget > 0 ? budget : 1)
                                                  .exceed_budget(budget == 0)
                                                  .module(*model_));
    }
  }

  /// Collective. Runs `steps` steps.
  Turn turn(int steps) {
    if (takes_part()) at::set_num_threads(stage_ < 0 ? comm_.size() : 1);
    comm_.barrier("start of a turn");
    std::vector<std::vector<double>> seconds(5);
    for (int i = 0; i < steps && takes_part(); ++i) {
      const std::vector<double> step = one_step();
      for (std::size_t part = 0; part < step.size(); ++part) seconds[part].push_back(step[part]);
    }
    std::vector<double> medians;
    for (const auto& part : seconds) medians.push_back(median(part));
    const auto slowest = gpt::max_over_ranks(comm_, medians, "seconds of a turn");
    return {slowest[0], slowest[1], slowest[2], slowest[3], slowest[4]};
  }

  zero::Memory memory() const { return sharded_ ? sharded_->memory() : zero::Memory(); }
  zero::Memory plan() const { return sharded_ ? sharded_->memory_plan() : zero::Memory(); }
  zero::StepReport report() const { return sharded_ ? sharded_->last_step() : zero::StepReport(); }
  std::int64_t bytes_sent() const { return sharded_ ? sharded_->last_step().bytes_sent : 0; }
  double last_loss() const { return loss_; }

  const std::string name;
  std::vector<Turn> turns;

 private:
  bool takes_part() const { return stage_ >= 0 || comm_.rank() == 0; }

  std::vector<double> one_step() {
    using Clock = std::chrono::steady_clock;
    const auto since = [](Clock::time_point t) { return std::chrono::duration<double>(Clock::now() - t).count(); };
    const auto start = Clock::now();
    torch::optim::Optimizer& optimizer = sharded_ ? static_cast<torch::optim::Optimizer&>(*sharded_) : *plain_;
    optimizer.zero_grad();
    // One process with N times the rows sees the sequences of N ranks side by side.
    const gpt::Position at =
        stage_ < 0 ? gpt::Position{step_, 0, 1, 0, 1} : gpt::Position{step_, 0, 1, comm_.rank(), comm_.size()};
    const auto [inputs, targets] = batches_.get(at, settings_.micro_batch * (stage_ < 0 ? comm_.size() : 1));
    const auto loss = model_->forward(inputs, targets);
    loss.backward();
    const double forward_backward = since(start);
    optimizer.step();
    ++step_;
    const double whole = since(start);
    loss_ = loss.item<double>();
    if (!sharded_) return {whole, forward_backward, 0, whole - forward_backward, 0};
    const auto& report = sharded_->last_step();
    return {whole, forward_backward, report.seconds_reduce, report.seconds_update, report.seconds_gather};
  }

  int stage_;
  const Settings& settings_;
  const gpt::Batches& batches_;
  zero::Communicator comm_;
  std::unique_ptr<gpt::Model> model_;
  std::unique_ptr<torch::optim::Optimizer> plain_;
  std::optional<zero::ZeroOptimizer> sharded_;
  std::int64_t step_ = 0;
  double loss_ = 0;
};

template <typename Of>
std::vector<double> of_turns(const Contestant& c, Of&& of) {
  std::vector<double> values;
  for (const Turn& turn : c.turns) values.push_back(of(turn));
  return values;
}

/// Per round: how many times as fast as `base`.
std::vector<double> speed_against(const Contestant& c, const Contestant& base) {
  std::vector<double> ratios;
  for (std::size_t i = 0; i < c.turns.size(); ++i) ratios.push_back(base.turns[i].step / c.turns[i].step);
  return ratios;
}

Json spread(const std::vector<double>& values) {
  return {{"median", median(values)},
          {"min", *std::min_element(values.begin(), values.end())},
          {"max", *std::max_element(values.begin(), values.end())}};
}

Json by_category(const zero::Memory& m) {
  return {
      {"parameters", m.parameters}, {"gradients", m.gradients}, {"optimizer_state", m.optimizer_state}, {"buffers", m.buffers}};
}

Json results(const std::vector<std::unique_ptr<Contestant>>& all, const Settings& s, const zero::Communicator& comm) {
  const double tokens = static_cast<double>(s.micro_batch * comm.size() * gpt::size_named(s.model).context);
  Json out = {{"benchmark", "bench_train"},   {"model", s.model},   {"ranks", comm.size()},
              {"micro_batch", s.micro_batch}, {"rounds", s.rounds}, {"steps_per_turn", s.steps},
              {"tokens_per_step", tokens}};
  for (const auto& c : all)
    out["contestants"].push_back(
        {{"name", c->name},
         {"step_seconds", spread(of_turns(*c, [](const Turn& t) { return t.step; }))},
         {"tokens_per_second", spread(of_turns(*c, [&](const Turn& t) { return tokens / t.step; }))},
         {"forward_backward_seconds", spread(of_turns(*c, [](const Turn& t) { return t.forward_backward; }))},
         {"communication_seconds", spread(of_turns(*c, [](const Turn& t) { return t.reduce + t.gather; }))},
         {"update_seconds", spread(of_turns(*c, [](const Turn& t) { return t.update; }))},
         {"speed_against_stage_0", spread(speed_against(*c, *all.front()))},
         {"bytes_sent_per_step", c->bytes_sent()},
         {"faults", c->report().faults},
         {"prefetch_hits", c->report().prefetch_hits},
         {"late_prefetch_seconds", c->report().late_prefetch_seconds},
         {"peak_resident_parameter_bytes", c->report().peak_resident_parameter_bytes},
         {"resident_bytes", by_category(c->memory())},
         {"planned_bytes", by_category(c->plan())},
         {"last_loss", c->last_loss()}});
  return out;
}

void print(const Json& r) {
  std::printf("%s, %d ranks, micro-batch %d, %d rounds of %d steps; medians [spread over rounds]\n",
              r["model"].get<std::string>().c_str(), r["ranks"].get<int>(), r["micro_batch"].get<int>(), r["rounds"].get<int>(),
              r["steps_per_turn"].get<int>());
  std::printf("%-8s %26s %10s %10s %10s %10s   %s\n", "", "tokens/s", "step ms", "fwd+bwd", "comm ms", "update ms",
              "speed against stage 0");
  const auto ms = [](const Json& c, const char* key) { return 1e3 * c[key]["median"].get<double>(); };
  for (const auto& c : r["contestants"]) {
    const Json& rate = c["tokens_per_second"];
    const Json& ratio = c["speed_against_stage_0"];
    std::printf("%-8s %8.0f [%7.0f ..%7.0f] %10.2f %10.2f %10.2f %10.2f   %.3f [%.3f .. %.3f]\n",
                c["name"].get<std::string>().c_str(), rate["median"].get<double>(), rate["min"].get<double>(),
                rate["max"].get<double>(), ms(c, "step_seconds"), ms(c, "forward_backward_seconds"),
                ms(c, "communication_seconds"), ms(c, "update_seconds"), ratio["median"].get<double>(),
                ratio["min"].get<double>(), ratio["max"].get<double>());
  }
  std::printf("%-8s %11s %11s %11s %11s %15s   (MiB on rank 0; bytes it sent per step)\n", "", "parameters", "gradients",
              "state", "buffers", "sent");
  for (const auto& c : r["contestants"]) {
    if (c["name"] == "plain") continue;
    const auto mib = [&](const char* key) { return c["resident_bytes"][key].get<double>() / 0x1p20; };
    std::printf("%-8s %11.2f %11.2f %11.2f %11.2f %15lld\n", c["name"].get<std::string>().c_str(), mib("parameters"),
                mib("gradients"), mib("optimizer_state"), mib("buffers"),
                static_cast<long long>(c["bytes_sent_per_step"].get<std::int64_t>()));
  }
}

void run(const Settings& s, const zero::Communicator& comm) {
  cpu_set_t cores;
  CPU_ZERO(&cores);
  if (comm.rank() == 0 && sched_getaffinity(0, sizeof cores, &cores) == 0 && CPU_COUNT(&cores) < comm.size())
    std::printf("note: rank 0 may use %d core(s), so `plain` is slower than it could be: start with mpirun --bind-to none\n",
                CPU_COUNT(&cores));
  const std::string text = s.text.empty() ? gpt::pseudo_text(1 << 20) : gpt::read_text(s.text);
  const gpt::Batches batches(text, gpt::size_named(s.model).context);

  std::vector<std::unique_ptr<Contestant>> all;
  const auto add = [&](const char* name, int stage, std::int64_t budget) {
    all.push_back(std::make_unique<Contestant>(name, stage, budget, s, batches, comm));
  };
  add("stage 0", 0, 1), add("stage 1", 1, 1), add("stage 2", 2, 1);
  add("3 ample", 3, std::int64_t{1} << 40), add("3 least", 3, 0);
  add("plain", -1, 1);
  for (const auto& c : all) c->turn(2);  // first steps make state and buffers
  for (int round = 0; round < s.rounds; ++round)
    for (std::size_t i = 0; i < all.size(); ++i) {
      Contestant& c = *all[(i + static_cast<std::size_t>(round)) % all.size()];
      c.turns.push_back(c.turn(s.steps));
    }
  if (comm.rank() != 0) return;
  const Json json = results(all, s, comm);
  print(json);
  if (s.json.empty()) return;
  std::ofstream file(s.json);
  file << json.dump(1) << '\n';
  file.close();
  TORCH_CHECK(file.good(), "--json: can't write ", s.json);
}

}  // namespace

int main(int argc, char** argv) {
  Settings s;
  CLI::App app{"Training throughput, exposed communication and memory at each stage"};
  app.add_option("--model", s.model, "Size of the model")
      ->check(CLI::IsMember({"tiny", "small", "medium", "wide"}))
      ->capture_default_str();
  app.add_option("--micro-batch", s.micro_batch, "Sequences per rank and step")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--rounds", s.rounds, "Rounds, in each of which everybody has a turn")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--steps", s.steps, "Steps per turn")->check(CLI::PositiveNumber)->capture_default_str();
  app.add_option("--bucket-bytes", s.bucket_bytes, "Gradients that are reduced together")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--text", s.text, "Files or folders to read (default: made-up words)");
  app.add_option("--json", s.json, "Write results to this file");
  CLI11_PARSE(app, argc, argv);
  try {
    run(s, zero::make_communicator());
    return 0;
  } catch (const std::exception& e) {
    std::fprintf(stderr, "bench_train: %s\n", gpt::one_line(e).c_str());
    return 1;
  }
}
