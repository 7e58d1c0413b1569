// Saves in the background: training goes on, the checkpoint is of the moment of the call, and what fails is said.
#include <sys/resource.h>

#include <atomic>
#include <csignal>
#include <filesystem>

#include "checkpoint/background_save.h"
#include "checkpoint/file.h"
#include "checkpoint/manifest.h"
#include "support/catch.h"
#include "support/checkpoints.h"

using namespace checkpoints;
using torch::optim::AdamW;
using torch::optim::AdamWOptions;
using zero::BackgroundSave;
using zero::SaveOptions;
using zero::checkpoint::names_in;
using zero::checkpoint::read_manifest;

namespace {

std::unique_ptr<torch::optim::Optimizer> adamw(Params p) {
  return std::make_unique<AdamW>(std::move(p), AdamWOptions(0.01).weight_decay(0.1));
}

// Files of this process may not be larger, while it lives.
class FileLimit {
 public:
  explicit FileLimit(rlim_t bytes) {
    std::signal(SIGXFSZ, SIG_IGN);
    getrlimit(RLIMIT_FSIZE, &before_);
    auto limit = before_;
    limit.rlim_cur = bytes;
    setrlimit(RLIMIT_FSIZE, &limit);
  }
  ~FileLimit() { setrlimit(RLIMIT_FSIZE, &before_); }
  FileLimit(const FileLimit&) = delete;
  FileLimit& operator=(const FileLimit&) = delete;

 private:
  rlimit before_{};
};

using Bytes = std::function<std::shared_ptr<const void>()>;

zero::checkpoint::Run run(std::int64_t begin, std::int64_t count, Bytes bytes) {
  return {{"parameter", "w", "", "F32", {8}, {1}, {}}, begin, count, std::move(bytes)};
}

// The saves of two ranks, four elements each; rank 1's are asked for by `bytes`, rank 0's by `bytes_0` if given.
std::vector<std::string> two_ranks(const std::string& directory, const Bytes& bytes, std::chrono::milliseconds timeout,
                                   bool rank_1_writes = true, const Bytes& bytes_0 = nullptr) {
  static const std::vector<float> data{1, 2, 3, 4, 5, 6, 7, 8};
  std::vector<std::string> problems(2);
  auto folder = zero::checkpoint::NewFolder::make(directory, 1);
  const auto path = folder.path();
  on_ranks(2, [&](const Communicator& comm) {
    BackgroundSave::Plan plan;
    plan.rank = comm.rank(), plan.ranks = 2, plan.folder = path, plan.timeout = timeout;
    if (comm.rank() == 0) {
      plan.commit.emplace(std::move(folder));
      const auto good = []() -> std::shared_ptr<const void> { return {std::shared_ptr<void>(), data.data()}; };
      plan.job.runs.push_back(run(0, 4, bytes_0 ? bytes_0 : good));
    } else {
      plan.job.runs.push_back(run(4, 4, bytes));
    }
    if (comm.rank() == 1 && !rank_1_writes) return;
    BackgroundSave save(std::move(plan));
    if (!rank_1_writes) {  // nobody to meet: as after the death of a rank
      while (problems[0].empty()) problems[0] = save.take_problem();
    } else {
      problems[comm.rank()] = save.wait(comm);
    }
  });
  return problems;
}

}  // namespace

TEST_CASE("a save in the background is of the moment of the call, at every stage") {
  for (int stage = 0; stage <= 3; ++stage) {
    INFO("stage " << stage);
    const test::Folder background, foreground;
    REQUIRE_NOTHROW(on_ranks(3, [&](const Communicator& comm) {
      Trainer it(comm, stage, adamw);
      it.steps(0, 2);
      const auto expected = it.save(foreground.path());
      const auto path = it.save(background.path(), {{"at", 2}}, SaveOptions().async());
      it.steps(2, 5);  // writes over what is being saved, unless it was copied
      zero::wait_for_save(it.opt);
      zero::wait_for_save(it.opt);  // nothing to wait for
      const auto a = read_manifest(expected), b = read_manifest(path);
      for (const auto& t : a.tensors) {
        if (t.kind == "options") continue;
        const auto* u = b.find(t.kind, t.name, t.field);
        expect(u != nullptr && u->fragments.size() == t.fragments.size(), t.title());
        for (std::size_t k = 0; k < t.fragments.size(); ++k)
          expect(t.fragments[k].checksum == u->fragments[k].checksum, t.title(), " isn't of the moment of the call");
      }
      // One after the other without waiting: the second waits for the first; and one that ends with the optimizer.
      it.save(background.path(), {}, SaveOptions().async().keep(2));
      it.steps(5, 6);
      it.save(background.path(), {}, SaveOptions().async().keep(2));
    }));
    REQUIRE(names_in(background.path()) == std::vector<std::string>{"step-00000005", "step-00000006"});
    (void)read_manifest(background.path() + "/step-00000006");
  }
}

