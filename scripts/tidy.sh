#!/usr/bin/env bash
# clang-tidy on the library's sources, with the compile commands of build/ (made by scripts/test.sh or scripts/quickstart.sh).
#
# A file takes some seconds, nearly all of them for LibTorch's headers. One that was clean is looked at again only when something
# has changed: its text, a header (of anybody's), its compile command, the checks or clang-tidy.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
cd "$zero_root"
case ${1:-} in
  -h | --help)
    echo "usage: scripts/tidy.sh [--all] [files]   (default: the library's sources that git tracks; --all: also those known to be clean)"
    exit 0
    ;;
esac
all=0
if [[ ${1:-} == --all ]]; then all=1; shift; fi
setup_checkers
[[ -e build/compile_commands.json ]] || die "no build/compile_commands.json: run scripts/test.sh first"

if (($#)); then
  files=("$@")
else
  # Not kernels/: clang doesn't find gcc's omp.h, which they need.
  mapfile -t files < <(git ls-files 'src/*.cpp')
fi
# Only what this configuration compiles.
known=()
for file in "${files[@]}"; do
  if grep -qF "/$file\"" build/compile_commands.json; then known+=("$file"); fi
done
((${#known[@]})) || die "nothing to check"

export clean=$zero_cache/tidy all
mkdir -p "$clean"
find "$clean" -type f -mtime +60 -delete
rules=$({ clang-tidy --version; cat .clang-tidy; } | sha256sum)
export rules

# What clang-tidy's answer for a file hangs on, as one hash. Without the paths: another clone has the same.
state_of() {
  local command object headers
  command=$(grep -F "/$1\"," build/compile_commands.json)
  object=$(sed -n 's/.* -o \([^ ]*\) -c .*/\1/p' <<<"$command")
  headers=$(cd build && ninja -t deps "$object" | sed -n 's/^    //p' | tr '\n' '\0' | xargs -0 sha256sum 2>/dev/null | cut -d' ' -f1 | sort)
  [[ -n $object && -n $headers ]] || return 1  # not built: nothing is known
  printf '%s\n' "$rules" "${command//"$PWD"/}" "$headers" | sha256sum | cut -d' ' -f1
}

check() {
  local state=''
  state=$(state_of "$1") || state=''
  if ((all == 0)) && [[ -n $state && -e $clean/$state ]]; then
    touch "$clean/$state"
    return
  fi
  echo "$1"
  clang-tidy --quiet -p build "$1" 2> >(grep -vE "warnings? generated|Suppressed|^Use -header-filter" >&2) || return 1
  [[ -z $state ]] || touch "$clean/$state"
}
export -f state_of check

echo "clang-tidy: ${#known[@]} files; those that are looked at:"
printf '%s\0' "${known[@]}" | xargs -0 -n 1 -P "$(nproc)" bash -c 'set -o pipefail; check "$1"' tidy ||
  die "clang-tidy has complaints: see above"
