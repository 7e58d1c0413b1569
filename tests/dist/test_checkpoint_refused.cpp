// What doesn't fit or is damaged is refused on every rank with the same words, and nothing has changed.
#include <sys/resource.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <filesystem>

#include "checkpoint/file.h"
#include "checkpoint/manifest.h"
#include "support/catch.h"
#include "support/checkpoints.h"

using namespace checkpoints;
using torch::optim::Adam;
using torch::optim::AdamOptions;
using torch::optim::AdamW;
using torch::optim::AdamWOptions;
using zero::checkpoint::File;
using zero::checkpoint::read_manifest;

namespace {

std::unique_ptr<torch::optim::Optimizer> adamw(Params p) {
  return std::make_unique<AdamW>(std::move(p), AdamWOptions(0.01).weight_decay(0.1));
}

// The message of a refusal, which has to be the same on every rank and to leave everything as it was: the parameters now, and those
// that two more steps make, which the optimizer's state is in.
template <typename Action>
void refused(Trainer& it, Trainer& twin, const std::vector<std::string>& parts, Action action) {
  const auto message = expect_error(parts, action);
  for (const auto& theirs : it.opt.comm().exchange(message, "comparing messages"))
    expect(theirs == message, "ranks have different messages: ", theirs, " and ", message);
  expect(same_bits(it.values(), twin.values()), "a refused load has changed parameters");
  it.steps(2, 4), twin.steps(2, 4);
  expect(same_bits(it.values(), twin.values()), "a refused load has changed the optimizer");
}

void flip(const std::string& path, std::int64_t at) {
  const auto file = File::open_to_write(path);
  char byte = 0;
  file.read(&byte, 1, at);
  byte = static_cast<char>(byte ^ 64);
  file.write(&byte, 1, at);
}

// A checkpoint of step 2 by two ranks at stage 1.
std::string make(const std::string& directory) {
  std::string path;
  on_ranks(2, [&](const Communicator& comm) {
    Trainer it(comm, 1, adamw);
    it.steps(0, 2);
    const auto saved = it.save(directory);
    if (comm.rank() == 0) path = saved;
  });
  return path;
}

// What loads it: on as many ranks at this stage, after two steps of its own.
void expect_refused(int stage, const std::string& path, const std::vector<std::string>& parts) {
  REQUIRE_NOTHROW(on_ranks(3, [&](const Communicator& comm) {
    Trainer it(comm, stage, adamw, 256, at::kDouble, 5), twin(comm, stage, adamw, 256, at::kDouble, 5);
    it.steps(0, 2), twin.steps(0, 2);
    refused(it, twin, parts, [&] { it.load(path); });
  }));
}

}  // namespace

TEST_CASE("damaged checkpoints are refused, the file is named, and nothing has changed") {
  const test::Folder folder;
  const auto path = make(folder.path());
  const auto manifest = read_manifest(path);
  const auto file = path + "/" + manifest.files[1].name;
  const int stage = GENERATE(0, 1, 2, 3);
  INFO("stage " << stage);
  SECTION("B47 a truncated file") {
    std::filesystem::resize_file(file, manifest.files[1].bytes / 2);
    expect_refused(stage, path, {manifest.files[1].name, "is damaged"});
  }
  SECTION("a part of the set is missing") {
    std::filesystem::remove(file);
    expect_refused(stage, path, {manifest.files[1].name, "missing"});
  }
  SECTION("any flipped bit, wherever it is") {
    for (const auto* kind : {"parameter", "state", "options", "random"}) {
      for (const auto& t : manifest.tensors) {
        if (t.kind != kind || t.fragments.empty()) continue;
        const auto& f = t.fragments.back();
        const auto damaged = path + "/" + manifest.files[f.file].name;
        flip(damaged, f.offset + f.count * t.itemsize() - 1);
        expect_refused(stage, path, {manifest.files[f.file].name, "is damaged", "checksum"});
        flip(damaged, f.offset + f.count * t.itemsize() - 1);
        break;
      }
    }
  }
  SECTION("a manifest that is damaged, of a newer version, or none") {
    const auto name = path + "/manifest.json";
    auto text = zero::checkpoint::read_whole(name);
    const auto change = GENERATE(0, 1, 2);
    if (change == 0) text.replace(text.find("w1"), 2, "w9");
    if (change == 1) text.replace(text.find("\"version\":1"), 11, "\"version\":7");
    std::filesystem::remove(name);
    if (change != 2) zero::checkpoint::write_whole(name, text);
    const std::vector<std::vector<std::string>> words{
        {"manifest.json", "damaged"}, {"manifest.json", "version 7", "newer"}, {"no checkpoint"}};
    expect_refused(stage, path, words[change]);
    // The directory's newest: one that is of a newer format isn't passed over in silence.
    REQUIRE(zero::latest(folder.path()).has_value() == (change == 1));
  }
  SECTION("no such folder") { expect_refused(stage, folder.path() + "/nowhere", {"no checkpoint", "nowhere"}); }
}

