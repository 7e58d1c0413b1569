// What the other ranks of an MPI job say when rank 1 dies, stops, leaves, or makes other calls than they do.
//
// mpirun ends a job as soon as one of its processes has failed. Each case is therefore run in one of two ways:
//   - with --enable-recovery, which leaves the survivors alone, to see what they say and when. mpirun's own status is 0 then, so a
//     shell around each rank says how it ended;
//   - as users do (`plain`): the whole job ends soon and not with status 0.
#include <poll.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <future>
#include <map>
#include <regex>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "reference/command.h"
#include "support/catch.h"

namespace {

constexpr double kTimeout = 2;                     // ZERO_TIMEOUT_SECONDS of the workers
constexpr double kAllowance = 2;                   // so much later than it could be known
constexpr int kLimit = 30;                         // of a whole job, in seconds
constexpr auto kLinger = std::chrono::seconds(5);  // finalize_at_exit() waits for 2

struct Case {
  int stage;
  std::string place;
  std::string what;
  std::string name() const { return what + " in " + place + " at stage " + std::to_string(stage); }
};

struct Line {
  double seconds = -1;
  std::string message;
};

struct Job {
  int status = 0;
  double seconds = 0;
  std::string output;
  std::map<int, Line> lines;  // "rank R after S seconds: …"
  std::map<int, int> ended;   // with --enable-recovery: exit statuses
  bool lingered = false;      // rank 1 went on for kLinger after the others had ended, and had to be killed
};

std::filesystem::path fresh_file() {
  static std::atomic<int> count{0};
  const auto folder = std::filesystem::path(ZERO_FAULT_FOLDER) / "incidents";
  std::filesystem::create_directories(folder);
  auto file = folder / std::to_string(count++);
  std::filesystem::remove(file);
  return file;
}

std::string command_of(const Case& c, bool recovery) {
  std::ostringstream command;
  // stdin: jobs run side by side, and mpirun would read the terminal.
  command << "ZERO_TIMEOUT_SECONDS=" << kTimeout << " timeout --signal=INT --kill-after=10 " << kLimit << ' '
          << quoted(ZERO_MPIRUN) << " -n 3 --oversubscribe ";
  if (recovery) {
    command << "--enable-recovery sh -c " << quoted("\"$@\"; echo \"rank $OMPI_COMM_WORLD_RANK ended with status $?\"")
            << " sh ";
  }
  command << quoted(ZERO_FAULT_WORKER) << ' ' << c.stage << ' ' << c.place << ' ' << c.what << ' ' << quoted(fresh_file())
          << " 2>&1 </dev/null";
  return command.str();
}

/// Takes in what a job prints, line by line, and lets a rank that has stopped itself go on once the others have ended: only then is
/// it known that they did so without it. The one process that it ever signals has said its number and not yet that it has ended.
class Reader {
 public:
  explicit Reader(Job& job) : job_(job) {}

  void take(const char* data, std::size_t size) {
    job_.output.append(data, size);
    rest_.append(data, size);
    for (std::size_t end; (end = rest_.find('\n')) != std::string::npos; rest_.erase(0, end + 1))
      take_line(rest_.substr(0, end));
  }

  void look_after_rank_1() {
    if (pid_ <= 0 || job_.ended.count(0) == 0 || job_.ended.count(2) == 0 || job_.ended.count(1) > 0) return;
    if (!continued_) {
      others_ended_ = std::chrono::steady_clock::now();
      kill(pid_, SIGCONT);
      continued_ = true;
    } else if (!job_.lingered && std::chrono::steady_clock::now() - others_ended_ > kLinger) {
      job_.lingered = true;
      kill(pid_, SIGKILL);
    }
  }

 private:
  void take_line(const std::string& line) {
    static const std::regex said(R"(rank (\d) after (-?[\d.]+) seconds: (.*))"), end(R"(rank (\d) ended with status (\d+))"),
        incident(R"(rank 1 \(process (\d+)\): )");
    std::smatch match;
    if (std::regex_search(line, match, said)) job_.lines[std::stoi(match[1])] = {std::stod(match[2]), match[3]};
    if (std::regex_search(line, match, end)) job_.ended[std::stoi(match[1])] = std::stoi(match[2]);
    if (std::regex_search(line, match, incident)) pid_ = std::stoi(match[1]);
  }

