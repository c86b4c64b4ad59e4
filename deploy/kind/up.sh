#!/usr/bin/env bash
# Makes the cluster of cluster.yaml, and traffic-policy its Service proxy. Run again after the nodes were restarted.
set -euo pipefail
cd "$(dirname "$0")/../.."

cluster=traffic-policy
archive=target/image/traffic-policy.tar
# kind's nodes are containers of this engine.
engine=${KIND_EXPERIMENTAL_PROVIDER:-docker}

for program in kind kubectl "$engine"; do
    command -v "$program" >/dev/null || { echo "$program is missing: install it" >&2; exit 1; }
done
[ -f "$archive" ] || { echo "$archive is missing: run cargo xtask image" >&2; exit 1; }

kind get clusters | grep -qx "$cluster" || kind create cluster --config deploy/kind/cluster.yaml
kind load image-archive "$archive" --name "$cluster"
for node in $(kind get nodes --name "$cluster"); do
    # A node of kind has no BPF file system, and a pod cannot mount one for the node.
    "$engine" exec "$node" sh -c 'mountpoint -q /sys/fs/bpf || mount -t bpf bpf /sys/fs/bpf'
done
kubectl --context "kind-$cluster" apply -k deploy/overlays/kind
kubectl --context "kind-$cluster" -n kube-system rollout status daemonset/traffic-policy --timeout 3m
kubectl --context "kind-$cluster" wait nodes --all --for condition=Ready --timeout 3m
