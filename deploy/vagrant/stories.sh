#!/usr/bin/env bash
# The three stories on the three nodes of the Vagrantfile, or of `cargo xtask vm lab -- deploy/vagrant/stories.sh`: asked as a client
# of the nodes. Ends with 1 where a node did something else than is told. At its end node-3 is switched off.
#   POWER_OFF             a command that switches node-3 off without a word; default: vagrant halt --force node-3
#   TRAFFIC_POLICY_AGENT  the agent, beside which kubectl-traffic_policy is; default: where build.sh leaves them. Without it that part
#                         is left out, and said
set -euo pipefail

cd "$(dirname "$0")"
POWER_OFF=${POWER_OFF:-vagrant halt --force node-3}
PLUGIN=$(dirname "${TRAFFIC_POLICY_AGENT:-../../target/vagrant/traffic-policy-agent}")/kubectl-traffic_policy
# Seconds. Emulated nodes take a tenth for an answer.
TIMEOUT=${TIMEOUT:-2}
nodes="172.18.0.11 172.18.0.12 172.18.0.13"
work=$(mktemp -d)
jobs=()
# shellcheck disable=SC2317 # called by the trap
finish() {
    for job in "${jobs[@]}"; do kill "$job" 2>/dev/null || true; done
    rm -rf "$work"
}
trap finish EXIT
wrong=0
not_as_told() {
    echo "   NOT AS TOLD: $1" >&2
    wrong=1
}

# The name of the pod that answers, nothing if nobody does.
ask() { curl -s -m "$TIMEOUT" "http://$1/" | sed -n 's/.*"pod":"\([^"]*\)".*/\1/p' || true; }
status() { curl -s -o /dev/null -m "$TIMEOUT" -w '%{http_code}' "http://$1" || true; }

echo "1. A load balancer that times out, while curl localhost works"
echo "   Policy Local: node-3 has no pod. A balancer that asks the node port waits; one that asks the health port is told 503."
for node in $nodes; do
    began=$(date +%s%N)
    pod=$(ask "$node:30081")
    took=$((($(date +%s%N) - began) / 1000000))
    health=$(status "$node:32081/")
    echo "   $node  node port 30081: ${pod:-silence, ${took} ms}   health port 32081: $health"
    if [ "$node" = 172.18.0.13 ]; then
        [ -z "$pod" ] || not_as_told "node-3 answered under policy Local"
        [ "$health" = 503 ] || not_as_told "the health port of node-3 says $health"
    else
        [ -n "$pod" ] || not_as_told "$node did not answer"
        [ "$health" = 200 ] || not_as_told "the health port of $node says $health"
    fi
done

echo
echo "2. Some pods get much more than others"
echo "   60 requests for each policy, spread evenly over the nodes that a balancer believes in: three under Cluster, two under Local."
count() {
    local port=$1
    shift
    for _ in $(seq $((60 / $#))); do
        for node in "$@"; do ask "$node:$port"; done
    done | sort | uniq -c | awk '{printf "   %s %s", $2, $1}'
}
# shellcheck disable=SC2086 # three words
by_cluster=$(count 30080 $nodes)
by_local=$(count 30081 172.18.0.11 172.18.0.12)
echo "   Cluster: $by_cluster"
echo "   Local:   $by_local"
[[ "$by_local" == *"pod-1-1 30"* ]] || not_as_told "the only pod of node-1 got another number than half of the requests"
[[ "$by_cluster" == *pod-1-1*pod-2-1*pod-2-2* ]] || not_as_told "policy Cluster did not spread over all pods"
if [ -x "$PLUGIN" ]; then
    mkdir "$work/manifests"
    NODES=3 PODS="1 2 0" bash manifests.sh >"$work/manifests/cluster.yaml"
    echo "   The same from the objects alone, before any request:"
    "$PLUGIN" lb local --manifests "$work/manifests" --balancer haproxy | sed 's/^/   | /'
else
    echo "   (no \`lb\` of the same: there is no $PLUGIN)"
fi

echo
echo "3. A node is preempted"
echo "   A balancer for each policy asks every second and gives a node up after two failures; node-3 is switched off after 5 s."
# Asks health ports: $1 is where, by node. A node is believed in while its file is there.
prober() {
    local health=$1 node code failures
    declare -A failures
    while true; do
        for node in $nodes; do
            code=$(curl -s -o /dev/null -m 1 -w '%{http_code}' "http://$node:$health" || true)
            if [ "$code" = 200 ]; then
                failures[$node]=0
                touch "$work/${health%%/*}-$node"
            else
                failures[$node]=$((${failures[$node]:-0} + 1))
                if [ "${failures[$node]}" -ge 2 ]; then rm -f "$work/${health%%/*}-$node"; fi
            fi
        done
        sleep 1
    done
}
# Sends to the nodes that are believed in, in turn, until the end is told.
sender() {
    local health=$1 port=$2 node
    while [ ! -e "$work/end" ]; do
        for node in $nodes; do
            if [ -e "$work/${health%%/*}-$node" ]; then
                if [ -n "$(ask "$node:$port")" ]; then echo ok; else echo "lost at $node"; fi
            fi
        done
    done >"$work/sent-$port"
}
prober 10256/healthz &
jobs+=($!)
prober 32081/ &
jobs+=($!)
# Both know all nodes before the first request.
sleep 4
sender 10256/healthz 30080 &
cluster_sender=$!
sender 32081/ 30081 &
local_sender=$!
jobs+=("$cluster_sender" "$local_sender")
sleep 5
$POWER_OFF
sleep 12
touch "$work/end"
wait "$cluster_sender" "$local_sender"
lost() { grep -c lost "$work/sent-$1" || true; }
for policy in Cluster:30080 Local:30081; do
    port=${policy##*:}
    echo "   ${policy%%:*}: $(wc -l <"$work/sent-$port") requests, $(lost "$port") lost"
done
[ "$(lost 30080)" -gt 0 ] || not_as_told "nothing was lost under policy Cluster"
[ "$(lost 30081)" -eq 0 ] || not_as_told "requests were lost under policy Local"
exit "$wrong"
