#!/usr/bin/env bash
# Formats the C++ and CUDA files that git tracks; --check changes nothing and fails if there is something to change.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
case ${1:-} in
  '') mode=(-i) ;;
  --check) mode=(--dry-run -Werror) ;;
  *) echo "usage: scripts/format.sh [--check]"; [[ $1 == -h || $1 == --help ]]; exit ;;
esac
command -v clang-format >/dev/null || { echo "format.sh: error: no clang-format: run scripts/setup.sh --ci" >&2; exit 1; }
git ls-files -z '*.h' '*.cpp' '*.cu' '*.cuh' | xargs -0 -r clang-format "${mode[@]}" ||
  { echo "format.sh: error: badly formatted files: run scripts/format.sh" >&2; exit 1; }
