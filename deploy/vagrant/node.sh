# shellcheck shell=bash
# A machine becomes a node: its network, a pod or two with a server each, and the agent. The same for Vagrant's machines and those of
# `cargo xtask vm lab`. Sourced, or run by bash, as root, with these variables:
#   NUMBER, NODES      which node it is, and of how many
#   PODS               pods by node, "1 2 0"
#   DEVICE             the card towards the other nodes and clients
#   ROUTER4, ROUTER6   where clients are; empty: on the same segment
#   ATTACH             as `run --attach`
#   LAB_PROGRAM        the program of `cargo xtask lab`, whose `serve` is what a pod runs
#   TRAFFIC_POLICY_AGENT, MANIFESTS_SCRIPT   the agent, and manifests.sh
# Node n is 172.18.0.1n and fd00:172:18::1n, its pods are in 10.244.n.0/24 and fd00:244:n::/64.
echo "node-$NUMBER" >/proc/sys/kernel/hostname
sysctl -qw net.ipv4.ip_forward=1 net.ipv6.conf.all.forwarding=1 net.ipv6.conf.all.accept_dad=0 "net.ipv6.conf.$DEVICE.accept_dad=0"
ip link set "$DEVICE" up
# Vagrant has given it the first one.
ip address replace "172.18.0.1$NUMBER/24" dev "$DEVICE"
ip address replace "fd00:172:18::1$NUMBER/64" dev "$DEVICE"
if [ -n "$ROUTER4" ]; then ip route replace default via "$ROUTER4"; fi
if [ -n "$ROUTER6" ]; then ip -6 route replace default via "$ROUTER6"; fi
for other in $(seq "$NODES"); do
    if [ "$other" != "$NUMBER" ]; then
        ip route replace "10.244.$other.0/24" via "172.18.0.1$other"
        ip -6 route replace "fd00:244:$other::/64" via "fd00:172:18::1$other"
    fi
done

ip link add cni0 type bridge
ip link set cni0 up
ip address add "10.244.$NUMBER.1/24" dev cni0
ip address add "fd00:244:$NUMBER::1/64" dev cni0 nodad
count=$(echo "$PODS" | cut -d' ' -f"$NUMBER")
for pod in $(seq "$count"); do
    name="pod-$NUMBER-$pod"
    ip netns add "$name"
    ip link add "veth$pod" type veth peer name eth0 netns "$name"
    ip link set "veth$pod" master cni0 up
    ip -n "$name" link set lo up
    ip -n "$name" link set eth0 up
    ip -n "$name" address add "10.244.$NUMBER.$((pod + 1))/24" dev eth0
    ip -n "$name" address add "fd00:244:$NUMBER::$((pod + 1))/64" dev eth0 nodad
    ip -n "$name" route add default via "10.244.$NUMBER.1"
    ip -n "$name" -6 route add default via "fd00:244:$NUMBER::1"
    setsid nsenter --net="/run/netns/$name" "$LAB_PROGRAM" serve "$name" "node-$NUMBER" --port 8080 >/run/"$name".log 2>&1 </dev/null &
done

# What an API server would say.
mkdir -p /run/manifests
NODES="$NODES" PODS="$PODS" bash "$MANIFESTS_SCRIPT" >/run/manifests/.cluster && mv /run/manifests/.cluster /run/manifests/cluster.yaml

if ! mountpoint -q /sys/fs/bpf; then mount -t bpf bpf /sys/fs/bpf; fi
setsid "$TRAFFIC_POLICY_AGENT" run --node-name "node-$NUMBER" --manifests /run/manifests --device "$DEVICE" --attach "$ATTACH" --cgroup none >/run/agent.log 2>&1 </dev/null &
echo "@@ node-$NUMBER is set up: its agent loads programs"
