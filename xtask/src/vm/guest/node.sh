# A machine becomes a node: its network, a pod or two with a server each, and the agent. Sourced with NUMBER, NODES, PODS
# (by node, "1 2 0"), ATTACH and LAB_PROGRAM set. Node n is 172.18.0.1n and fd00:172:18::1n, its pods are in 10.244.n.0/24
# and fd00:244:n::/64.
echo "node-$NUMBER" >/proc/sys/kernel/hostname
sysctl -qw net.ipv4.ip_forward=1 net.ipv6.conf.all.forwarding=1 net.ipv6.conf.all.accept_dad=0 net.ipv6.conf.eth0.accept_dad=0
ip link set eth0 up
ip address add "172.18.0.1$NUMBER/24" dev eth0
ip address add "fd00:172:18::1$NUMBER/64" dev eth0
ip route add default via 172.18.0.1
ip -6 route add default via fd00:172:18::1
for other in $(seq "$NODES"); do
    if [ "$other" != "$NUMBER" ]; then
        ip route add "10.244.$other.0/24" via "172.18.0.1$other"
        ip -6 route add "fd00:244:$other::/64" via "fd00:172:18::1$other"
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
    nsenter --net="/run/netns/$name" "$LAB_PROGRAM" serve "$name" "node-$NUMBER" --port 8080 >/run/"$name".log 2>&1 &
done

# What an API server would say.
mkdir -p /run/manifests
{
    for node in $(seq "$NODES"); do
        echo '---'
        echo "{apiVersion: v1, kind: Node, metadata: {name: node-$node}, spec: {podCIDR: 10.244.$node.0/24, podCIDRs: [10.244.$node.0/24, 'fd00:244:$node::/64']}, status: {addresses: [{type: InternalIP, address: 172.18.0.1$node}, {type: InternalIP, address: 'fd00:172:18::1$node'}], conditions: [{type: Ready, status: 'True'}]}}"
    done
    for service in cluster:Cluster:30080: local:Local:30081:32081; do
        IFS=: read -r name policy port health <<<"$service"
        if [ -n "$health" ]; then type=LoadBalancer; else type=NodePort; fi
        echo '---'
        echo "{apiVersion: v1, kind: Service, metadata: {name: $name, namespace: default}, spec: {type: $type, externalTrafficPolicy: $policy, ipFamilyPolicy: RequireDualStack, ipFamilies: [IPv4, IPv6], selector: {app: web}, ports: [{name: http, port: 80, targetPort: 8080, nodePort: $port, protocol: TCP}, {name: udp, port: 80, targetPort: 8080, nodePort: $port, protocol: UDP}]${health:+, healthCheckNodePort: $health}}}"
        for family in IPv4 IPv6; do
            echo '---'
            endpoints=
            for node in $(seq "$NODES"); do
                for pod in $(seq "$(echo "$PODS" | cut -d' ' -f"$node")"); do
                    if [ "$family" = IPv4 ]; then address="10.244.$node.$((pod + 1))"; else address="fd00:244:$node::$((pod + 1))"; fi
                    endpoints="$endpoints{addresses: ['$address'], nodeName: node-$node, conditions: {ready: true, serving: true, terminating: false}}, "
                done
            done
            echo "{apiVersion: discovery.k8s.io/v1, kind: EndpointSlice, metadata: {name: $name-${family,,}, namespace: default, labels: {kubernetes.io/service-name: $name}}, addressType: $family, ports: [{name: http, port: 8080, protocol: TCP}, {name: udp, port: 8080, protocol: UDP}], endpoints: [$endpoints]}"
        done
    done
} >/run/manifests/cluster.yaml

"$TRAFFIC_POLICY_AGENT" run --node-name "node-$NUMBER" --manifests /run/manifests --device eth0 --attach "$ATTACH" --cgroup none >/run/agent.log 2>&1 &
echo "@@ node-$NUMBER is set up: its agent loads programs"
