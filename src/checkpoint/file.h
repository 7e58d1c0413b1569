// Files and folders of a checkpoint as the operating system has them. Every failure is a c10::Error that names the path.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace zero::checkpoint {

class File {
 public:
  /// A new file for writing and reading; there must be none of this name.
  static File create(const std::string& path);
  static File open_to_read(const std::string& path);
  /// A file that another process has made.
  static File open_to_write(const std::string& path);
  File(File&& other) noexcept;
  File& operator=(File&&) = delete;
  ~File();

  /// Room for so many bytes, so that a full disk is noticed now; the file is then so large.
  void reserve(std::int64_t bytes) const;
  void write(const void* data, std::int64_t bytes, std::int64_t at) const;
  void read(void* data, std::int64_t bytes, std::int64_t at) const;
  /// Lets the disk begin with what has been written: less is left for sync().
  void start_writing(std::int64_t at, std::int64_t bytes) const;
  /// Until everything is on the disk.
  void sync() const;
  std::int64_t size() const;
  const std::string& path() const { return path_; }

 private:
  File(std::string path, int descriptor) : path_(std::move(path)), descriptor_(descriptor) {}
  std::string path_;
  int descriptor_;
};

std::string read_whole(const std::string& path);
/// Under a temporary name, on the disk, and only then under its own.
void write_whole(const std::string& path, const std::string& text);
/// The names in a folder are on the disk.
void sync_folder(const std::string& path);
/// Bytes of a file, or -1.
std::int64_t size_of(const std::string& path);
bool is_folder(const std::string& path);
/// The names in a folder, sorted; none if there is no such folder.
std::vector<std::string> names_in(const std::string& path);
/// With all parents.
void make_folder(const std::string& path);
void remove_all(const std::string& path);
void rename(const std::string& from, const std::string& to);

}  // namespace zero::checkpoint
