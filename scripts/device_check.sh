#!/usr/bin/env bash
# Builds for the GPU of this machine and runs everything that needs one: tests of the label `gpu`, the update's bandwidth, the GPT.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

usage() {
  cat <<'HELP'
usage: scripts/device_check.sh [--dry-run] [--pack] [--out DIR]

For a machine with a GPU, nvcc, CMake, Ninja and a Python that has torch, and no network. Takes under 8 minutes and leaves results.json,
table.txt and the logs in DIR (default: build-device/results).

  --dry-run   without a GPU: builds for sm_90 and does everything else up to the first use of a device
  --pack      before, on a machine with network: collects the header-only libraries that tests and examples need (CLI11, nlohmann/json,
              Catch2) into device-deps/, to be taken along
  --out DIR   where the results go

environment: PYTHON (default python3, or the newest LibTorch that scripts/setup.sh has installed), CUDACXX
HELP
}

dry_run=0 pack=0 out=
while (($#)); do
  case $1 in
    -h | --help) usage; exit 0 ;;
    --dry-run) dry_run=1 ;;
    --pack) pack=1 ;;
    --out) out=${2:?--out needs a folder}; shift ;;
    *) printf 'device_check.sh: error: %s: see --help\n' "$1" >&2; exit 2 ;;
  esac
  shift
done
root=$PWD
say() { printf '== %s\n' "$*"; }
die() { printf 'device_check.sh: error: %s\n' "$*" >&2; exit 1; }

if ((pack)); then
  rm -rf device-deps
  for package in libcli11-dev nlohmann-json3-dev libxxhash-dev catch2; do
    dpkg-query -L "$package" >/dev/null 2>&1 || die "$package is not installed: run scripts/setup.sh first"
    dpkg-query -L "$package" | while read -r file; do
      if [[ -f $file && $file =~ ^/usr/(include|lib|share/(cmake|pkgconfig|nlohmann_json|CLI11|Catch2)) ]]; then
        mkdir -p "device-deps/$(dirname "${file#/usr/}")" && cp "$file" "device-deps/${file#/usr/}"
      fi
    done
  done
  du -sh device-deps
  exit 0
fi

# --- what is there --------------------------------------------------------------------------------------------------------------

torch_of() { "$1" -c 'import torch, os; print(os.path.dirname(torch.__file__))' 2>/dev/null; }
torch=
for python in ${PYTHON:+"$PYTHON"} python3 "${XDG_CACHE_HOME:-$HOME/.cache}"/zero/torch-*/bin/python; do
  torch=$(torch_of "$python") && [[ -n $torch ]] && break
done
[[ -n $torch ]] || die "no Python with torch: set PYTHON, or run scripts/setup.sh"
nvcc=${CUDACXX:-$(command -v nvcc || ls /usr/local/cuda/bin/nvcc "$torch"/../nvidia/cu*/bin/nvcc 2>/dev/null | head -n 1)}
[[ -n $nvcc ]] || die "no nvcc: set CUDACXX"
for tool in cmake ninja; do command -v "$tool" >/dev/null || die "no $tool"; done

if ((dry_run)); then
  card='none (dry run)' architecture=90
else
  command -v nvidia-smi >/dev/null || die "no nvidia-smi: is there a GPU? Without one: --dry-run"
  card=$(nvidia-smi --query-gpu=name --format=csv,noheader | head -n 1)
  architecture=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader | head -n 1 | tr -d '. ')
  [[ -n $card && -n $architecture ]] || die "nvidia-smi names no GPU. Without one: --dry-run"
fi
build=$root/build-device
out=${out:-$build/results}
mkdir -p "$out"
say "GPU: $card, sm_$architecture; LibTorch: $torch; nvcc: $nvcc"

# --- phases ---------------------------------------------------------------------------------------------------------------------

names=() results=() seconds=()
phase() {  # limit in seconds, name, command; a status of 77 means that there is no device
  local limit=$1 name=$2 start=$SECONDS status result
  shift 2
  say "$name: $*"
  timeout -k 10 "$limit" "$@" >"$out/$name.log" 2>&1 </dev/null
  status=$?
  case $status in
    0) result=$passed ;;
    77) result='skipped: no device' ;;
    124 | 137) result="failed (not done after $limit s)" ;;
    *) result="failed ($status)" ;;
  esac
  # CTest calls a run in which everything was skipped a success.
  if ((status == 0)) && grep -q '(Skipped)' "$out/$name.log"; then result='skipped: no device'; fi
  names+=("$name") results+=("$result") seconds+=($((SECONDS - start)))
  say "$name: $result, $((SECONDS - start)) s"
  [[ $result != failed* ]] || tail -n 15 "$out/$name.log"
  return "$status"
}

report() {
  {
    printf 'GPU %s, sm_%s\n\n' "$card" "$architecture"
    for i in "${!names[@]}"; do printf '%-20s %-24s %5d s\n' "${names[$i]}" "${results[$i]}" "${seconds[$i]}"; done
    for log in "$out"/update.log "$out"/gpt_*.log; do
      [[ -s $log ]] && printf '\n%s\n%s\n' "$(basename "$log" .log)" "$(tail -n 25 "$log")"
    done
  } >"$out/table.txt"
  for i in "${!names[@]}"; do printf '%s\t%s\t%s\n' "${names[$i]}" "${results[$i]}" "${seconds[$i]}"; done |
    "$python" scripts/device_results.py --gpu "$card" --architecture "$architecture" --dry-run "$dry_run" "$out" || return 1
  cat "$out/table.txt"
  say "results: $out"
}

rm -f "$out"/*.log "$out"/*.json "$out"/table.txt  # of a run before
dependencies=()
[[ -d device-deps ]] && dependencies=("-DCMAKE_PREFIX_PATH=$root/device-deps")
passed=passed
phase 120 configure cmake -S . -B "$build" -G Ninja "-DZERO_TORCH_ROOT=$torch" "-DCMAKE_CUDA_COMPILER=$nvcc" -DZERO_WITH_CUDA=ON \
  "-DZERO_CUDA_ARCHITECTURES=$architecture" "${dependencies[@]}" || { report; exit 1; }
phase 1200 build cmake --build "$build" --target zero_device || { report; exit 1; }

phase 120 tests ctest --test-dir "$build" -L '^gpu$' --output-on-failure --no-tests=error
phase 120 update "$build/benchmarks/bench_update_cuda" --json "$out/update.json"

text=$root/docs
gpt=$build/examples/gpt
nccl=(--device cuda) staged=(--device cuda-staged)
((dry_run)) && nccl=() staged=() passed='passed, on the CPU'
for stage in 0 1 2 3; do
  phase 90 "gpt_nccl_stage$stage" "$gpt" "${nccl[@]}" --text "$text" --model small --stage "$stage" --steps 10 --json "$out/gpt_nccl_stage$stage.json"
done
for stage in 0 1 2 3; do
  phase 90 "gpt_staged_stage$stage" "$build/tools/zero-run" -n 4 "$gpt" "${staged[@]}" --text "$text" --model small --stage "$stage" --steps 5 \
    --json "$out/gpt_staged_stage$stage.json"
done
report || exit 1
for result in "${results[@]}"; do [[ $result != failed* ]] || exit 1; done