TEST_CASE("B47 a save that didn't come to its end: the newest that is whole is loaded, on all ranks") {
  const test::Folder folder;
  const auto good = make(folder.path());
  // What a process that is killed leaves: files under a temporary name, without manifest; no lock.
  const auto left = folder.path() + "/.tmp-step-4-killed";
  std::filesystem::copy(good, left);
  std::filesystem::remove(left + "/manifest.json");
  // And what other programs' saves leave.
  std::filesystem::copy(good, folder.path() + "/step-00000009");
  std::filesystem::resize_file(folder.path() + "/step-00000009/" + read_manifest(good).files[0].name, 100);
  REQUIRE(zero::latest(folder.path()) == good);
  for (int stage = 0; stage <= 3; ++stage)
    REQUIRE_NOTHROW(on_ranks(2, [&](const Communicator& comm) {
      Trainer never(comm, stage, adamw), it(comm, stage, adamw, 256, at::kDouble, 5);
      never.steps(0, 2);
      expect(it.load(folder.path()).path == good && it.opt.last_step().number == 2, "the newest");
      expect(same_bits(never.values(), it.values()), "step 2");
    }));
  // The next save clears up.
  on_ranks(2, [&](const Communicator& comm) {
    Trainer it(comm, 2, adamw);
    it.steps(0, 3);
    it.save(folder.path());
  });
  REQUIRE_FALSE(std::filesystem::exists(left));
  REQUIRE(zero::latest(folder.path()) == folder.path() + "/step-00000003");
}

TEST_CASE("checkpoints of another model are refused naming the first difference; strict(false) loads what fits") {
  const test::Folder folder;
  const auto path = make(folder.path());
  const int stage = GENERATE(0, 1, 2, 3);
  INFO("stage " << stage);
  const auto with = [&](const char* what, const std::function<void(std::vector<std::string>&, Params&)>& change,
                        const std::vector<std::string>& parts, std::size_t differences) {
    INFO(what);
    REQUIRE_NOTHROW(on_ranks(2, [&](const Communicator& comm) {
      auto params = Model().params;
      auto names = Model::names();
      change(names, params);
      for (auto& p : params) p = p.detach().mul(0.5).requires_grad_(true);
      auto opt = zero::wrap(adamw(params), suite::options_for(comm, stage).names(names));
      const auto before = copies(params);
      const auto message = expect_error(parts, [&] { zero::load(path, {}, opt); });
      for (const auto& theirs : comm.exchange(message, "comparing messages"))
        expect(theirs == message, "other words: ", theirs);
      expect(same_bits(copies(params), before) && opt.last_step().number == 0, "something has changed");
      const auto loaded = zero::load(path, {}, opt, zero::LoadOptions().strict(false));
      expect(loaded.skipped.size() == differences, "skipped ", loaded.skipped.size(), ": ",
             loaded.skipped.empty() ? "" : loaded.skipped[0]);
      for (const auto& part : parts) expect(loaded.skipped[0].find(part) != std::string::npos, loaded.skipped[0]);
      const Model saved;
      for (std::size_t i = 0; i < params.size(); ++i)
        if (names[i] == "w3") expect(!at::equal(params[i].detach().clone(), before[i]), "w3 fits and isn't loaded");
      for (auto& p : params) p.sum().backward();
      opt.step();
    }));
  };
  using Names = std::vector<std::string>;
  with(
      "missing", [](Names& n, Params& p) { n.emplace_back("more"), p.push_back(values({2}, 3)); },
      {"parameter 'more' is missing in the checkpoint"}, 1);
  with(
      "extra", [](Names& n, Params& p) { n.erase(n.begin() + 5), p.erase(p.begin() + 5); },
      {"parameter 'b2'", "the model hasn't"}, 1);
  with(
      "renamed", [](Names& n, Params&) { n[0] = "w9"; }, {"'w9' is missing", "'w1'", "renamed"}, 1);
  with(
      "shape",
      [](Names&, Params& p) {
        p[0] = values({5, 7}, 1);
      },
      {"'w1'", "[7, 5]", "[5, 7]"}, 1);
  with(
      "type", [](Names&, Params& p) { p[2] = p[2].to(at::kFloat); }, {"'w2'", "F64", "F32"}, 1);
  with(
      "two at once",
      [](Names& n, Params& p) {
        n[5] = "b9";
        p[0] = values({5, 7}, 1);
      },
      {"'w1'"}, 2);

  REQUIRE_NOTHROW(on_ranks(2, [&](const Communicator& comm) {
    Trainer it(
        comm, stage, [](Params p) { return std::make_unique<Adam>(std::move(p), AdamOptions(0.3)); }, 256, at::kDouble, 8);
    const auto before = it.values();
    expect_error({"AdamW", "Adam"}, [&] { it.load(path); });
    expect(same_bits(it.values(), before), "another class: something has changed");
    const auto loaded = it.load(path, zero::LoadOptions().strict(false));
    expect(loaded.skipped.size() == 1 && it.opt.param_groups()[0].options().get_lr() == 0.3, "options of another class");
    Trainer never(comm, stage, adamw);
    never.steps(0, 2);
    expect(same_bits(it.values(), never.values()), "parameters alone");
    it.steps(0, 1);
  }));
  REQUIRE_NOTHROW(on_ranks(2, [&](const Communicator& comm) {
    Model model;
    std::vector<torch::optim::OptimizerParamGroup> groups;
    groups.emplace_back(Params(model.params.begin(), model.params.begin() + 3));
    groups.emplace_back(Params(model.params.begin() + 3, model.params.end()));
    auto opt = zero::wrap<AdamW>(groups, AdamWOptions(0.1), suite::options_for(comm, stage).names(Model::names()));
    expect_error({"1 parameter groups", "has 2"}, [&] { zero::load(path, {}, opt); });
  }));
}

