// zero-run -n 4 ./trainer --its --arguments: ranks as processes of this machine, without MPI (zero/launch.h).
#include <zero/launch.h>

#include <c10/util/Exception.h>

#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

namespace {

constexpr const char* kUsage =
    "usage: zero-run -n N program [arguments]\n\n"
    "Starts the program N times on this machine; its make_communicator() gives a communicator of the N ranks, over shared "
    "memory.\n"
    "OMP_NUM_THREADS is set to the cores per rank unless it is set. Ends with the status of the first process that failed.\n";

}  // namespace

int main(int argc, char** argv) {
  const std::vector<std::string> words(argv + 1, argv + argc);
  if (!words.empty() && (words[0] == "--help" || words[0] == "-h")) {
    std::fputs(kUsage, stdout);
    return 0;
  }
  if (words.size() < 3 || words[0] != "-n") {
    std::fputs(kUsage, stderr);
    return 2;
  }
  char* end = nullptr;
  const long ranks = std::strtol(words[1].c_str(), &end, 10);
  if (words[1].empty() || *end != '\0' || ranks < 1 || ranks > 256) {
    std::fprintf(stderr, "zero-run: -n %s: a number of ranks, 1 to 256\n", words[1].c_str());
    return 2;
  }
  try {
    return zero::launch(static_cast<int>(ranks), {words.begin() + 2, words.end()});
  } catch (const c10::Error& error) {
    std::fprintf(stderr, "zero-run: %s\n", error.msg().c_str());
    return 1;
  }
}
