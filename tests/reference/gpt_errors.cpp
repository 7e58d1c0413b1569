// What examples/gpt says to bad input: one line, from one rank, that names what is wrong; and an exit status that isn't 0.
//
//   gpt_errors FOLDER GPT [MPIRUN...]
#include <cstdio>
#include <exception>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include "command.h"

int main(int argc, char** argv) try {
  if (argc < 3) throw std::runtime_error("usage: gpt_errors FOLDER GPT [MPIRUN...]");
  const std::string folder = argv[1];
  std::string launcher;
  for (int i = 3; i < argc; ++i) launcher += quoted(argv[i]) + " ";
  launcher += quoted(argv[2]) + " --model tiny --steps 2 --quiet ";

  std::filesystem::remove_all(folder);
  std::filesystem::create_directories(folder + "/no_files");
  std::ofstream(folder + "/empty.txt").flush();
  std::ofstream(folder + "/short.txt") << "shorter than a window";
  std::ofstream(folder + "/long.txt") << std::string(1000, 'a');

  struct Case {
    std::string arguments, expected;
  };
  const std::vector<Case> cases = {
      {"--text " + folder + "/missing.txt", "there is no " + folder + "/missing.txt"},
      {"--text " + folder + "/empty.txt", "nothing in " + folder + "/empty.txt"},
      {"--text " + folder + "/no_files", "nothing in " + folder + "/no_files"},
      {"--text " + folder + "/short.txt", "21 bytes are fewer than the 65 of one window"},
      {"--text " + folder + "/long.txt --json " + folder + "/no/such.json", "can't write"},
      {"--text " + folder + "/long.txt --stage 7", "--stage"},
      {"--text " + folder + "/long.txt --no-such-option", "--no-such-option"},
      {"", "--text"},
  };
  int failed = 0;
  for (const auto& test : cases) {
    const Finished run = run_command(launcher + test.arguments);
    std::vector<std::string> lines;
    std::istringstream output(run.output);
    for (std::string line; std::getline(output, line);)
      if (line.rfind("gpt: ", 0) == 0) lines.push_back(line);
    const bool good = run.status != 0 && lines.size() == 1 && lines[0].find(test.expected) != std::string::npos;
    std::printf("%s  [%s] status %d: %s\n", good ? "ok  " : "FAIL", test.arguments.c_str(), run.status,
                lines.empty() ? "" : lines[0].c_str());
    if (!good) std::printf("expected one line with '%s', got:\n%s\n", test.expected.c_str(), run.output.c_str());
    failed += good ? 0 : 1;
  }
  return failed == 0 ? 0 : 1;
} catch (const std::exception& e) {
  std::fprintf(stderr, "gpt_errors: %s\n", e.what());
  return 1;
}
