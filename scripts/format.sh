#!/usr/bin/env bash
# Formats the C++ and CUDA files that git tracks; --check changes nothing and fails if there is something to change.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
cd "$zero_root"
case ${1:-} in
  '') mode=(-i) ;;
  --check) mode=(--dry-run -Werror) ;;
  *) echo "usage: scripts/format.sh [--check]"; [[ $1 == -h || $1 == --help ]]; exit ;;
esac
setup_checkers
git ls-files -z '*.h' '*.cpp' '*.cu' '*.cuh' | xargs -0 -r clang-format "${mode[@]}" ||
  die "badly formatted files: run scripts/format.sh"
