// Reads /proc/meminfo and the memory cgroups (version 1 and 2), see room.h.
#include "comm/room.h"

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <limits>
#include <sstream>

#include "core/check.h"

namespace zero {
namespace {

constexpr std::int64_t kUnlimited = std::numeric_limits<std::int64_t>::max();

std::int64_t number_in(const std::string& path, std::int64_t otherwise) {
  std::ifstream file(path);
  std::int64_t value = 0;
  return file >> value ? value : otherwise;  // "max" is no number
}

// The value after `key` in a file of "key value" lines.
std::int64_t entry_in(const std::string& path, const std::string& key, std::int64_t otherwise) {
  std::ifstream file(path);
  std::string line;
  while (std::getline(file, line)) {
    std::istringstream words(line);
    std::string word;
    std::int64_t value = 0;
    if (words >> word && word == key && words >> value) return value;
  }
  return otherwise;
}

struct CgroupFiles {
  const char* mount;
  const char* limit;
  const char* usage;
  const char* reclaimable;  // in memory.stat: page cache that the kernel gives back before it kills
};
constexpr CgroupFiles kVersion1{"/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes",
                                "total_inactive_file"};
constexpr CgroupFiles kVersion2{"/sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"};

// A limit may be set at any level. In a container the path in /proc/self/cgroup may be the host's: then only the mount is there.
std::int64_t room_in_cgroup(const CgroupFiles& files, std::string path) {
  std::int64_t room = kUnlimited;
  while (true) {
    const std::string folder = std::string(files.mount) + path + '/';
    const auto limit = number_in(folder + files.limit, kUnlimited);
    if (limit < kUnlimited / 2) {
      const auto cache = entry_in(folder + "memory.stat", files.reclaimable, 0);
      room = std::min(room, std::max<std::int64_t>(0, limit - number_in(folder + files.usage, 0) + cache));
    }
    if (path.empty()) return room;
    path.erase(path.rfind('/'));
  }
}

std::int64_t room_in_cgroups() {
  std::int64_t room = kUnlimited;
  std::ifstream file("/proc/self/cgroup");
  std::string line;
  while (std::getline(file, line)) {  // "4:memory:/path" or "0::/path"
    const auto first = line.find(':');
    const auto second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const auto controllers = ',' + line.substr(first + 1, second - first - 1) + ',';
    auto path = line.substr(second + 1);
    if (path.empty() || path[0] != '/') continue;
    if (path == "/") path.clear();
    if (controllers == ",,") room = std::min(room, room_in_cgroup(kVersion2, path));
    if (controllers.find(",memory,") != std::string::npos) room = std::min(room, room_in_cgroup(kVersion1, path));
  }
  return room;
}

}  // namespace

Room available_room(std::int64_t held) {
  const auto kibibytes = entry_in("/proc/meminfo", "MemAvailable:", kUnlimited / 1024);
  Room room{kibibytes * 1024, "the memory of this machine"};
  const auto in_cgroups = room_in_cgroups();
  if (in_cgroups < room.bytes) room = {in_cgroups, "the memory cgroup"};
  if (const char* value = std::getenv("ZERO_SHM_LIMIT_BYTES"); value != nullptr && *value != '\0') {
    char* end = nullptr;
    const auto limit = std::strtoll(value, &end, 10);
    ZERO_CHECK(*end == '\0' && limit >= 0, "ZERO_SHM_LIMIT_BYTES=", value, ": must be a number of bytes");
    if (limit - held < room.bytes) room = {std::max<std::int64_t>(0, limit - held), "ZERO_SHM_LIMIT_BYTES"};
  }
  return room;
}

std::string readable_bytes(std::int64_t bytes) {
  std::ostringstream out;
  out.precision(4);
  if (bytes < 1024) {
    out << bytes << " bytes";
  } else if (bytes < (1 << 20)) {
    out << static_cast<double>(bytes) / 1024 << " KiB";
  } else if (bytes < (std::int64_t{1} << 30)) {
    out << static_cast<double>(bytes) / (1 << 20) << " MiB";
  } else {
    out << static_cast<double>(bytes) / (1 << 30) << " GiB";
  }
  return out.str();
}

}  // namespace zero