TEST_CASE("names that aren't any, twice the same name, ranks at different calls") {
  const test::Folder folder;
  REQUIRE_NOTHROW(on_ranks(2, [&](const Communicator& comm) {
    const auto a = values({3}, 1).requires_grad_(true), b = values({4}, 2).requires_grad_(true);
    auto opt = zero::wrap<AdamW>(Params{a, b}, AdamWOptions(0.1), suite::options_for(comm, 1));
    expect_error({"two tensors are called 'x'"}, [&] { zero::save(folder.path(), {{{"x", a}, {"x", b}}}, opt); });
    expect_error({"UTF-8"}, [&] { zero::save(folder.path(), {{{"\xff", a}, {"x", b}}}, opt); });
    expect_error({"keep is negative"}, [&] { zero::save(folder.path(), {}, opt, {}, zero::SaveOptions().keep(-1)); });
    expect_error({"rank 0 is in zero::save()", "rank 1 is in zero::load()"}, [&] {
      if (comm.rank() == 0)
        zero::save(folder.path(), {}, opt);
      else
        zero::load(folder.path(), {}, opt);
    });
    a.sum().backward(), opt.step();
  }));
  REQUIRE(std::filesystem::is_empty(folder.path()));
}

TEST_CASE("a directory that can't be written, or is a file: an error on every rank, and training goes on") {
  const test::Folder folder;
  zero::checkpoint::write_whole(folder.path() + "/file", "x");
  REQUIRE_NOTHROW(on_ranks(3, [&](const Communicator& comm) {
    Trainer it(comm, 2, adamw);
    it.steps(0, 1);
    for (const bool background : {false, true})
      expect_error({"rank 0", "/file"}, [&] {
        it.save(folder.path() + "/file", {}, zero::SaveOptions().async(background));
        zero::wait_for_save(it.opt);
      });
    expect_error({"rank 0", "/proc/"}, [&] { it.save("/proc/no-such"); });
    it.steps(1, 2);
  }));
}

TEST_CASE("a write that fails on one rank: nothing is committed, and what was there before stays") {
  // Files may have so many bytes only: rank 0's, which has a large value of the user's, doesn't fit; the others' do.
  const test::Folder folder;
  const auto good = make(folder.path());
  std::signal(SIGXFSZ, SIG_IGN);
  rlimit before{};
  getrlimit(RLIMIT_FSIZE, &before);
  for (const bool background : {false, true}) {
    INFO("in the background: " << background);
    REQUIRE_NOTHROW(on_ranks(2, [&](const Communicator& comm) {
      Trainer it(comm, 1, adamw);
      it.steps(0, 3);
      comm.barrier();
      if (comm.rank() == 0) {
        auto limit = before;
        limit.rlim_cur = 200 << 10;
        setrlimit(RLIMIT_FSIZE, &limit);
      }
      comm.barrier();
      const auto message = expect_error({"rank-00000-of-00002", "File too large"}, [&] {
        it.save(folder.path(), {{"large", at::zeros({100 << 10}, at::kFloat)}}, zero::SaveOptions().async(background));
        zero::wait_for_save(it.opt);
      });
      for (const auto& theirs : comm.exchange(message, "comparing messages"))
        expect(theirs == message, "other words: ", theirs);
      if (comm.rank() == 0) setrlimit(RLIMIT_FSIZE, &before);
      comm.barrier();
      it.steps(3, 4);
    }));
    REQUIRE(zero::checkpoint::names_in(folder.path()).size() == 1);
    REQUIRE(zero::latest(folder.path()) == good);
    (void)read_manifest(good);
  }
}
