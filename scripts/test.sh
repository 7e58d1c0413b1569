#!/usr/bin/env bash
# Sets up, builds and runs the tests.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

usage() {
  cat <<'HELP'
usage: scripts/test.sh [--full] [--sanitize address|thread] [options of ctest]

Installs what is missing (see scripts/setup.sh --help), builds everything into build/ and runs the tests.

  --full                       the long tests too
  --sanitize address           with AddressSanitizer and UndefinedBehaviorSanitizer, in build-asan/: tests of labels unit and dist
  --sanitize thread            with ThreadSanitizer, in build-tsan/: the tests of communicators and paging (--full: unit and dist)
  anything else goes to ctest, for example: -R layout, -L mpi, -j 1, --repeat until-fail:20

environment: ZERO_WITH_CUDA=AUTO|ON|OFF, Torch_DIR, CMAKE_PREFIX_PATH, ZERO_CACHE_DIR
HELP
}

full=0 sanitize='' ctest_options=()
while (($#)); do
  case $1 in
    -h | --help) usage; exit 0 ;;
    --full) full=1 ;;
    --sanitize)
      sanitize=${2:-}
      [[ $sanitize == address || $sanitize == thread ]] || die "--sanitize takes address or thread"
      shift
      ;;
    *) ctest_options+=("$1") ;;
  esac
  shift
done

setup_packages "${zero_packages[@]}"
setup_torch

# -O1: instrumented code takes half as long to compile, and what is looked for is the same.
instrumented=(-DZERO_BUILD_EXAMPLES=OFF -DZERO_BUILD_BENCHMARKS=OFF "-DCMAKE_CXX_FLAGS_RELWITHDEBINFO=-O1 -g1 -DNDEBUG")
folder=$zero_root/build options=(-DZERO_SANITIZE= -DZERO_BUILD_TESTS=ON) target=all selection=()
case $sanitize in
  address)
    folder+=-asan target=zero_sanitizer_tests
    options=(-DZERO_SANITIZE=address,undefined "${instrumented[@]}")
    selection=(-L '^(unit|dist)$')
    # Run already, but for which buckets are mapped; test_mapped_parameters and test_paged_parameters.mapped stay.
    ((full)) || selection+=(-E '^test_(random_graphs|zoo|contract_parameters|residency)[.]mapped$')
    ;;
  thread)
    folder+=-tsan target=zero_thread_sanitizer_tests
    options=(-DZERO_SANITIZE=thread "${instrumented[@]}")
    # What is about threads; with --full every test whose ranks are threads.
    selection=(-L '^(unit|dist)$')
    if ((full)); then
      target=zero_sanitizer_tests selection+=(-E '^test_kernels')  # OpenMP's barriers aren't seen
    else
      selection+=(-R '^test_(layout|comm|nccl|staged|pager|paging|trace|residency|mapped|paged_gradients)')
    fi
    ;;
esac
((full)) || selection+=(-LE '^full$')

if [[ -n $sanitize ]]; then
  ZERO_WITH_CUDA=OFF build "$folder" "$target" "${options[@]}"
else
  build "$folder" "$target" "${options[@]}"
fi
mpi_environment
# Tests that keep two cores busy say so (PROCESSORS) and run alone on a machine with two.
ctest --test-dir "$folder" --output-on-failure --no-tests=error -j "$(nproc)" "${selection[@]}" "${ctest_options[@]}" ||
  die "tests failed: see above"
