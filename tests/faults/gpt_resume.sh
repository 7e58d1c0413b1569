#!/usr/bin/env bash
# examples/gpt is ended at random moments, by SIGKILL of a rank or SIGTERM of the job, and resumed until it is through: its last loss is
# that of a run that nobody disturbed, to the last digit.
#
#   gpt_resume.sh LAUNCHER GPT FOLDER INTERRUPTIONS
set -uo pipefail
run=$1 gpt=$2 folder=$3 interruptions=$4
fail() { printf 'FAILED: %s\n' "$*" >&2; tail -n 20 "$folder/log" >&2; exit 1; }

rm -rf "$folder" && mkdir -p "$folder"
for i in $(seq 4000); do printf 'line %d of a text that is %d\n' "$i" $((i * i % 997)); done >"$folder/text"
steps=300
arguments=(--text "$folder/text" --model tiny --micro-batch 2 --bucket-bytes 20000 --steps "$steps" --json "$folder/json" --quiet)
last_loss() { tr -d ' \n' <"$folder/json" | sed -E 's/.*"losses":\[([^]]*)\].*/\1/; s/.*,//'; }

"$run" -n 2 "$gpt" "${arguments[@]}" --stage 1 >"$folder/log" 2>&1 || fail "the undisturbed run"
expected=$(last_loss)
[[ $expected =~ ^[0-9.]+$ ]] || fail "no loss in the measurements: $expected"
rm "$folder/json"

RANDOM=7
saved=0 done=0
for ((i = 0; i < interruptions + 20; ++i)); do
  "$run" -n 2 "$gpt" "${arguments[@]}" --stage $((RANDOM % 4)) --save "$folder/save" --save-every 3 --resume "$folder/save" \
    >"$folder/log" 2>&1 &
  job=$!
  if ((i < interruptions)); then
    sleep "$(awk -v r=$RANDOM 'BEGIN { print 1.2 + r / 32768 * 1.5 }')"
    if ((RANDOM % 3 == 0)); then
      kill -TERM "$job" 2>/dev/null
    else
      mapfile -t ranks < <(pgrep -P "$job")
      ((${#ranks[@]} == 2)) && kill -KILL "${ranks[RANDOM % 2]}" 2>/dev/null
    fi
  fi
  wait "$job"
  status=$?
  newest=$(ls "$folder/save" 2>/dev/null | grep -c '^step-')
  ((newest > 0)) && saved=1
  printf 'run %d ended with %d, %d checkpoints, the newest %s\n' "$i" "$status" "$newest" "$(ls "$folder/save" 2>/dev/null | tail -n 1)"
  if [[ -e $folder/json && -d $folder/save/step-$(printf %08d "$steps") ]]; then
    done=1
    break
  fi
  ((status == 0 || i < interruptions)) || fail "nobody disturbed run $i, and it ended with $status"
  rm -f "$folder/json"
done
((done && saved)) || fail "the run never came to its end"
[[ $(last_loss) == "$expected" ]] || fail "the last loss is $(last_loss); undisturbed it is $expected"
echo "the last loss is $expected, after $i interruptions"
