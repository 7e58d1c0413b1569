#!/usr/bin/env bash
# examples/gpt under mpirun, one of its ranks killed (SIGKILL) at random moments of its training. mpirun is told to leave the others alone:
# each of them has to end by itself, in time, with words of this library that name the dead rank. Then the job goes on from the newest
# checkpoint; its last loss is that of a run that nobody disturbed, to the last digit.
#
#   train_kills.sh GPT FOLDER KILLS MPIRUN...
set -uo pipefail
gpt=$1 folder=$2 kills=$3
shift 3
mpirun=("$@")
ranks=3 steps=200
export ZERO_TIMEOUT_SECONDS=10
in_time=25  # the library's timeout, and what a loaded machine takes to end three processes

fail() {
  printf 'FAILED: %s\n' "$*" >&2
  tail -n 5 "$folder"/rank-*.out >&2
  [[ -n ${job:-} ]] && kill -KILL "$job" 2>/dev/null
  for file in "$folder"/rank-*.pid; do [[ -e $file ]] && kill -KILL "$(<"$file")" 2>/dev/null; done
  exit 1
}

rm -rf "$folder" && mkdir -p "$folder"
for i in $(seq 4000); do printf 'line %d of a text that is %d\n' "$i" $((i * i % 997)); done >"$folder/text"
arguments=(--text "$folder/text" --model tiny --micro-batch 2 --bucket-bytes 20000 --steps "$steps" --json "$folder/json" --quiet)
last_loss() { [[ -e $folder/json ]] && tr -d ' \n' <"$folder/json" | sed -E 's/.*"losses":\[([^]]*)\].*/\1/; s/.*,//'; }

is_trained() { [[ -d $folder/save/step-$(printf %08d "$steps") ]]; }

# What each rank says, its process and its status.
cat >"$folder/rank.sh" <<'RANK'
base=$1/rank-$OMPI_COMM_WORLD_RANK
shift
"$@" >"$base.out" 2>&1 &
echo $! >"$base.new" && mv "$base.new" "$base.pid"
wait $!
echo $? >"$base.new" && mv "$base.new" "$base.status"
RANK

"${mpirun[@]}" -n "$ranks" "$gpt" "${arguments[@]}" --stage 1 >"$folder/log" 2>&1 || fail "the undisturbed run: $(tail -n 3 "$folder/log")"
expected=$(last_loss)
[[ $expected =~ ^[0-9.]+$ ]] || fail "no loss in the measurements: $expected"
rm "$folder/json"

# Ranks that have ended, one after the other.
wait_for_statuses() {
  local until=$((SECONDS + in_time)) rank
  for rank in "$@"; do
    while [[ ! -e $folder/rank-$rank.status ]]; do
      ((SECONDS < until)) || fail "rank $rank still runs $in_time s after rank $victim was killed"
      sleep 0.1
    done
  done
}

RANDOM=${SEED:-11}
done_kills=0 finished=0 late=0
for ((i = 0; i < 3 * kills + 20; ++i)); do
  rm -f "$folder"/rank-*.{pid,status,out}
  "${mpirun[@]}" --enable-recovery -n "$ranks" bash "$folder/rank.sh" "$folder" "$gpt" "${arguments[@]}" --stage $((done_kills % 4)) \
    --save "$folder/save" --save-every 3 --keep 3 --resume "$folder/save" >"$folder/log" 2>&1 &
  job=$! victim=$((RANDOM % ranks)) disturbed=
  others=() && for ((r = 0; r < ranks; ++r)); do ((r == victim)) || others+=("$r"); done
  if ((done_kills < kills)); then
    sleep "$(awk -v r=$RANDOM 'BEGIN { print 1.5 + r / 32768 * 1.5 }')"
    disturbed=1
    [[ -e $folder/rank-$victim.pid ]] && kill -KILL "$(<"$folder/rank-$victim.pid")" 2>/dev/null
    wait_for_statuses "$victim"
    if [[ $(<"$folder/rank-$victim.status") == 137 ]]; then
      wait_for_statuses "${others[@]}"
      through=0
      for r in "${others[@]}"; do
        status=$(<"$folder/rank-$r.status")
        if ((status == 0)) && is_trained; then  # all was done when the victim died: nobody missed it
          through=$((through + 1))
          continue
        fi
        ((status != 0)) || fail "rank $victim was killed, and rank $r ended with 0"
        ((status < 128)) || fail "rank $r was ended by signal $((status - 128)) and not by itself"
        grep -q "rank $victim has died" "$folder/rank-$r.out" || fail "rank $r doesn't say that rank $victim has died"
      done
      if ((through > 0)); then
        late=$((late + 1))
      else
        done_kills=$((done_kills + 1))
        printf 'kill %d: rank %d; %s; %s\n' "$done_kills" "$victim" "$(ls "$folder/save" 2>/dev/null | tail -n 1)" \
          "$(grep -h "rank $victim" "$folder/rank-${others[0]}.out" | tail -n 1 | cut -c 1-150)"
      fi
    else
      late=$((late + 1))
    fi
  fi
  wait "$job"
  job=
  if is_trained; then
    if [[ $(last_loss) =~ ^[0-9.]+$ ]]; then
      [[ $(last_loss) == "$expected" ]] || fail "the last loss is $(last_loss); undisturbed it is $expected"
      finished=$((finished + 1))
      ((done_kills < kills)) || break
    elif [[ -z $disturbed ]]; then  # else rank 0 may have been killed between its last save and its measurements
      fail "nobody disturbed run $i, and it left no measurements: $(tail -n 3 "$folder/log")"
    fi
    rm -rf "$folder/save" "$folder/json"  # through before enough kills: once more from the start
  elif ((done_kills >= kills && i > 3 * kills)); then
    fail "nobody disturbed run $i, and it didn't come to its end: $(tail -n 3 "$folder/log")"
  fi
  rm -f "$folder/json"
done
((done_kills == kills)) || fail "only $done_kills of $kills kills met a run that was under way"
((finished > 0)) || fail "no run came to its end"
echo "$done_kills ranks killed ($late kills came too late); $finished runs to the end, last loss $expected as undisturbed"
