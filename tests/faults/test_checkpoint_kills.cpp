// Ranks that are killed or stopped at random moments of a loop that saves after every step: the newest checkpoint loads, at any number
// of ranks, and no older one is damaged.
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

std::string command(int ranks, const std::string& arguments, int patience = 20) {
  return "ZERO_TIMEOUT_SECONDS=" + std::to_string(patience) + " OMP_NUM_THREADS=1 timeout --kill-after=5 " +
         std::to_string(kLimit) + " " + quoted(ZERO_RUN) + " -n " + std::to_string(ranks) + " " +
         quoted(ZERO_CHECKPOINT_WORKER) + " " + arguments + " </dev/null";
}

// The process of a rank of the job that was started last, once it trains; 0: not yet.
pid_t process_of(const std::string& where, int rank) {
  std::ifstream file(where + "/" + std::to_string(rank));
  pid_t pid = 0;
  std::string line;
  return std::getline(file, line) && !file.eof() ? static_cast<pid_t>(std::stol(line)) : pid;
}

struct Disturbance {
  std::chrono::microseconds after;  // all ranks have begun
  bool all = false;                 // or one
  int signal = SIGKILL;
  int patience = 20;  // of the ranks with each other, in seconds
};

// Runs a job that is disturbed, and waits for its end.
Finished run_disturbed(const std::string& directory, int stage, const Disturbance& how) {
  const test::Folder where;
  auto job = std::async(
      std::launch::async, run_command,
      command(kRanks, "save " + quoted(directory) + " " + std::to_string(stage) + " " + quoted(where.path()), how.patience));
  const auto deadline = std::chrono::steady_clock::now() + 30s;
  for (int r = 0; r < kRanks; ++r)
    while (process_of(where.path(), r) == 0 && std::chrono::steady_clock::now() < deadline &&
           job.wait_for(0s) != std::future_status::ready)
      std::this_thread::sleep_for(1ms);
  std::this_thread::sleep_for(how.after);
  const int victim = stage % kRanks;
  const auto send = [&](int rank, int signal) {
    const auto pid = process_of(where.path(), rank);
    return pid > 0 && kill(pid, signal) == 0;
  };
  for (int r = 0; r < kRanks; ++r)
    if (how.all || r == victim) send(r, how.signal);
  if (how.signal == SIGSTOP) {
    while (send(1 - victim, 0) && job.wait_for(10ms) != std::future_status::ready) continue;
    send(victim, SIGKILL);
  }
  return job.get();
}

// Loads every checkpoint of the directory with some number of ranks. @return the newest one's step, −1: there is none
long check(const std::string& directory, std::mt19937& random) {
  const int ranks = 1 + static_cast<int>(random() % 3);
  const auto checked = run_command(command(ranks, "check " + quoted(directory) + " " + std::to_string(random() % 4)));
  INFO(checked.output);
  REQUIRE(checked.status == 0);
  const auto at = checked.output.find("newest ");
  REQUIRE(at != std::string::npos);
  return std::stol(checked.output.substr(at + 7));
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
    Disturbance how;
    how.after = after;
    how.all = all;
    const auto job = run_disturbed(folder.path(), stage, how);
    INFO(job.output);
    REQUIRE(job.status != 0);
    REQUIRE(job.status != 124);  // somebody waited for ever
    const long now = check(folder.path(), random);
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

// A rank that neither goes on nor ends, as under a debugger, or on a node that swaps: in a step, in a save, or in the thread that writes.
void stop_often(int times, unsigned seed) {
  std::mt19937 random(seed);
  const test::Folder folder;
  long newest = -1;
  for (int i = 0; i < times; ++i) {
    const int stage = i % 4;
    Disturbance how;
    how.after = std::chrono::microseconds(100000 + random() % 200000);
    how.signal = SIGSTOP;
    how.patience = 2;
    const auto began = std::chrono::steady_clock::now();
    const auto job = run_disturbed(folder.path(), stage, how);
    INFO("stop " << i << " at stage " << stage << " after " << how.after.count() << " us: " << job.output);
    REQUIRE(job.status != 0);
    REQUIRE(job.status != 124);
    REQUIRE(std::chrono::steady_clock::now() - began < 30s);
    const auto stopped = "rank " + std::to_string(stage % kRanks);
    const auto at = job.output.find("rank " + std::to_string(1 - stage % kRanks) + " of 2");  // the other one says
    REQUIRE(at != std::string::npos);
    REQUIRE(job.output.find(stopped, at) != std::string::npos);
    REQUIRE(job.output.find("timeout") != std::string::npos);
    const long now = check(folder.path(), random);
    REQUIRE(now >= newest);
    newest = now;
  }
  REQUIRE(newest > 0);
}

}  // namespace

TEST_CASE("a rank that is stopped while it saves: the other names it in time") { stop_often(2, 3); }

TEST_CASE("a rank that is stopped while it saves, forty times", "[.full]") { stop_often(40, 4); }

TEST_CASE("B47 ranks that are killed while they save leave good checkpoints") { kill_often(6, 1); }

TEST_CASE("B47 ranks that are killed while they save, two hundred times", "[.full]") { kill_often(200, 2); }
