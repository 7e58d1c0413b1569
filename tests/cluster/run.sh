#!/usr/bin/env bash
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
source "$here/names.sh"

usage() {
  cat <<'HELP'
usage: run.sh <ranks per host> <program> [arguments]

Runs an MPI program over hosts that are network namespaces of this machine: real daemons, TCP between hosts, shared memory only
inside one. Ends with the bytes that each host has sent and received over its cable, Open MPI's own start-up included. A program
that wants to leave that out reads the counters of its own host itself, in /sys/class/net/$ZERO_CLUSTER_INTERFACE/statistics.
Exits with the program's status, or with 77 and the reason where namespaces can't be made.

environment: ZERO_CLUSTER_HOSTS (2), ZERO_CLUSTER_RATE (e.g. 1gbit: shapes each link)
HELP
}

case ${1:-} in
  -h | --help) usage; exit 0 ;;
  [1-9]*) ;;
  *) usage >&2; exit 2 ;;
esac
ranks=$1
shift
hosts=${ZERO_CLUSTER_HOSTS:-2}

# One at a time: the hosts have fixed names.
exec 8>"${TMPDIR:-/tmp}/zero-cluster.$EUID.lock"
flock -w 200 8 || { echo "cluster: error: another run holds the hosts"; exit 1; }

job=
finish() {
  trap '' INT TERM
  if [[ -n $job ]]; then kill -TERM "$job" 2>/dev/null || true; fi
  "$here/down.sh" 8>&-
}
trap finish EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
"$here/up.sh" "$hosts" "${ZERO_CLUSTER_RATE:-}" 8>&- || exit

list=
declare -a sent received
counter() { cat "/sys/class/net/$(zero_cable "$1")/statistics/$2_bytes"; }
for ((i = 1; i <= hosts; ++i)); do
  list+="${list:+,}$zero_net.$i:$ranks"
  sent[i]=$(counter "$i" rx) received[i]=$(counter "$i" tx)  # this end of the cable receives what the host sends
done

export ZERO_CLUSTER_INTERFACE=eth0 OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
forward=()
while IFS= read -r name; do forward+=(-x "$name"); done < <(compgen -e | grep -E '^(ZERO_|OMP_NUM_THREADS$|ASAN_|UBSAN_|TSAN_)')
mpirun -n $((hosts * ranks)) --host "$list" --oversubscribe --bind-to none "${forward[@]}" \
  --mca plm_rsh_agent "$here/agent.sh" --mca oob_tcp_if_include "$zero_net.0/24" --mca btl_tcp_if_include "$zero_net.0/24" \
  --mca pml ob1 --mca btl self,vader,tcp "$@" </dev/null 8>&- &
job=$!
status=0
wait "$job" || status=$?
job=

for ((i = 1; i <= hosts; ++i)); do
  echo "cluster: $(zero_host "$i") sent $(($(counter "$i" rx) - sent[i])) bytes, received $(($(counter "$i" tx) - received[i]))"
done
exit "$status"
