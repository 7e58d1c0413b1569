#!/usr/bin/env bash
# A model that stage 2 can't train under a memory limit trains at stage 3 under it, with the losses that stage 2 has without the limit.
#
#   run.sh MEBIBYTES PROGRAM MPIRUN...     PROGRAM takes the stage; all ranks of a job share the limit
#
# Skipped (77), with the reason, where no memory cgroup can be made.
set -euo pipefail
limit=$1 program=$2
shift 2

root=/sys/fs/cgroup
if [[ -e $root/cgroup.controllers ]]; then
  group=$root/zero-memory-cap.$$ file=memory.max unlimited=max
  echo +memory >"$root/cgroup.subtree_control" 2>/dev/null || true
else
  group=$root/memory/zero-memory-cap.$$ file=memory.limit_in_bytes unlimited=-1
fi
if ! mkdir "$group" 2>/dev/null || [[ ! -w $group/$file ]]; then
  rmdir "$group" 2>/dev/null || true
  echo "skipped: no memory cgroup can be made here"
  exit 77
fi
out=$(mktemp -d)
finish() {
  rm -rf "$out"
  for _ in 1 2 3 4 5 6 7 8 9 10; do rmdir "$group" 2>/dev/null && return; sleep 0.3; done
}
trap finish EXIT

train() {  # stage, limit in bytes
  echo "$2" >"$group/$file"
  # The subshell joins the group, and so do all that it starts.
  (echo "$BASHPID" >"$group/cgroup.procs" && exec "${@:3}" "$program" "$1") >"$out/$1" 2>"$out/errors"
}

bytes=$((limit << 20))
train 2 "$unlimited" "$@" || { echo "FAIL: stage 2 doesn't train without a limit either"; cat "$out/errors"; exit 1; }
cp "$out/2" "$out/expected"
if train 2 "$bytes" "$@"; then
  echo "FAIL: stage 2 trains within $limit MiB: the limit shows nothing"
  exit 1
fi
echo "stage 2 within $limit MiB: $(grep -v '^-*$' "$out/errors" | head -n 1 | cut -c 1-300)"
train 3 "$bytes" "$@" || { echo "FAIL: stage 3 doesn't train within $limit MiB"; cat "$out/errors"; exit 1; }
cmp "$out/3" "$out/expected" || { echo "FAIL: other losses"; cat "$out/3" "$out/expected"; exit 1; }
echo "stage 3 within $limit MiB: $(tail -n 1 "$out/3")"
