#!/usr/bin/env bash
# Bad input: one line that names what is wrong or what helps, and an exit status that isn't 0.
#
#   errors.sh FOLDER MNIST MPIRUN...
set -euo pipefail
folder=$1 program=$2
shift 2
mkdir -p "$folder/empty"

failed=0
expect() {  # expect <text> <command>...
  local text=$1 output status=0 lines
  shift
  output=$("$@" 2>&1) || status=$?
  lines=$(grep '^mnist: ' <<<"$output" | sort -u) || true
  if ((status != 0)) && [[ $lines == *"$text"* && $lines != *$'\n'* ]]; then
    echo "ok    $lines"
  else
    printf 'FAIL  status %d, expected one line with "%s":\n%s\n' "$status" "$text" "$output"
    failed=1
  fi
}

expect dataset-fashion-mnist "$program" --data "$folder/empty"
expect --stage "$program" --stage 7
expect --no-such-option "$program" --no-such-option
expect "can't write $folder/no/such" "$program" --losses "$folder/no/such"
expect "--batch 33 can't be divided by 2 ranks" "$@" "$program" --batch 33
"$program" --help | grep -q -- --losses || { echo "FAIL  --help"; failed=1; }
exit $failed
