#!/usr/bin/env bash
# Removes what up.sh has made, with the processes that still run on those hosts. Does nothing if nothing is there.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/names.sh"
((EUID == 0)) && command -v ip >/dev/null || exit 0
for host in $(ip netns list 2>/dev/null | awk '$1 ~ /^zero-host[0-9]+$/ { print $1 }'); do
  for pid in $(ip netns pids "$host" 2>/dev/null); do kill -KILL "$pid" 2>/dev/null || true; done
  ip netns del "$host"
done
ip link del "$zero_bridge" 2>/dev/null || true
