// What both trainers need around the training: the command line, progress, errors.
#pragma once

#include <chrono>
#include <cstdint>
#include <fstream>
#include <string>

namespace mnist {

struct Settings {
  bool help = false;  ///< help was asked for and has been printed: nothing to do
  std::string data;   ///< folder of the four unpacked files
  int epochs = 3;
  std::int64_t batch = 128;        ///< over all ranks
  std::int64_t local_batch = 128;  ///< of one rank
  double lr = 0.05;
  std::int64_t limit = 60000;  ///< images to train on
  std::uint64_t seed = 0;
  int stage = 2;
  std::string losses;  ///< file for the loss of every step; empty: none
  int ranks = 1;
  int rank = 0;
};

/// The command line of one of `ranks` processes. Sets the number of LibTorch's threads too.
/// @throws std::runtime_error with one line about what is wrong: an argument, or data that isn't there
Settings parse(int argc, char** argv, int ranks, int rank);

/// Says on rank 0 how the training goes.
class Progress {
 public:
  explicit Progress(const Settings& settings);
  void step(double loss);
  void epoch(double accuracy);

 private:
  using Clock = std::chrono::steady_clock;
  const Settings& settings_;
  std::ofstream losses_;
  double sum_ = 0;
  int steps_ = 0, epochs_ = 0;
  Clock::time_point begin_ = Clock::now();
};

/// main(): runs `train`; an exception becomes a line on stderr and an exit status of 1.
int run(void (*train)(int argc, char** argv), int argc, char** argv);

}  // namespace mnist
