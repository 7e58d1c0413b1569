#include "checkpoint/background_save.h"

#include <exception>
#include <utility>

#include "checkpoint/file.h"
#include "checkpoint/together.h"
#include "optimizer/impl.h"

namespace zero {
namespace {

constexpr auto kLook = std::chrono::milliseconds(10);
constexpr const char* kFailed = "failed: ";  // how a note begins that says so

}  // namespace

using checkpoint::attempt;

BackgroundSave::BackgroundSave(Plan plan) : plan_(std::move(plan)), thread_([this] { run(); }) {}

BackgroundSave::~BackgroundSave() {
  if (std::uncaught_exceptions() > 0) cancelled_ = true;
  if (thread_.joinable()) thread_.join();
}

std::string BackgroundSave::file(int rank) const { return plan_.folder + "/" + checkpoint::shard_name(rank, plan_.ranks); }

std::string BackgroundSave::note(int rank) const { return file(rank) + ".note"; }

void BackgroundSave::run() {
  write_problem_ = attempt([this] { write(); });
  if (!write_problem_.empty()) {  // all of this before it is said to have written: the folder may be removed after that
    (void)attempt([this] { checkpoint::remove_all(file(plan_.rank)); });  // on a full disk: room for the note
    (void)attempt([this] { checkpoint::write_whole(note(plan_.rank), kFailed + write_problem_); });
  }
  written_.set_value();
  const auto deadline = std::chrono::steady_clock::now() + plan_.timeout;
  problem_ = plan_.commit && write_problem_.empty() ? attempt([&] { commit(*plan_.commit, deadline); }) : write_problem_;
  plan_.job = {};
  ended_ = true;
  if (plan_.commit && !problem_.empty())  // a folder that somebody still writes to can't be removed
    for (int r = 0; r < plan_.ranks; ++r)
      if (r != plan_.rank) (void)await_note(r, deadline);
  plan_.commit.reset();  // removes what isn't a checkpoint
}

void BackgroundSave::write() {
  auto part = checkpoint::write_shard(plan_.folder, checkpoint::shard_name(plan_.rank, plan_.ranks), plan_.job.runs,
                                      [this] { return cancelled_.load(); });
  auto manifest = plan_.job.head;
  manifest.files = std::move(part.files), manifest.tensors = std::move(part.tensors);
  checkpoint::write_whole(note(plan_.rank), checkpoint::to_json(manifest));
}

bool BackgroundSave::await_note(int rank, Deadline deadline) const {
  while (checkpoint::size_of(note(rank)) < 0) {
    if (cancelled_ || std::chrono::steady_clock::now() > deadline) return false;
    std::this_thread::sleep_for(kLook);
  }
  return true;
}

void BackgroundSave::commit(checkpoint::NewFolder& folder, Deadline deadline) {
  std::vector<checkpoint::Manifest> parts;
  for (int r = 0; r < plan_.ranks; ++r) {
    if (!await_note(r, deadline)) {
      if (cancelled_) ZERO_FAIL("it was given up");
      ZERO_FAIL("rank ", r, " has not written its part in time");
    }
    const auto text = checkpoint::read_whole(note(r));
    if (text.compare(0, std::string(kFailed).size(), kFailed) == 0)
      ZERO_FAIL("rank ", r, ": ", text.substr(std::string(kFailed).size()));
    parts.push_back(checkpoint::from_json(text, note(r)));
  }
  const auto whole = checkpoint::merge(parts);
  checkpoint::check_complete(whole, plan_.folder);
  for (int r = 0; r < plan_.ranks; ++r) checkpoint::remove_all(note(r));
  folder.commit(checkpoint::to_json(whole), plan_.keep);
}

std::string BackgroundSave::wait(const Communicator& comm) {
  written_future_.wait();
  const auto written = checkpoint::exchange(comm, write_problem_, "", "zero::save() in the background: the ranks' files");
  if (!written.problem.empty()) cancelled_ = true;  // who couldn't write may not have been able to leave a note
  if (thread_.joinable()) thread_.join();
  const auto mine = plan_.rank == 0 ? problem_ : std::string();
  const auto committed = checkpoint::exchange(comm, "", (taken_ ? "t" : "f") + mine, "zero::save() in the background: its end");
  const auto& words = committed.values[0];
  if (words.size() == 1 || words[0] == 't') return {};
  return "zero::save() in the background: " + (written.problem.empty() ? words.substr(1) : written.problem);
}

std::string BackgroundSave::take_problem() {
  if (plan_.rank != 0 || !ended_ || taken_ || problem_.empty()) return {};
  taken_ = true;
  return "zero::save() in the background has failed: " + problem_;
}

std::string ZeroOptimizer::Impl::take_background_problem() { return saving ? saving->take_problem() : std::string(); }

}  // namespace zero
