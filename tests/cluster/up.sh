#!/usr/bin/env bash
# usage: up.sh [hosts] [rate]   Makes the hosts (2), each link shaped to `rate` (as tc writes it, e.g. 1gbit) if one is given.
# What is there from an earlier time is removed first. Needs root and iproute2; exits with 77 where namespaces can't be made.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
source "$here/names.sh"
hosts=${1:-2} rate=${2:-}

skip() { echo "cluster: skipped: $*"; exit 77; }
((EUID == 0)) || skip "network namespaces need root"
command -v ip >/dev/null || skip "no ip command (Debian package iproute2)"

"$here/down.sh"
trap '"$here/down.sh"' ERR
error=$(ip netns add "$(zero_host 1)" 2>&1) || skip "can't make a network namespace: $error"
error=$(ip link add "$zero_bridge" type bridge 2>&1) || { "$here/down.sh"; skip "can't make a bridge: $error"; }
ip addr add "$zero_net.254/24" dev "$zero_bridge"
ip link set "$zero_bridge" up
for ((i = 1; i <= hosts; ++i)); do
  host=$(zero_host "$i") cable=$(zero_cable "$i")
  ((i == 1)) || ip netns add "$host"
  ip link add "$cable" type veth peer name eth0 netns "$host"
  ip link set "$cable" master "$zero_bridge" up
  ip -n "$host" addr add "$zero_net.$i/24" dev eth0
  ip -n "$host" link set eth0 up
  ip -n "$host" link set lo up
  if [[ -n $rate ]]; then ip netns exec "$host" tc qdisc add dev eth0 root tbf rate "$rate" burst 256kb latency 50ms; fi
done
