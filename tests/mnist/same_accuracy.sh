#!/usr/bin/env bash
# On several ranks the trainer with zero learns as the plain one does with the same batches: the accuracies after training differ
# by no more points than chance makes them.
#
#   same_accuracy.sh MNIST_PLAIN POINTS OPTIONS COMMAND...     OPTIONS: one word, for both; COMMAND: mpirun, mnist and its stage
set -euo pipefail
plain=$1 points=$2
read -r -a options <<<"$3"
shift 3

accuracy_of() { "$@" | tee /dev/stderr | awk '/^epoch/ { for (i = 1; i < NF; ++i) if ($i == "accuracy") last = $(i + 1) } END { print last }'; }

expected=$(accuracy_of "$plain" "${options[@]}")
got=$(accuracy_of "$@" "${options[@]}")
echo "plain $expected %, sharded $got %"
awk -v a="$expected" -v b="$got" -v points="$points" 'BEGIN { d = a - b; exit !(a > 50 && b > 50 && d <= points && d >= -points) }'