TEST_CASE("what fails in the background is an error of the next step, save or wait, on every rank, once") {
  const test::Folder folder;
  for (const auto where : {0, 1, 2}) {
    INFO("noticed at " << (where == 0 ? "step" : where == 1 ? "save" : "wait"));
    const FileLimit limit(64 << 10);
    REQUIRE_NOTHROW(on_ranks(2, [&](const Communicator& comm) {
      Trainer it(comm, 2, adamw);
      it.steps(0, 2);
      it.save(folder.path(), {{"large", at::zeros({100 << 10}, at::kFloat)}}, SaveOptions().async());
      const auto message = expect_error({"in the background", "rank-00000-of-00002", "File too large"}, [&] {
        if (where == 1) it.save(folder.path());
        if (where == 2) zero::wait_for_save(it.opt);
        for (int s = 2; where == 0 && s < 2000; ++s) it.steps(s, s + 1);
      });
      for (const auto& theirs : comm.exchange(message, "comparing messages"))
        expect(theirs == message, "other words: ", theirs);
      it.steps(2, 4);
      zero::wait_for_save(it.opt);
      const auto path = it.save(folder.path());  // without the large value
      expect(zero::latest(folder.path()) == path, "a save after one that failed");
      comm.barrier();
      if (comm.rank() == 0) std::filesystem::remove_all(path);
      comm.barrier();
    }));
    REQUIRE(names_in(folder.path()).empty());
  }
}

TEST_CASE("one rank's thread that fails, or never writes: no checkpoint, and all hear why") {
  const test::Folder folder;
  static const std::vector<float> data{5, 6, 7, 8};
  const auto good = []() -> std::shared_ptr<const void> { return {std::shared_ptr<void>(), data.data()}; };
  REQUIRE(two_ranks(folder.path(), good, std::chrono::seconds(10)) == std::vector<std::string>(2));
  REQUIRE(names_in(folder.path()) == std::vector<std::string>{"step-00000001"});
  const auto bad = []() -> std::shared_ptr<const void> { throw std::runtime_error("the disk is on fire"); };
  const auto problems = two_ranks(folder.path(), bad, std::chrono::seconds(10));
  REQUIRE(problems[0] == problems[1]);
  REQUIRE(problems[0].find("rank 1: the disk is on fire") != std::string::npos);
  REQUIRE(names_in(folder.path()) == std::vector<std::string>{"step-00000001"});
  REQUIRE(two_ranks(folder.path(), good, std::chrono::milliseconds(200), false)[0].find("rank 1 has not written") !=
          std::string::npos);
  REQUIRE(names_in(folder.path()) == std::vector<std::string>{"step-00000001"});
}

TEST_CASE("a save that failed on one rank leaves nothing, whoever ends last and however close together") {
  const test::Folder folder;
  const auto names = [&] { return names_in(folder.path()); };
  static const std::vector<float> data{5, 6, 7, 8};
  const Bytes fail = []() -> std::shared_ptr<const void> { throw std::runtime_error("the disk is on fire"); };
  bool gone = true;
  const auto slow = [&]() -> std::shared_ptr<const void> {
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    gone = names().empty();  // others must not remove what this rank writes to
    return {std::shared_ptr<void>(), data.data()};
  };
  for (const auto& problem : two_ranks(folder.path(), slow, std::chrono::seconds(10), true, fail))
    REQUIRE(problem.find("rank 0: the disk is on fire") != std::string::npos);
  REQUIRE_FALSE(gone);
  REQUIRE(names().empty());
  for (int k = 0; k < 300; ++k) {
    INFO("round " << k);
    (void)two_ranks(folder.path(), fail, std::chrono::seconds(10), true, k % 2 == 0 ? fail : Bytes());
    REQUIRE(names().empty());
  }
}
