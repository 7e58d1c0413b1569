#!/usr/bin/env bash
# On one rank the trainer with zero has the losses of the plain one, step by step: the same bits at every stage, and torch::optim's
# up to rounding (its loops fuse a·b+c, those of zero don't; see docs/update.md).
#
#   same_losses.sh FOLDER MNIST_PLAIN MNIST [options of both]
set -euo pipefail
folder=$1 plain=$2 sharded=$3
shift 3

mkdir -p "$folder"
rm -f "$folder"/*
"$plain" "$@" --losses "$folder/plain"
for stage in 0 1 2 3; do
  "$sharded" "$@" --losses "$folder/stage$stage" --stage $stage
  cmp "$folder/stage0" "$folder/stage$stage" || { echo "FAIL: losses at stages 0 and $stage differ"; exit 1; }
done
paste "$folder/plain" "$folder/stage0" | awk '
  { difference = ($2 - $1) / $1; if (difference < 0) difference = -difference; if (difference > largest) largest = difference }
  NF != 2 { print "FAIL: not as many steps"; failed = 1 }
  END {
    printf "%d losses, differing by up to %.1e of the loss\n", NR, largest
    exit failed || NR < 20 || largest > 1e-5
  }'