  Job& job_;
  std::string rest_;
  pid_t pid_ = 0;
  bool continued_ = false;
  std::chrono::steady_clock::time_point others_ended_;
};

Job run_job(const Case& c, bool recovery) {
  Job job;
  const auto began = std::chrono::steady_clock::now();
  std::FILE* pipe = popen(command_of(c, recovery).c_str(), "r");
  if (pipe == nullptr) throw std::runtime_error("can't start a job");
  Reader reader(job);
  std::array<char, 4096> piece{};
  for (;;) {
    pollfd entry{fileno(pipe), POLLIN, 0};
    if (poll(&entry, 1, 100) > 0) {
      const auto size = read(entry.fd, piece.data(), piece.size());
      if (size <= 0) break;
      reader.take(piece.data(), static_cast<std::size_t>(size));
    }
    if (recovery) reader.look_after_rank_1();
  }
  const int status = pclose(pipe);
  job.status = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  job.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
  return job;
}

bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

/// What it says about others: after "rank 0 of 3 (mpi): ", which names itself.
std::string about_others(const std::string& message, int rank) {
  const auto own = "rank " + std::to_string(rank) + " of 3 (mpi): ";
  return message.compare(0, own.size(), own) == 0 ? message.substr(own.size()) : message;
}

// A rank that has stopped is missing: known after the timeout only.
bool is_missed(const Case& c) { return c.what == "stop"; }

void judge_message(const Case& c, int rank, const Line& line, std::vector<std::string>& problems) {
  const auto wrong = [&](const std::string& why) {
    problems.push_back("rank " + std::to_string(rank) + " " + why + ": " + line.message);
  };
  const double allowed = (is_missed(c) ? kTimeout : 0) + kAllowance;
  if (line.seconds < 0 || line.seconds > allowed)
    wrong("noticed after " + std::to_string(line.seconds) + " s, allowed are " + std::to_string(allowed));
  const auto text = about_others(line.message, rank);
  if (c.what == "step-more") {  // the one to complain is rank 1, about either of the others
    if (!contains(text, "rank 0") && !contains(text, "rank 2")) wrong("names nobody");
  } else if (!contains(text, "rank 1")) {
    wrong("doesn't name rank 1");
  }
  const bool at_next = c.place == "between";  // the others are in the next step already
  const int step = c.what == "step-fewer" ? 5 : c.what == "step-more" ? 6 : at_next ? 4 : 3;
  if (!contains(text, "step " + std::to_string(step))) wrong("doesn't say 'step " + std::to_string(step) + "'");
  if (contains(text, "bucket") && !std::regex_search(text, std::regex(R"(layer\d\.(weight|bias))")))
    wrong("names no parameter of the bucket");
  if (c.place == "fault" && !contains(text, "layer1.")) wrong("doesn't name the parameter whose gradient it reads");
  if (c.what == "kill" && !contains(text, "rank 1 has died")) wrong("doesn't say that rank 1 has died");
  if (c.what == "throw" && !contains(text, "rank 1 failed")) wrong("doesn't say that rank 1 failed");
  // The second backward may still be at one of its buckets.
  if (c.what == "backward-fewer" && !(contains(text, "different calls") && contains(text, "step()") &&
                                      (contains(text, "backward") || contains(text, "reducing gradients"))))
    wrong("doesn't name both calls");
  if (c.what == "exit" && !contains(text, "rank 1 failed: its program ended")) wrong("doesn't say that rank 1 has ended");
  if (c.what == "step-fewer" && !contains(text, "has destroyed its communicator")) wrong("doesn't say that rank 1 has left");
}

std::vector<std::string> judge_survivors(const Case& c, const Job& job) {
  std::vector<std::string> problems;
  if (job.status == 124 || job.status >= 128)
    problems.push_back("the job had to be ended after " + std::to_string(job.seconds) + " s");
  if (job.lingered) problems.push_back("rank 1 still ran 5 s after the others had ended");
  std::vector<int> survivors{0, 2};
  if (c.what == "step-more") survivors = {1};
  for (int rank : survivors) {
    const auto line = job.lines.find(rank);
    if (line == job.lines.end()) {
      problems.push_back("rank " + std::to_string(rank) + " said nothing");
      continue;
    }
    judge_message(c, rank, line->second, problems);
    if (job.ended.count(rank) == 0 || job.ended.at(rank) != 3)
      problems.push_back("rank " + std::to_string(rank) + " didn't end with 3");
  }
  if (c.what == "throw" && !contains(job.output, "no more data on this rank's disk"))
    problems.push_back("rank 1's own message is missing");
  // Whoever goes on after the others have given up learns it, too.
  if (c.what == "stop" && job.lines.count(1) == 0) problems.push_back("rank 1 went on and noticed nothing");
  return problems;
}

std::vector<std::string> judge_plain(const Case& c, const Job& job) {
  std::vector<std::string> problems;
  if (!contains(job.output, "rank 1 (process ")) problems.push_back("nothing has happened");  // the job didn't even start
  if (job.status == 0) problems.push_back("the job ended with status 0");
  if (job.status == 124 || job.seconds > kLimit) problems.push_back("the job took " + std::to_string(job.seconds) + " s");
  if (c.what == "throw" && !contains(job.output, "no more data on this rank's disk"))
    problems.push_back("rank 1's own message is missing");
  return problems;
}

void report(const Case& c, const char* way, const Job& job, const std::vector<std::string>& problems) {
  std::printf("%-36s %-9s %.1f s, status %d", c.name().c_str(), way, job.seconds, job.status);
  for (const auto& [rank, line] : job.lines)
    std::printf("\n    rank %d after %.2f s: %s", rank, line.seconds, line.message.c_str());
  std::printf("\n");
  for (const auto& problem : problems) {
    INFO(c.name() << ", " << way << ":\n" << job.output);
    FAIL_CHECK(problem);
  }
  std::fflush(stdout);
}

/// A few at a time: they wait more than they compute. Checked here, since Catch2's assertions aren't made for several threads.
void check(const std::vector<Case>& cases, bool recovery) {
  constexpr std::size_t kAtATime = 3;
  for (std::size_t begin = 0; begin < cases.size(); begin += kAtATime) {
    const auto end = std::min(begin + kAtATime, cases.size());
    std::vector<std::future<Job>> jobs;
    for (auto i = begin; i < end; ++i) jobs.push_back(std::async(std::launch::async, run_job, cases[i], recovery));
    for (auto i = begin; i < end; ++i) {
      const auto job = jobs[i - begin].get();
      report(cases[i], recovery ? "survivors" : "plain", job,
             recovery ? judge_survivors(cases[i], job) : judge_plain(cases[i], job));
    }
  }
}

void check_survivors(const std::vector<Case>& cases) { check(cases, true); }
void check_plain(const std::vector<Case>& cases) { check(cases, false); }

const std::vector<std::string> kPlaces{"forward", "backward", "collective", "fault", "between"};

}  // namespace

