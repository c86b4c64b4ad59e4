#!/usr/bin/env bash
# Makes the cluster of cluster.yaml, and traffic-policy its Service proxy. Run again after the nodes were restarted.
#   up.sh --xdp  by XDP in the driver of the nodes' veths: prepares their other ends, on this machine, as root
set -euo pipefail
cd "$(dirname "$0")/../.."

cluster=traffic-policy
archive=target/image/traffic-policy.tar
agent=target/image/$(uname -m)/traffic-policy-agent
# kind's nodes are containers of this engine.
engine=${KIND_EXPERIMENTAL_PROVIDER:-docker}
overlay=deploy/overlays/kind
needed=(kind kubectl "$engine")

case "$*" in
"") ;;
--xdp)
    overlay=deploy/overlays/kind-xdp
    needed+=(ip awk)
    ;;
*)
    echo "usage: $0 [--xdp]" >&2
    exit 2
    ;;
esac
for program in "${needed[@]}"; do
    command -v "$program" >/dev/null || { echo "$program is missing: install it" >&2; exit 1; }
done
[ -f "$archive" ] || { echo "$archive is missing: run cargo xtask image" >&2; exit 1; }

# The other end of a node's eth0, a port of the engine's bridge: by its number, which the node knows.
other_end() {
    local number
    number=$("$engine" exec "$1" cat /sys/class/net/eth0/iflink)
    ip -oneline link show type veth | awk -F '[:@ ]+' -v number="$number" '$1 == number { print $2 }'
}

kind get clusters | grep -qx "$cluster" || kind create cluster --config deploy/kind/cluster.yaml
kind load image-archive "$archive" --name "$cluster"
nodes=$(kind get nodes --name "$cluster")
for node in $nodes; do
    # A node of kind has no BPF file system, and a pod cannot mount one for the node.
    "$engine" exec "$node" sh -c 'mountpoint -q /sys/fs/bpf || mount -t bpf bpf /sys/fs/bpf'
done
if [ "$overlay" = deploy/overlays/kind-xdp ]; then
    devices=()
    for node in $nodes; do
        device=$(other_end "$node")
        [ -n "$device" ] || {
            echo "the other end of eth0 of $node is not on this machine (an engine without root, or in a virtual machine): run without --xdp" >&2
            exit 1
        }
        devices+=("$device")
    done
    as_root=()
    [ "$(id -u)" = 0 ] || as_root=(sudo)
    "${as_root[@]}" "$agent" veth-peer --attach "${devices[@]}"
fi
kubectl --context "kind-$cluster" apply -k "$overlay"
kubectl --context "kind-$cluster" -n kube-system rollout status daemonset/traffic-policy --timeout 3m
kubectl --context "kind-$cluster" wait nodes --all --for condition=Ready --timeout 3m
