#!/usr/bin/env bash
# Stands in for ssh: Open MPI calls it with an address and a command. Runs the command on that host, under the host's own name,
# by which Open MPI tells nodes apart.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/names.sh"
host=$(zero_host "${1##*.}")
shift
exec ip netns exec "$host" unshare --uts sh -c "hostname $host; $*"
