// The folder of checkpoints: how a new one comes in (all of it, or nothing), which is the newest, and which go.
//
//   DIR/step-00000012/            a checkpoint: manifest.json and a file per rank
//   DIR/.tmp-step-00000013-…/     one that is being written, or what is left of a save that was killed
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace zero::checkpoint {

/// "DIR/step-00000012"
std::string step_folder(const std::string& directory, std::int64_t step);

/// A checkpoint that is being written, on the rank that commits it. It holds a lock on the folder, which ends with its process: by it
/// others know what is left over and what is in progress.
class NewFolder {
 public:
  /// Makes the folder, and removes what killed saves have left.
  static NewFolder make(const std::string& directory, std::int64_t step);
  NewFolder(NewFolder&& other) noexcept;
  NewFolder& operator=(NewFolder&&) = delete;
  ~NewFolder();  ///< not committed: removes it, as far as it can

  const std::string& path() const { return path_; }
  /// Everything is in it and on the disk but the manifest: writes that, and gives the folder its name. Then checkpoints beyond the
  /// newest `keep` go (0: none go). @returns the checkpoint's folder
  std::string commit(const std::string& manifest, int keep);

 private:
  NewFolder(std::string directory, std::string path, std::int64_t step, int lock)
      : directory_(std::move(directory)), path_(std::move(path)), step_(step), lock_(lock) {}
  std::string directory_, path_;
  std::int64_t step_;
  int lock_;
};

/// Folders of checkpoints that can be loaded as far as a look at the manifest and the files' sizes tells, the newest last.
std::vector<std::string> checkpoints_in(const std::string& directory);

}  // namespace zero::checkpoint
