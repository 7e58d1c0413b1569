#include "run.h"

#include <ATen/Parallel.h>
#include <c10/util/Exception.h>

#include <CLI/CLI.hpp>

#include <cstdio>
#include <filesystem>
#include <iostream>
#include <stdexcept>

namespace mnist {
namespace {

/// First line of an exception's message, without the C++ stack that LibTorch adds.
std::string one_line(const std::exception& e) {
  const auto* error = dynamic_cast<const c10::Error*>(&e);
  const std::string message = error != nullptr ? error->what_without_backtrace() : e.what();
  return message.substr(0, message.find('\n'));
}

void check_data(const std::string& folder) {
  for (const char* name :
       {"train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"})
    if (!std::filesystem::exists(folder + "/" + name))
      throw std::runtime_error("there is no " + std::string(name) + " in " + folder +
                               ": install Debian's dataset-fashion-mnist (scripts/setup.sh does), configure and build again, "
                               "or name a folder with MNIST's four unpacked files by --data");
}

}  // namespace

Settings parse(int argc, char** argv, int ranks, int rank) {
  Settings s;
  s.data = MNIST_DATA;
  s.ranks = ranks;
  s.rank = rank;
  int threads = 1;
  CLI::App app{"Trains a small convolutional network on Fashion-MNIST. mnist_plain: in one process; mnist: on mpirun's ranks."};
  app.add_option("--data", s.data, "Folder with MNIST's four unpacked files")->capture_default_str();
  app.add_option("--epochs", s.epochs, "Passes over the images")->check(CLI::PositiveNumber)->capture_default_str();
  app.add_option("--batch", s.batch, "Images per step, over all ranks")->check(CLI::PositiveNumber)->capture_default_str();
  app.add_option("--lr", s.lr, "Learning rate of the first epoch")->check(CLI::NonNegativeNumber)->capture_default_str();
  app.add_option("--limit", s.limit, "Train on the first N images")->check(CLI::Range(1, 60000))->capture_default_str();
  app.add_option("--seed", s.seed, "Initial weights and order of the images")->capture_default_str();
  app.add_option("--stage", s.stage,
                 "mnist only: 0: everything on every rank; 1: optimizer state sharded; 2: gradients too; 3: all")
      ->check(CLI::Range(0, 3))
      ->capture_default_str();
  app.add_option("--threads", threads, "Threads of each process")->check(CLI::PositiveNumber)->capture_default_str();
  app.add_option("--losses", s.losses, "Write the loss of every step to this file (rank 0, of its images)");
  try {
    app.parse(argc, argv);
  } catch (const CLI::CallForHelp&) {
    if (rank == 0) std::cout << app.help();
    s.help = true;
    return s;
  } catch (const CLI::ParseError& e) {
    throw std::runtime_error(std::string(e.what()) + " (--help lists the options)");
  }
  if (s.batch % ranks != 0)
    throw std::runtime_error("--batch " + std::to_string(s.batch) + " can't be divided by " + std::to_string(ranks) +
                             " ranks: choose a multiple of it");
  s.local_batch = s.batch / ranks;
  check_data(s.data);
  at::set_num_threads(threads);
  return s;
}

Progress::Progress(const Settings& settings) : settings_(settings) {
  if (settings_.rank != 0) return;
  if (!settings_.losses.empty()) {
    losses_.open(settings_.losses);
    if (!losses_) throw std::runtime_error("--losses: can't write " + settings_.losses);
    losses_.precision(9);  // all of a float
  }
  std::printf("%lld images, batches of %lld", static_cast<long long>(settings_.limit), static_cast<long long>(settings_.batch));
  if (settings_.ranks > 1)
    std::printf(" on %d ranks; losses are of rank 0's %lld", settings_.ranks, static_cast<long long>(settings_.local_batch));
  std::printf("\n");
  std::fflush(stdout);
}

void Progress::step(double loss) {
  sum_ += loss;
  ++steps_;
  if (losses_.is_open()) losses_ << loss << '\n';
}

void Progress::epoch(double accuracy) {
  ++epochs_;
  if (settings_.rank == 0) {
    const double seconds = std::chrono::duration<double>(Clock::now() - begin_).count();
    std::printf("epoch %d/%d  train loss %.4f  test accuracy %.2f %%  %.1f s\n", epochs_, settings_.epochs, sum_ / steps_,
                100 * accuracy, seconds);
    std::fflush(stdout);
    losses_.flush();
  }
  sum_ = 0;
  steps_ = 0;
}

int run(void (*train)(int argc, char** argv), int argc, char** argv) {
  try {
    train(argc, argv);
    return 0;
  } catch (const std::exception& e) {
    std::fprintf(stderr, "%s: %s\n", std::filesystem::path(argv[0]).filename().c_str(), one_line(e).c_str());
    return 1;
  }
}

}  // namespace mnist