TEST_CASE("B66: a rank that dies is named at once, wherever it was") {
  std::vector<Case> cases;
  for (const auto& place : kPlaces) cases.push_back({2, place, "kill"});
  for (int stage : {0, 1, 3}) cases.push_back({stage, "backward", "kill"});
  check_survivors(cases);
}

TEST_CASE("B66: a rank that has stopped is named at the timeout, an exception and an early exit are noticed") {
  check_survivors({{2, "backward", "stop"}, {2, "fault", "stop"}, {2, "backward", "throw"}, {2, "backward", "exit"}});
}

TEST_CASE("B67(iii): a rank that makes one backward or one step fewer, or one more") {
  check_survivors({{2, "backward", "backward-fewer"},
                   {1, "backward", "backward-fewer"},
                   {2, "backward", "step-fewer"},
                   {2, "backward", "step-more"}});
}

TEST_CASE("B66, B67(iii): a plain mpirun ends the whole job, not with status 0") {
  check_plain({{2, "backward", "kill"},
               {2, "backward", "throw"},
               {2, "backward", "exit"},
               {2, "backward", "step-fewer"},
               {2, "backward", "step-more"}});
}

TEST_CASE("B66, B67(iii): every combination", "[.full]") {
  std::vector<Case> cases;
  for (int stage : {0, 1, 2, 3}) {
    for (const char* what : {"kill", "stop", "throw", "exit"})
      for (const auto& place : kPlaces) cases.push_back({stage, place, what});
    for (const char* what : {"backward-fewer", "step-fewer", "step-more"}) cases.push_back({stage, "backward", what});
  }
  check_survivors(cases);
  check_plain(cases);
}
