#!/usr/bin/env bash
# From a fresh machine to a language model that trains on two ranks.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

usage() {
  cat <<'HELP'
usage: scripts/quickstart.sh [options of build/examples/gpt]

Installs what is missing (see scripts/setup.sh --help), builds the library and its example into build/, and trains a byte-level
GPT with `mpirun -n 2` for about two minutes. It ends with a table of what each rank kept in memory, the bytes it sent, and some
generated text. The text it learns from is the C++ headers of LibTorch unless --text names others:

  scripts/quickstart.sh --text ~/books
  scripts/quickstart.sh --stage 1 --steps 50

environment: ZERO_RANKS (2), ZERO_WITH_CUDA, Torch_DIR, CMAKE_PREFIX_PATH, ZERO_CACHE_DIR
HELP
}

text=1
for argument in "$@"; do
  case $argument in
    -h | --help) usage; exit 0 ;;
    --text | --text=*) text=0 ;;
  esac
done

setup_packages "${zero_packages[@]}"
setup_torch
build "$zero_root/build" gpt

ranks=${ZERO_RANKS:-2}
[[ $ranks =~ ^[1-9][0-9]*$ ]] || die "ZERO_RANKS=$ranks: must be a number of ranks"
mpi_environment
threads=$(($(nproc) / ranks))
((threads >= 1)) || threads=1
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$threads}
options=(--quickstart)
((text)) && options+=(--text "$zero_torch_root/include")
say "mpirun -n $ranks build/examples/gpt ${options[*]} $*"
# Open MPI binds each rank to one core unless told otherwise, which its threads would then share.
mpirun -n "$ranks" --bind-to none "$zero_root/build/examples/gpt" "${options[@]}" "$@" || die "training failed: see above"
