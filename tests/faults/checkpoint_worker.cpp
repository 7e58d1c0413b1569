// One rank of a job that saves after every step, or that looks at what such jobs have left. Run by test_checkpoint_kills under zero-run.
//
//   checkpoint_worker save DIR STAGE WHERE   goes on from the newest checkpoint and saves until somebody ends it. WHERE: a folder in
//                                            which rank R leaves its process number as the file R
//   checkpoint_worker check DIR STAGE        loads every checkpoint of DIR, compares it with what its step has to be, and
//                                            prints "newest N of M", N its step
//
// Every element of every parameter is the number of the step, and so is the state; so a checkpoint tells by itself whether it is
// whole.
#include <torch/optim/sgd.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "zero/checkpoint.h"
#include "zero/zero.h"

namespace {

constexpr std::int64_t kElements = 300000;

struct Trainer {
  std::vector<at::Tensor> params;
  zero::ZeroOptimizer opt;
  Trainer(const zero::Communicator& comm, int stage)
      : params{at::zeros({kElements}).requires_grad_(true), at::zeros({17, 3}).requires_grad_(true)},
        // Learning rate 1 and gradient −1 add one to each element; with a momentum of 0 there would be no state.
        opt(zero::wrap<torch::optim::SGD>(params, torch::optim::SGDOptions(1.0).momentum(1e-30),
                                          zero::Options(comm).stage(static_cast<zero::Stage>(stage)).names({"a", "b"}))) {}
  void step() {
    opt.zero_grad();
    for (auto& p : params) (-p.sum()).backward();
    opt.step();
  }
  bool is_at(std::int64_t step) const {
    bool good = true;
    for (const auto& p : params) good = (p.detach() == static_cast<double>(step)).all().item<bool>() && good;
    return good;
  }
};

int run_saves(const zero::Communicator& comm, const std::string& directory, int stage, const std::string& where) {
  Trainer it(comm, stage);
  if (const auto rank_0 = comm.rank() == 0 ? zero::latest(directory).has_value() : false;
      comm.exchange(rank_0 ? "1" : "0", "is there a checkpoint")[0] == "1")
    zero::load(directory, {}, it.opt);
  std::ofstream(where + "/" + std::to_string(comm.rank())) << getpid() << std::endl;
  for (;;) {
    it.step();
    const bool background = it.opt.last_step().number % 2 == 0;
    zero::save(directory, {}, it.opt, {}, zero::SaveOptions().keep(3).async(background));
  }
}

int check(const zero::Communicator& comm, const std::string& directory, int stage) {
  std::vector<std::string> folders;
  for (const auto& entry : std::filesystem::directory_iterator(directory))
    if (const auto name = entry.path().filename().string(); name.rfind("step-", 0) == 0) folders.push_back(entry.path());
  std::sort(folders.begin(), folders.end());
  Trainer it(comm, stage);
  std::int64_t newest = -1;
  for (const auto& folder : folders) {
    newest = zero::load(folder, {}, it.opt).step;
    if (it.is_at(newest)) continue;
    std::printf("%s is not what step %ld has to be\n", folder.c_str(), static_cast<long>(newest));
    return 4;
  }
  if (!folders.empty() && zero::latest(directory) != folders.back()) return 5;
  it.step();
  if (!it.is_at(newest < 0 ? 1 : newest + 1)) return 6;
  if (comm.rank() == 0) std::printf("newest %ld of %zu\n", static_cast<long>(newest), folders.size());
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 4) {
    std::fprintf(stderr, "usage: checkpoint_worker save|check DIR STAGE [WHERE]\n");
    return 2;
  }
  const std::string what = argv[1];
  try {
    const auto comm = zero::make_communicator();
    return what == "check" ? check(comm, argv[2], std::atoi(argv[3])) : run_saves(comm, argv[2], std::atoi(argv[3]), argv[4]);
  } catch (const c10::Error& error) {
    std::printf("%s\n", error.what_without_backtrace());
    return 3;
  }
}
