// Ranks that are killed at random moments of a loop that saves after every step: the newest checkpoint loads, at any number of ranks,
// and no older one is damaged.
#include <signal.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <future>
#include <random>
#include <string>
#include <thread>

#include "reference/command.h"
#include "support/catch.h"
#include "support/folder.h"

namespace {

using namespace std::chrono_literals;

constexpr int kRanks = 2;
constexpr int kLimit = 60;  // seconds of one job

std::string command(int ranks, const std::string& arguments) {
  return "ZERO_TIMEOUT_SECONDS=20 OMP_NUM_THREADS=1 timeout --kill-after=5 " + std::to_string(kLimit) + " " + quoted(ZERO_RUN) +
         " -n " + std::to_string(ranks) + " " + quoted(ZERO_CHECKPOINT_WORKER) + " " + arguments + " </dev/null";
}

// The process of a rank of the job that was started last, once it trains; 0: not yet.
pid_t process_of(const std::string& where, int rank) {
  std::ifstream file(where + "/" + std::to_string(rank));
  pid_t pid = 0;
  std::string line;
  return std::getline(file, line) && !file.eof() ? static_cast<pid_t>(std::stol(line)) : pid;
}

// Runs a job, kills some of its ranks `after` they have all begun, and waits for its end.
Finished run_and_kill(const std::string& directory, int stage, std::chrono::microseconds after, bool all) {
  const test::Folder where;
  auto job =
      std::async(std::launch::async, run_command,
                 command(kRanks, "save " + quoted(directory) + " " + std::to_string(stage) + " " + quoted(where.path())));
  const auto deadline = std::chrono::steady_clock::now() + 30s;
  for (int r = 0; r < kRanks; ++r)
    while (process_of(where.path(), r) == 0 && std::chrono::steady_clock::now() < deadline &&
           job.wait_for(0s) != std::future_status::ready)
      std::this_thread::sleep_for(1ms);
  std::this_thread::sleep_for(after);
  for (int r = all ? 0 : stage % kRanks; r < (all ? kRanks : stage % kRanks + 1); ++r)
    if (const auto pid = process_of(where.path(), r); pid > 0) kill(pid, SIGKILL);
  return job.get();
}

void kill_often(int times, unsigned seed) {
  std::mt19937 random(seed);
  const test::Folder folder;
  long newest = -1;
  int loaded = 0;
  for (int i = 0; i < times; ++i) {
    const int stage = static_cast<int>(random() % 4);
    const bool all = random() % 2 == 0;
    const auto after = std::chrono::microseconds(random() % 200000);
    INFO("kill " << i << " of " << (all ? "all ranks" : "one rank") << " at stage " << stage << " after " << after.count()
                 << " us");
    const auto job = run_and_kill(folder.path(), stage, after, all);
    INFO(job.output);
    REQUIRE(job.status != 0);
    REQUIRE(job.status != 124);  // somebody waited for ever
    const int ranks = 1 + static_cast<int>(random() % 3);
    const auto check = run_command(command(ranks, "check " + quoted(folder.path()) + " " + std::to_string(random() % 4)));
    INFO(check.output);
    REQUIRE(check.status == 0);
    long now = -1;
    const auto at = check.output.find("newest ");
    REQUIRE(at != std::string::npos);
    now = std::stol(check.output.substr(at + 7));
    REQUIRE(now >= newest);
    if (now > newest) ++loaded;
    newest = now;
    int left = 0;  // of the save that was killed; those before it are gone
    for (const auto& entry : std::filesystem::directory_iterator(folder.path()))
      left += entry.path().filename().string().rfind(".tmp", 0) == 0;
    REQUIRE(left <= 2);
  }
  REQUIRE(loaded > 0);
}

}  // namespace

TEST_CASE("B47 ranks that are killed while they save leave good checkpoints") { kill_often(6, 1); }

TEST_CASE("B47 ranks that are killed while they save, two hundred times", "[.full]") { kill_often(200, 2); }
