// One rank of a training job in which something happens to rank 1, at its third step. Run by test_faults under mpirun.
//
//   fault_worker STAGE PLACE WHAT FILE
//     PLACE  forward, backward, collective, fault, between (see trainer.h); of no matter to the last three of
//     WHAT   none, kill, stop, throw, exit, backward-fewer, step-fewer, step-more
//     FILE   rank 1 leaves the time of the incident here, so that the others can say how much later they noticed
//
// Exit status: 0, or 3 after a c10::Error of the library, 1 after an exception of the program's own.
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <stdexcept>
#include <string>
#include <thread>

#include "trainer.h"

namespace {

using faults::Place;

constexpr int kFailing = 1;

// One clock for all processes of a machine.
double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

// In one write, so that lines of several ranks don't mix.
void say(const std::string& line) {
  const auto text = line + "\n";
  if (write(STDOUT_FILENO, text.data(), text.size()) < 0) std::abort();
}

struct Arguments {
  int stage = 0;
  std::string place, what, file;
};

void note_incident(const Arguments& args) {
  std::ofstream file(args.file);
  file.precision(17);
  file << now() << '\n';
  file.close();
  say("rank 1 (process " + std::to_string(getpid()) + "): " + args.what);
}

double seconds_since_incident(const Arguments& args) {
  double began = 0;
  std::ifstream file(args.file);
  return file >> began ? now() - began : -1;
}

void let_it_happen(const Arguments& args) {
  // The others come to where this rank is, or wait for it: none is still at the end of the step before.
  std::this_thread::sleep_for(std::chrono::milliseconds(200));
  note_incident(args);
  if (args.what == "kill") std::raise(SIGKILL);
  if (args.what == "stop") std::raise(SIGSTOP);
  if (args.what == "throw") throw std::runtime_error("no more data on this rank's disk");
  if (args.what == "exit") std::exit(0);
}

void train(const Arguments& args, const zero::Communicator& comm) {
  const bool failing = comm.rank() == kFailing;
  const bool happens = args.what == "kill" || args.what == "stop" || args.what == "throw" || args.what == "exit";
  Place chosen{};
  for (const auto& [name, place] : faults::places())
    if (name == args.place) chosen = place;
  faults::Trainer trainer(comm, args.stage, [&](int step, Place place) {
    if (failing && happens && step == faults::kIncidentStep && place == chosen) let_it_happen(args);
  });
  int steps = faults::kSteps;
  if (failing && args.what == "step-fewer") --steps;
  if (failing && args.what == "step-more") ++steps;
  for (int step = 1; step <= steps; ++step) {
    if (failing && args.what == "step-more" && step == steps) note_incident(args);
    trainer.begin_step();
    trainer.backward();
    if (args.what == "backward-fewer") {
      if (failing && step == faults::kIncidentStep) {
        note_incident(args);
      } else {
        trainer.backward();
      }
    }
    // Reads are collective: only where they are the subject.
    if (chosen == Place::fault) trainer.read();
    trainer.end_step();
  }
  if (failing && args.what == "step-fewer") note_incident(args);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 5) {
    std::fprintf(stderr, "usage: fault_worker STAGE PLACE WHAT FILE\n");
    return 2;
  }
  const Arguments args{std::atoi(argv[1]), argv[2], argv[3], argv[4]};
  int rank = -1;
  try {
    const auto comm = zero::make_communicator();
    rank = comm.rank();
    train(args, comm);
    say("rank " + std::to_string(rank) + " has done its steps");
  } catch (const c10::Error& error) {
    char after[32];
    std::snprintf(after, sizeof after, "%.2f", seconds_since_incident(args));
    say("rank " + std::to_string(rank) + " after " + after + " seconds: " + faults::first_line(error.msg()));
    return 3;
  } catch (const std::exception& error) {
    say("rank " + std::to_string(rank) + " failed: " + error.what());
    return 1;
  }
  return 0;
}
