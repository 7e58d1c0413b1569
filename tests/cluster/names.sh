# What the scripts in this folder call things. Only objects with these names are ever made or removed.
# Host i is the namespace zero-host<i> with eth0 at 10.77.0.<i>; zero-v<i> is the other end of its cable, on the bridge zero-br.
zero_bridge=zero-br
zero_net=10.77.0
zero_host() { echo "zero-host$1"; }
zero_cable() { echo "zero-v$1"; }
