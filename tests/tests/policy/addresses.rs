//! Addresses of a Service: load balancer addresses, external IPs, node ports on some of the node's
//! addresses; and the target ports of its pods.

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use traffic_policy_testing::agent::Agent;
use traffic_policy_testing::cluster::{Cluster, Protocol, TARGET};
use traffic_policy_testing::lab::{Family, Lab};
use traffic_policy_testing::object::{Backend, Policy, Port, Service};
use traffic_policy_testing::traffic::server::Identity;
use traffic_policy_testing::traffic::{Faults, Outcome, Server};

const SOON: Duration = Duration::from_secs(20);

fn ip(text: &str) -> IpAddr {
    text.parse().unwrap()
}

/// A Service with a load balancer's and an external address of each family, on port 80.
fn announced(name: &str, policy: Policy, number: u8) -> (Service, [IpAddr; 4]) {
    let addresses = [
        ip(&format!("203.0.113.{number}")),
        ip(&format!("2001:db8:f::{number}")),
        ip(&format!("203.0.113.{}", 100 + number)),
        ip(&format!("2001:db8:f::e:{number}")),
    ];
    let [vip4, vip6, external4, external6] = addresses;
    let service = Service::new(name)
        .policy(policy)
        .port(Port::tcp(80, TARGET))
        .port(Port::udp(80, TARGET))
        .vip(vip4)
        .vip(vip6)
        .external_ip(external4)
        .external_ip(external6);
    (service, addresses)
}

fn announced_addresses(attach: &str) {
    let cluster = Cluster::start(Lab::builder().pods(&[1, 1, 0])).unwrap();
    let (lab, client) = (&cluster.lab, cluster.lab.client());
    let (spread, spread_addresses) = announced("spread", Policy::Cluster, 1);
    let (kept, kept_addresses) = announced("kept", Policy::Local, 2);
    cluster.manifests.apply(&spread, &cluster.backends()).unwrap();
    cluster.manifests.apply(&kept, &cluster.backends()).unwrap();
    let _agents = Agent::start_all(lab, |agent| agent.attach(attach)).unwrap();
    for node in lab.nodes() {
        for address in spread_addresses.into_iter().chain(kept_addresses) {
            lab.route_vip(address, node).unwrap();
        }
        for protocol in Protocol::BOTH {
            for address in spread_addresses {
                let to = SocketAddr::new(address, 80);
                let what = format!("{attach} {protocol:?} {to} by {}", node.name);
                for answer in cluster.ask_until_all(protocol, to, &["pod-1-1", "pod-2-1"]).unwrap() {
                    let family = if address.is_ipv4() { Family::V4 } else { Family::V6 };
                    let here = answer.node == node.name;
                    let source = if here { client.address(family) } else { node.address(family) };
                    assert_eq!(answer.client.ip(), source, "{what}");
                }
            }
            for address in kept_addresses {
                let to = SocketAddr::new(address, 80);
                let what = format!("{attach} {protocol:?} {to} by {}", node.name);
                let outcome = cluster.ask(protocol, to).unwrap();
                if node.pods.is_empty() {
                    assert_eq!(outcome, Outcome::Silent, "{what}");
                    continue;
                }
                let answer = outcome.answer().unwrap();
                let family = if address.is_ipv4() { Family::V4 } else { Family::V6 };
                assert_eq!((answer.node.as_str(), answer.client.ip()), (&*node.name, client.address(family)));
            }
        }
    }
}

#[test]
fn load_balancer_and_external_addresses_by_tc() {
    announced_addresses("tc");
}

#[test]
fn load_balancer_and_external_addresses_by_xdp() {
    announced_addresses("xdp");
}

#[test]
fn only_the_service_port_of_an_announced_address_is_ours() {
    let cluster = Cluster::start(Lab::builder().pods(&[1])).unwrap();
    let (service, addresses) = announced("web", Policy::Cluster, 1);
    cluster
        .manifests
        .apply(&service.port(Port::tcp(81, TARGET).node_port(30081)), &cluster.backends())
        .unwrap();
    let _agents = Agent::start_all(&cluster.lab, |agent| agent.attach("xdp")).unwrap();
    let node = cluster.lab.node(1);
    // The address is bound on the node, as many load balancers for bare metal do: other ports of it
    // are the node's own.
    node.netns().netlink(async |net| net.address("lo", addresses[0], 32).await).unwrap();
    cluster.lab.route_vip(addresses[0], node).unwrap();
    let host = Identity { pod: "host".to_owned(), node: node.name.clone() };
    let _server = Server::start_in(node.netns(), 9000, host, Faults::default(), &cluster.ledger).unwrap();
    let answer = |port| cluster.answer(Protocol::Tcp, SocketAddr::new(addresses[0], port)).unwrap().pod;
    assert_eq!([answer(80), answer(81), answer(9000)], ["pod-1-1", "pod-1-1", "host"]);
    let outcome = cluster.ask(Protocol::Tcp, SocketAddr::new(addresses[0], 82)).unwrap();
    assert!(outcome.is_refused_at_once(), "{outcome:?}");
}

