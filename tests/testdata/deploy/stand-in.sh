#!/usr/bin/env bash
# Stands for the program by whose name it is called: records how, checks the files that it is given, and does what can be done on a lab.
# Started with
#   RECORD          the file of calls
#   STATE           a folder of its own
#   AGENT_PROGRAM   the agent
#   NODE_1, NODE_3  network namespaces of these nodes
#   NODE_1_PINS     --pin-dir of the agent of node-1
set -euo pipefail
name=$(basename "$0")
echo "$name $*" >>"$RECORD"

refuse() {
    echo "$name: $1" >&2
    exit 9
}
# The word behind $1 in the rest.
behind() {
    local wanted=$1
    shift
    while [ $# -gt 1 ]; do
        if [ "$1" = "$wanted" ]; then
            echo "$2"
            return
        fi
        shift
    done
    refuse "no $wanted"
}
file() { [ -f "$1" ] || refuse "$1 is not there"; }
# The agent's command on node-1.
on_node() {
    local code=0
    TRAFFIC_POLICY_PIN_DIR=$NODE_1_PINS nsenter --net="$NODE_1" "$AGENT_PROGRAM" "$@" || code=$?
    # It finds this machine as it is.
    if [ "$1" = check ] && [ "$code" = 1 ]; then return; fi
    return "$code"
}

case "$name $*" in
"cargo xtask image")
    mkdir -p "target/image/$(uname -m)"
    touch target/image/traffic-policy.tar
    ln -sf "$AGENT_PROGRAM" "target/image/$(uname -m)/traffic-policy-agent"
    ;;
"cargo build --release "*)
    mkdir -p target/release
    cp "$AGENT_PROGRAM" target/release/traffic-policy-agent
    cp "$(dirname "$AGENT_PROGRAM")/kubectl-traffic_policy" target/release/
    touch target/release/lab target/release/bench
    ;;
"cargo xtask vm lab -- "*) file "$5" ;;
"cargo xtask setup" | "cargo xtask vm lab") ;;
"ctr --namespace k8s.io images import "*) file "$5" ;;
"podman load --input "*) file "$3" ;;
"podman run --rm localhost/traffic-policy:"*) "$AGENT_PROGRAM" "${@:4}" ;;
"kind get clusters") if [ -e "$STATE/cluster" ]; then echo traffic-policy; fi ;;
"kind create cluster "*)
    file "$(behind --config "$@")"
    touch "$STATE/cluster"
    ;;
"kind load image-archive "*) file "$3" ;;
"kind get nodes --name traffic-policy") printf 'traffic-policy-%s\n' control-plane worker worker2 ;;
"kind delete cluster --name traffic-policy") rm "$STATE/cluster" ;;
# The client's own veth stands for the other ends of the nodes'.
"docker exec traffic-policy-"*" cat /sys/class/net/eth0/iflink") ip -oneline link show eth0 | cut -d: -f1 ;;
"docker exec traffic-policy-"*) [ -e "$STATE/cluster" ] || refuse "there is no cluster" ;;
"kubeadm init") ;;
"kubeadm kubeconfig user "*) echo "apiVersion: v1" ;;
"kubectl "*" apply -k "* | "kubectl apply -k "* | "kubectl delete -k "*) file "$(behind -k "$@")/kustomization.yaml" ;;
"kubectl "*" -- /traffic-policy-agent "*)
    words=$*
    # shellcheck disable=SC2086 # its words
    on_node ${words##*/traffic-policy-agent }
    ;;
"kubectl "*" logs "* | "kubectl "*" get pods "* | "kubectl "*" delete daemonset "* | "kubectl "*" rollout status "* | "kubectl "*" wait nodes "*) ;;
"vagrant "*)
    file "${VAGRANT_CWD:-.}/Vagrantfile"
    case "$*" in
    "up" | "destroy --force" | *"/bench established") ;;
    "halt --force node-3") nsenter --net="$NODE_3" ip link set eth0 down ;;
    "ssh node-1 -c "*)
        # shellcheck disable=SC2086 # its words
        on_node ${4##*/traffic-policy-agent }
        ;;
    *) refuse "what is $*?" ;;
    esac
    ;;
*) refuse "what is $*?" ;;
esac
