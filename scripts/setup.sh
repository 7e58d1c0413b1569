#!/usr/bin/env bash
# Installs what this project needs to build, and says where LibTorch is. Called by a person, or sourced by the other scripts.
set -euo pipefail

setup_usage() {
  cat <<'HELP'
usage: scripts/setup.sh [--ci]

Installs what is missing, and nothing else:
  * Debian packages: compiler, CMake, Ninja, Open MPI, Catch2, Fashion-MNIST and the like;
  * LibTorch from PyPI, in a virtual environment in the user's cache, shared by all clones (2 GB to download, 5 GB on disk);
  * safetensors for Python into the same environment: a test reads with it what the library exports;
  * nvcc from PyPI into the same environment, where there is no CUDA toolkit;
  * with --ci: clang-format and clang-tidy from PyPI, in an environment of their own (scripts/format.sh and tidy.sh do it, too).

environment:
  Torch_DIR, CMAKE_PREFIX_PATH, ZERO_TORCH_ROOT   a LibTorch that is there already: it is used, nothing is downloaded from PyPI
  ZERO_WITH_CUDA=OFF                              do without nvcc (AUTO and ON: install it)
  ZERO_CACHE_DIR                                  instead of ${XDG_CACHE_HOME:-~/.cache}/zero
HELP
}

zero_torch_version=2.11.0
zero_nvcc_requirement='cuda-toolkit[nvcc,cudart,cccl,crt,nvvm]==13.0.2'  # the toolkit that this LibTorch was built with
zero_safetensors_requirement='safetensors==0.8.0'  # a test reads exports with it
zero_packages=(g++ cmake ninja-build git ccache openmpi-bin libopenmpi-dev catch2 libcli11-dev nlohmann-json3-dev libxxhash-dev
               python3 python3-venv iproute2 ca-certificates dataset-fashion-mnist)
# From PyPI: every version of clang-format formats differently, and clang-tidy before 22 takes three times as long, for it walks
# through LibTorch's headers.
zero_checkers=(clang-format==14.0.6 clang-tidy==22.1.8)

zero_root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
zero_cache=${ZERO_CACHE_DIR:-${XDG_CACHE_HOME:-${HOME:-/root}/.cache}/zero}
zero_torch_root=  # set by setup_torch

say() { printf '== %s\n' "$*"; }
die() { printf '%s: error: %s\n' "$(basename "$0")" "$*" >&2; exit 1; }

# --- Debian packages ------------------------------------------------------------------------------------------------------------

