#!/usr/bin/env bash
# zero-run: ranks find each other, and a failure ends the job with its status, soon and with words.
set -uo pipefail
run=$1 worker=$2
fail() { printf 'FAILED: %s\n' "$*" >&2; exit 1; }

for n in 2 3; do
  "$run" -n "$n" "$worker" conform || fail "$n ranks: status $?"
done

start=$SECONDS
output=$("$run" -n 3 "$worker" fail 1 2>&1)
status=$?
((status == 7)) || fail "a rank that ended with 7 gave status $status: $output"
((SECONDS - start < 20)) || fail "it took $((SECONDS - start)) s to end"
grep -q 'rank 1' <<<"$output" || fail "nobody named rank 1: $output"

output=$("$run" -n 2 ./no-such-program 2>&1) && fail "a program that isn't there was started"
grep -q "can't start ./no-such-program" <<<"$output" || fail "no word about it: $output"
"$run" -n 0 true 2>/dev/null && fail "no ranks at all"
"$run" --help | grep -q 'usage: zero-run' || fail "no help"
[[ $("$run" -n 2 sh -c 'echo $OMP_NUM_THREADS' | sort -u | wc -l) == 1 ]] || fail "OMP_NUM_THREADS"
echo "zero-run: all as it should be"
