# shellcheck shell=bash
# The cluster's objects as YAML on standard output: Nodes, and a Service of either policy. Run with NODES and PODS ("1 2 0", by
# node) set. Node n is 172.18.0.1n and fd00:172:18::1n, its pods are in 10.244.n.0/24 and fd00:244:n::/64.
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
                endpoints="$endpoints{addresses: ['$address'], nodeName: node-$node, conditions: {ready: true, serving: true, terminating: false}, targetRef: {kind: Pod, name: pod-$node-$pod}}, "
            done
        done
        echo "{apiVersion: discovery.k8s.io/v1, kind: EndpointSlice, metadata: {name: $name-${family,,}, namespace: default, labels: {kubernetes.io/service-name: $name}}, addressType: $family, ports: [{name: http, port: 8080, protocol: TCP}, {name: udp, port: 8080, protocol: UDP}], endpoints: [$endpoints]}"
    done
done