setup_packages() {
  if ! command -v dpkg-query >/dev/null; then
    local tool
    for tool in g++ cmake ninja mpirun python3; do
      command -v "$tool" >/dev/null || die "not a Debian system and no $tool: install it and run this again"
    done
    return 0
  fi
  local missing=() package
  for package in "$@"; do
    [[ $(dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null) == installed ]] || missing+=("$package")
  done
  ((${#missing[@]})) || return 0

  local as_root=()
  if ((EUID != 0)); then
    command -v sudo >/dev/null || die "missing packages and not root: as root, run: apt-get install ${missing[*]}"
    as_root=(sudo)
  fi
  say "installing Debian packages: ${missing[*]}"
  local log apt=(env DEBIAN_FRONTEND=noninteractive apt-get -y -q -o DPkg::Lock::Timeout=300)
  log=$(mktemp)
  if ! { "${as_root[@]}" "${apt[@]}" update && "${as_root[@]}" "${apt[@]}" install --no-install-recommends "${missing[@]}"; } \
      >"$log" 2>&1 </dev/null; then
    tail -n 15 "$log" >&2
    die "apt-get could not install ${missing[*]} (its output is in $log)"
  fi
  rm -f "$log"
}

# --- LibTorch and nvcc from PyPI ------------------------------------------------------------------------------------------------

# Prints the LibTorch root that a path stands for, as cmake/ZeroFindTorch.cmake understands it; fails if it is none.
torch_root_of() {
  local candidate
  [[ -n $1 ]] || return 1
  for candidate in "$1" "$1/../.." "$1/../../.." "$1/torch" "$1"/lib/python3*/site-packages/torch; do
    if [[ -e $candidate/lib/libtorch_cpu.so && -e $candidate/include/ATen/ATen.h ]]; then
      (cd "$candidate" && pwd)
      return 0
    fi
  done
  return 1
}

# Sets zero_torch_root to a LibTorch that the user has named in the environment; fails if none is named.
find_users_torch() {
  local name entry entries
  for name in ZERO_TORCH_ROOT Torch_DIR; do
    [[ -n ${!name:-} ]] || continue
    zero_torch_root=$(torch_root_of "${!name}") || die "no LibTorch at $name=${!name}: correct it, or unset it to download one"
    return 0
  done
  IFS=':;' read -r -a entries <<<"${CMAKE_PREFIX_PATH:-}"
  for entry in "${entries[@]}"; do
    if zero_torch_root=$(torch_root_of "$entry"); then return 0; fi
  done
  zero_torch_root=
  return 1
}

# A Python that this LibTorch has wheels for. Debian's own comes first: it doesn't vanish with somebody's environment.
find_python() {
  local python
  for python in /usr/bin/python3 python3; do
    if "$python" -c 'import sys, venv, ensurepip; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 14))' 2>/dev/null; then
      printf '%s\n' "$python"
      return 0
    fi
  done
  die "no python3 between 3.10 and 3.14 with the modules venv and ensurepip: install one, or set Torch_DIR"
}

zero_pip_pid=
zero_download_dir=
stop_download() {
  if [[ -n $zero_pip_pid ]]; then kill "$zero_pip_pid" 2>/dev/null || true; fi
  if [[ -n $zero_download_dir ]]; then rm -rf "$zero_download_dir"; fi
}

# pip_install <venv> <requirement>...   pip shows no progress of a long download unless at a terminal: show it ourselves.
pip_install() {
  local venv=$1 log=$1/pip.log start=$SECONDS shown=0 mib rc=0
  shift
  zero_download_dir=$(mktemp -d "$zero_cache/download.XXXXXX")
  # No cache of pip's own: the environment is the cache, and the wheels would be kept twice.
  TMPDIR=$zero_download_dir "$venv/bin/python" -I -m pip install --no-cache-dir --disable-pip-version-check --no-input \
    --progress-bar off "$@" >"$log" 2>&1 </dev/null 9>&- &
  zero_pip_pid=$!
  trap stop_download EXIT
  while kill -0 "$zero_pip_pid" 2>/dev/null; do
    sleep 1
    if ((SECONDS - start >= shown + 10)); then
      shown=$((SECONDS - start))
      mib=$(du -sm "$zero_download_dir" "$venv" 2>/dev/null | awk '{ sum += $1 } END { print sum + 0 }') || mib='?'
      printf '   %4d s, %5s MiB on disk\n' "$shown" "$mib"
    fi
  done
  wait "$zero_pip_pid" || rc=$?
  zero_pip_pid=
  rm -rf "$zero_download_dir"
  zero_download_dir=
  trap - EXIT
  if ((rc)); then
    tail -n 8 "$log" >&2
    die "pip could not install $* (its output is in $log)"
  fi
}

has_torch() {  # the version wanted, finished? Asks pip's records: importing torch can take minutes the first time.
  local venv=$1
  [[ -x $venv/bin/python ]] && torch_root_of "$venv" >/dev/null &&
    "$venv/bin/python" -I -c "import sys, importlib.metadata as m; sys.exit(m.version('torch') != '$zero_torch_version')" 2>/dev/null &&
    "$venv/bin/python" -I -m pip check >/dev/null 2>&1
}

download_torch() {
  local venv=$1 python=$2 free
  mkdir -p "$zero_cache"
  exec 9>"$zero_cache/lock"
  if ! flock -n 9; then
    say "another set-up is downloading into $zero_cache: waiting for it"
    flock 9
  fi
  if [[ ! -e $venv/.complete ]]; then
    if ! has_torch "$venv"; then
      rm -rf "$venv" "$zero_cache"/download.*
      free=$(df -Pm "$zero_cache" | awk 'NR == 2 { print $4 }')
      ((free >= 8000)) || die "$zero_cache has $free MiB free and LibTorch needs 8000: free some, or set ZERO_CACHE_DIR"
      say "downloading LibTorch $zero_torch_version into $venv (2 GB, some minutes; once for all clones)"
      "$python" -m venv "$venv" || die "$python could not make a virtual environment in $venv"
      pip_install "$venv" "torch==$zero_torch_version"
      has_torch "$venv" || die "LibTorch is not complete in $venv after installing it: see $venv/pip.log"
    fi
    touch "$venv/.complete"
  fi
  exec 9>&-
}

has_cuda_toolkit() {
  [[ -n ${CUDACXX:-} || -n ${ZERO_CUDA_ROOT:-} || -x ${CUDA_HOME:-/usr/local/cuda}/bin/nvcc || -x /usr/local/cuda/bin/nvcc ]] ||
    command -v nvcc >/dev/null
}

# add_to_venv <venv> <mark> <requirement>...   once, which the file <mark> in it says; one set-up at a time.
add_to_venv() {
  local venv=$1 mark=$1/$2
  shift 2
  exec 9>"$zero_cache/lock"
  flock 9
  if [[ ! -e $mark ]]; then
    pip_install "$venv" "$@"
    touch "$mark"
  fi
  exec 9>&-
}

setup_torch() {
  if find_users_torch; then
    say "LibTorch: $zero_torch_root (yours)"
    return 0
  fi
  local python venv
  python=$(find_python)
  venv=$zero_cache/torch-$zero_torch_version-py$("$python" -c 'import sys; print("%d%d" % sys.version_info[:2])')
  [[ -e $venv/.complete ]] || download_torch "$venv" "$python"
  if [[ ${ZERO_WITH_CUDA:-AUTO} != OFF && ! -e $venv/.complete-nvcc ]] && ! has_cuda_toolkit; then
    say "no CUDA toolkit here: installing nvcc from PyPI into $venv"
    add_to_venv "$venv" .complete-nvcc "$zero_nvcc_requirement"
  fi
  [[ -e $venv/.complete-safetensors ]] || add_to_venv "$venv" .complete-safetensors "$zero_safetensors_requirement"
  zero_torch_root=$(torch_root_of "$venv") || die "no LibTorch in $venv: remove that folder and run this again"
  say "LibTorch: $zero_torch_root"
}

# Puts clang-format and clang-tidy in front of PATH.
setup_checkers() {
  local python venv
  venv=$zero_cache/$(IFS=-; printf '%s' "${zero_checkers[*]//==/-}")
  if [[ ! -e $venv/.complete ]]; then
    python=$(find_python)
    mkdir -p "$zero_cache"
    say "installing ${zero_checkers[*]} from PyPI into $venv"
    [[ -x $venv/bin/python ]] || "$python" -m venv "$venv" || die "$python could not make a virtual environment in $venv"
    add_to_venv "$venv" .complete "${zero_checkers[@]}"
  fi
  PATH=$venv/bin:$PATH
}

# --- building, for the scripts that source this -----------------------------------------------------------------------------------

# A file that includes LibTorch takes up to 1.5 GB to compile: not more of them at a time than fit.
build_jobs() {
  local cores memory
  cores=$(nproc)
  memory=$(awk '/^MemAvailable/ { print int($2 / 1048576 / 1.5) }' /proc/meminfo)
  ((memory >= 1)) || memory=1
  echo $((cores < memory ? cores : memory))
}

# build <folder> <target> [CMake options]   configures and builds; quick where nothing has changed.
build() {
  local folder=$1 target=$2 log
  shift 2
  say "building $target in ${folder#"$zero_root"/}/"
  mkdir -p "$folder"
  log=$folder/configure.log
  if ! cmake -S "$zero_root" -B "$folder" -G Ninja -DZERO_TORCH_ROOT="$zero_torch_root" -DZERO_WITH_CUDA="${ZERO_WITH_CUDA:-AUTO}" "$@" >"$log" 2>&1; then
    grep -A 12 'CMake Error' "$log" >&2 || tail -n 15 "$log" >&2
    die "CMake could not configure (its output is in $log)"
  fi
  sed -n '/^-- zero /,/^--   CUDA/ s/^-- //p' "$log"
  NINJA_STATUS='[%f/%t, %es] ' cmake --build "$folder" --target "$target" -j "$(build_jobs)" || die "the build failed: see above"
}

# What mpirun needs from its environment for a job of a few ranks on this machine, whoever runs it.
mpi_environment() {
  export OMPI_MCA_rmaps_base_oversubscribe=1
  if ((EUID == 0)); then
    export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
  fi
}

if [[ ${BASH_SOURCE[0]} == "$0" ]]; then
  checkers=0
  case ${1:-} in
    '') ;;
    --ci) checkers=1 ;;
    -h | --help) setup_usage; exit 0 ;;
    *) die "unknown option $1 (see --help)" ;;
  esac
  setup_packages "${zero_packages[@]}"
  setup_torch
  if ((checkers)); then setup_checkers; fi
fi
