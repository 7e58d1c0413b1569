#!/usr/bin/env bash
# clang-tidy on the library's sources, with the compile commands of build/ (made by scripts/test.sh or scripts/quickstart.sh).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

die() { echo "tidy.sh: error: $*" >&2; exit 1; }
case ${1:-} in
  -h | --help) echo "usage: scripts/tidy.sh [files]   (default: the library's sources that git tracks)"; exit 0 ;;
esac
command -v clang-tidy >/dev/null || die "no clang-tidy: run scripts/setup.sh --ci"
[[ -e build/compile_commands.json ]] || die "no build/compile_commands.json: run scripts/test.sh first"

if (($#)); then
  files=("$@")
else
  # Not kernels/: clang 14 knows neither its processor tests nor where gcc keeps omp.h.
  mapfile -t files < <(git ls-files 'src/*.cpp')
fi
# Only what this configuration compiles.
known=()
for file in "${files[@]}"; do
  if grep -qF "/$file\"" build/compile_commands.json; then known+=("$file"); fi
done
((${#known[@]})) || die "nothing to check"
echo "clang-tidy: ${#known[@]} files"
printf '%s\0' "${known[@]}" | xargs -0 -n 1 -P "$(nproc)" \
  bash -c 'clang-tidy --quiet -p build "$1" 2> >(grep -vE "warnings? generated|Suppressed|^Use -header-filter" >&2)' tidy ||
  die "clang-tidy has complaints: see above"