/// The ports of one Service lead to different ports of its pods; a named target port has different
/// numbers in different pods, of which each slice has its own.
#[test]
fn target_ports_differ_within_a_pod_and_between_pods() {
    let cluster = Cluster::start(Lab::builder().pods(&[1, 1])).unwrap();
    let lab = &cluster.lab;
    let other = |number: usize| {
        let pod = lab.node(number).pod(1);
        let who = Identity { pod: format!("{} admin", pod.name), node: pod.node.clone() };
        Server::start_in(pod.netns(), 9090, who, Faults::default(), &cluster.ledger).unwrap()
    };
    let _servers = [other(1), other(2)];
    let service = Service::new("web")
        .port(Port::tcp(80, TARGET).named("web").node_port(30080))
        .port(Port::tcp(81, 9090).named("admin").node_port(30081))
        // The same number is another port with the other protocol.
        .port(Port::udp(81, TARGET).named("web-udp").node_port(30081));
    cluster.manifests.apply(&service, &cluster.backends()).unwrap();
    different_ports_of_pods(&cluster, 30082);
    let _agents = Agent::start_first(1, lab, |agent| agent.attach("tc")).unwrap();
    for family in Family::BOTH {
        let all = |protocol, port, pods: &[&str]| {
            cluster.ask_until_all(protocol, cluster.at(1, family, port), pods).unwrap();
        };
        all(Protocol::Tcp, 30080, &["pod-1-1", "pod-2-1"]);
        all(Protocol::Tcp, 30081, &["pod-1-1 admin", "pod-2-1 admin"]);
        all(Protocol::Udp, 30081, &["pod-1-1", "pod-2-1"]);
        all(Protocol::Tcp, 30082, &["pod-1-1", "pod-2-1 admin"]);
    }
}

/// Applies a Service whose named target port is another number in the second node's pod than in
/// the first one's.
fn different_ports_of_pods(cluster: &Cluster, node_port: u16) {
    let port = |target| Port::tcp(80, target).named("web").node_port(node_port);
    let old = Service::new("rolling").port(port(TARGET));
    let new = Service::new("rolling").port(port(9090));
    cluster.manifests.apply(&old, &[Backend::of(cluster.lab.node(1).pod(1))]).unwrap();
    let mut slices = new.slices(&[Backend::of(cluster.lab.node(2).pod(1))]);
    for slice in &mut slices {
        let name = format!("{}-new", slice["metadata"]["name"].as_str().unwrap());
        slice["metadata"]["name"] = name.into();
    }
    cluster.manifests.write("endpoints-new", &slices).unwrap();
}

#[test]
fn node_ports_are_on_the_chosen_addresses_only() {
    // In addition to that of the Node object, eth0 has another address of each family.
    let more = [(ip("172.18.0.99"), 24), (ip("fd00:172:18::99"), 64)];
    for (chosen, main4, more4, main6, more6) in [
        ("all", true, true, true, true),
        ("primary", true, false, true, false),
        ("primary,172.18.0.99/32", true, true, true, false),
        ("localhost", false, false, false, false),
        ("172.18.0.99/32", false, true, true, true),
        ("172.18.0.11/32,fd00:172:18::11/128", true, false, true, false),
    ] {
        let cluster = Cluster::start(Lab::builder().pods(&[1])).unwrap();
        let node = cluster.lab.node(1);
        let web = Cluster::node_port("web", Policy::Cluster, 30080);
        cluster.manifests.apply(&web, &cluster.backends()).unwrap();
        for (address, prefix) in more {
            node.netns().netlink(async |net| net.address("eth0", address, prefix).await).unwrap();
        }
        let _agents =
            Agent::start_all(&cluster.lab, |agent| agent.flags(&["--node-port-addresses", chosen])).unwrap();
        let main = Family::BOTH.map(|family| node.address(family));
        for (address, served) in [(main[0], main4), (more[0].0, more4), (main[1], main6), (more[1].0, more6)]
        {
            let outcome = cluster.ask(Protocol::Tcp, SocketAddr::new(address, 30080)).unwrap();
            let answered = matches!(outcome, Outcome::Answered(_));
            assert_eq!(answered, served, "{chosen}: {address} {outcome:?}");
            assert!(answered || outcome.is_refused_at_once(), "{chosen}: {address} {outcome:?}");
        }
    }
}

/// Node ports are on no address until the Node object names those of the node, as with kube-proxy.
#[test]
fn node_ports_wait_for_an_address_of_the_node() {
    let cluster = Cluster::start(Lab::builder().pods(&[1])).unwrap();
    let node = cluster.lab.node(1);
    let web = Cluster::node_port("web", Policy::Cluster, 30080);
    cluster.manifests.apply(&web, &cluster.backends()).unwrap();
    let with = |addresses: serde_json::Value| {
        let metadata = serde_json::json!({"name": node.name});
        let status = serde_json::json!({"addresses": addresses});
        let object =
            serde_json::json!({"apiVersion": "v1", "kind": "Node", "metadata": metadata, "status": status});
        cluster.manifests.write("nodes", &[object]).unwrap();
    };
    with(serde_json::json!([]));
    let agent = Agent::builder(&cluster.lab, node).start().unwrap();
    agent.wait_ready(SOON).unwrap();
    agent.wait_said(&["has no address in status.addresses", "node ports wait"], SOON).unwrap();
    let to = Family::BOTH.map(|family| SocketAddr::new(node.address(family), 30080));
    for to in to {
        let outcome = cluster.ask(Protocol::Tcp, to).unwrap();
        assert!(outcome.is_refused_at_once(), "{to}: {outcome:?}");
    }
    let answered = |outcome: &Outcome| matches!(outcome, Outcome::Answered(_));
    with(serde_json::json!(to.map(|to| serde_json::json!({"type": "InternalIP", "address": to.ip()}))));
    for to in to {
        cluster.wait_for(Protocol::Tcp, to, SOON, answered).unwrap();
    }
    // The Node of another machine: a wrong --node-name.
    with(serde_json::json!([{"type": "InternalIP", "address": "192.0.2.77"}]));
    agent.wait_said(&["No device of this node has an address", "192.0.2.77", "--node-name"], SOON).unwrap();
    cluster.wait_for(Protocol::Tcp, to[0], SOON, |outcome| !answered(outcome)).unwrap();
}
