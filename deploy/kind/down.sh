#!/usr/bin/env bash
# Removes the cluster of cluster.yaml. Programs and maps go with the nodes, whose devices and BPF file systems they are on.
set -euo pipefail

kind delete cluster --name traffic-policy
