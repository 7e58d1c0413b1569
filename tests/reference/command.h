// Runs a command for the tests of whole programs.
#pragma once

#include <sys/wait.h>

#include <array>
#include <cstdio>
#include <stdexcept>
#include <string>

struct Finished {
  int status = 0;      ///< exit status; 128 + signal if it was killed
  std::string output;  ///< both streams
};

/// For the shell: in quotes.
inline std::string quoted(const std::string& word) { return "'" + word + "'"; }

inline Finished run_command(const std::string& command) {
  Finished result;
  std::FILE* pipe = popen((command + " 2>&1").c_str(), "r");
  if (pipe == nullptr) throw std::runtime_error("can't run " + command);
  std::array<char, 4096> piece{};
  while (std::fgets(piece.data(), piece.size(), pipe) != nullptr) result.output += piece.data();
  const int status = pclose(pipe);
  result.status = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  return result;
}
