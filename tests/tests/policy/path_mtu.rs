//! Path MTU discovery through a node port: the sender of a packet that is too long for a router
//! behind it gets the error, on either side.

use std::net::{IpAddr, SocketAddr};

use traffic_policy_testing::agent::Agent;
use traffic_policy_testing::capture::Capture;
use traffic_policy_testing::cluster::{Cluster, TARGET};
use traffic_policy_testing::lab::{Family, Lab, Pod};
use traffic_policy_testing::netns::Namespace;
use traffic_policy_testing::object::{Backend, Policy, Port, Service, lease};
use traffic_policy_testing::rows;
use traffic_policy_testing::traffic::transfer::transfer;

use crate::icmp::error_about;
use crate::route_mtus::ip;

const REMOTE: u16 = 30080;
const LOCAL: u16 = 30081;
/// More than 100 aggregates of 64 KiB in the transfers of both families: each counts once.
const BYTES: u64 = 4_000_000;

/// A cluster with a Service of policy Cluster with its endpoint on node-2, and one of policy Local
/// with its endpoint on node-1.
fn cluster(wire_offloads: bool) -> Cluster {
    let cluster = Cluster::start(Lab::builder().pods(&[1, 1]).wire_offloads(wire_offloads)).unwrap();
    for (name, policy, port, number) in
        [("remote", Policy::Cluster, REMOTE, 2), ("local", Policy::Local, LOCAL, 1)]
    {
        let backend = Backend::of(cluster.lab.node(number).pod(1));
        cluster.manifests.apply(&Cluster::node_port(name, policy, port), &[backend]).unwrap();
    }
    cluster
}

/// Sets the MTU of the route from `router` to one address to 1300 bytes.
fn narrow(router: &Namespace, family: Family, address: IpAddr, device: &str) {
    let (prefix, mtu) = if family == Family::V4 { (32, "mtu lock 1300") } else { (128, "mtu 1300") };
    ip(router, family, &format!("route add {address}/{prefix} dev {device} {mtu}"));
}

fn packets(agent: &Agent, outcome: &str) -> u64 {
    ["xdp", "tc-ingress", "tc-egress"].iter().map(|hook| agent.packets(hook, outcome).unwrap()).sum()
}

fn behind_the_node(cluster: &Cluster, agent: &Agent, attach: &str) {
    let lab = &cluster.lab;
    let remote: &Pod = lab.node(2).pod(1);
    let local: &Pod = lab.node(1).pod(1);
    for family in Family::BOTH {
        narrow(lab.node(2).netns(), family, remote.address(family), "cni0");
        narrow(lab.node(1).netns(), family, local.address(family), "cni0");
        let wanted = if family == Family::V4 { (3, 4) } else { (2, 0) };
        for port in [REMOTE, LOCAL] {
            // The path MTU to the node's address, learned through one port, would be known for the
            // other.
            ip(lab.client().netns(), family, "route flush cache");
            let to = cluster.at(1, family, port);
            let capture = Capture::start(lab.client().netns(), "eth0").unwrap();
            transfer(lab.client().netns(), to, BYTES).unwrap();
            let frames = capture.finish_valid().unwrap();
            let told = frames.iter().any(|frame| error_about(frame, to) == Some(wanted));
            assert!(told, "{attach} {to}: the client was not told");
        }
    }
    assert!(packets(agent, "replied-icmp-error") >= 2, "{attach}");
    assert!(agent.packets("tc-egress", "replied-local-icmp-error").unwrap() >= 2, "{attach}");
}

fn towards_the_client(cluster: &Cluster, agent: &Agent, attach: &str) {
    let lab = &cluster.lab;
    for family in Family::BOTH {
        narrow(lab.router(), family, lab.client().address(family), "client");
        for port in [REMOTE, LOCAL] {
            transfer(lab.client().netns(), cluster.at(1, family, port), BYTES).unwrap();
        }
    }
    assert!(packets(agent, "forwarded-icmp-error") >= 2, "{attach}");
    assert!(packets(agent, "delivered-icmp-error") >= 2, "{attach}");
}

fn on_both_sides_of_the_node(attach: &str, wire_offloads: bool) {
    let cluster = cluster(wire_offloads);
    let agents = Agent::start_first(1, &cluster.lab, |agent| agent.attach(attach)).unwrap();
    towards_the_client(&cluster, &agents[0], attach);
    // Pods that know the path MTU would announce a smaller MSS to the client.
    for (pod, family) in cluster.lab.pods().flat_map(|pod| Family::BOTH.map(|family| (pod, family))) {
        ip(pod.netns(), family, "route flush cache");
    }
    behind_the_node(&cluster, &agents[0], attach);
}

rows! {
    fn on_both_sides_of_the_node_by_tc() = on_both_sides_of_the_node("tc", false);
    fn on_both_sides_of_the_node_by_tc_with_offloads() = on_both_sides_of_the_node("tc", true);
    fn on_both_sides_of_the_node_by_xdp() = on_both_sides_of_the_node("xdp", false);
}

const VIPS: [IpAddr; 2] = [
    IpAddr::V4(std::net::Ipv4Addr::new(203, 0, 113, 9)),
    IpAddr::V6(std::net::Ipv6Addr::new(0x2001, 0xdb8, 0x5, 0, 0, 0, 0, 9)),
];

/// Three nodes, of which the first two have agents, a pod on the second, and packets to a load
/// balancer's addresses that the router sends to the first.
fn direct(attach: &str, wire_offloads: bool, flags: &[&str]) -> Cluster {
    forwarding(2, "direct", attach, wire_offloads, flags)
}

/// A variant of [`direct`] with the given `--forwarding`, and agents on the first `agents` of three
/// nodes.
fn forwarding(agents: usize, forwarding: &str, attach: &str, wire_offloads: bool, flags: &[&str]) -> Cluster {
    let mut cluster = Cluster::start(Lab::builder().pods(&[0, 1, 0]).wire_offloads(wire_offloads)).unwrap();
    let lease = |node| lease::tunnels(node, &Family::BOTH, "ipip,udp");
    let leases: Vec<_> = cluster.lab.nodes().iter().map(lease).collect();
    cluster.manifests.write("leases", &leases).unwrap();
    let service = Service::new("web").port(Port::tcp(80, TARGET).node_port(REMOTE)).vip(VIPS[0]).vip(VIPS[1]);
    cluster.manifests.apply(&service, &cluster.backends()).unwrap();
    let flags = [&["--forwarding", forwarding], flags].concat();
    cluster.launch_first(agents, |agent| agent.attach(attach).flags(&flags)).unwrap();
    for vip in VIPS {
        cluster.lab.route_vip(vip, cluster.lab.node(1)).unwrap();
    }
    cluster
}

/// Replies go to the client without the node in front, which gets the errors about them.
fn towards_the_client_of_another_node(cluster: &Cluster, attach: &str) {
    let lab = &cluster.lab;
    let [front, home] = &cluster.agents[..] else { unreachable!("two agents") };
    for (family, vip) in Family::BOTH.into_iter().zip(VIPS) {
        narrow(lab.router(), family, lab.client().address(family), "client");
        for to in [cluster.at(1, family, REMOTE), SocketAddr::new(vip, 80)] {
            // The path MTU to the client, learned through one address, is known for the other.
            ip(lab.node(2).pod(1).netns(), family, "route flush cache");
            let before = [packets(front, "forwarded-icmp-error"), packets(home, "delivered-icmp-error")];
            transfer(lab.client().netns(), to, BYTES).unwrap();
            let after = [packets(front, "forwarded-icmp-error"), packets(home, "delivered-icmp-error")];
            assert!(after[0] > before[0] && after[1] > before[1], "{attach} {to}: {before:?}, {after:?}");
        }
    }
    assert_eq!(packets(front, "replied"), 0, "{attach}: replies come by another way");
}

/// A router that spreads packets over nodes sends its errors to any of them: this one to a node
/// that has never seen the flow.
#[test]
fn towards_the_client_by_a_node_that_does_not_know_the_flow() {
    for attach in ["tc", "xdp"] {
        let cluster = forwarding(3, "direct", attach, false, &["--algorithm", "maglev"]);
        let lab = &cluster.lab;
        let stranger = &cluster.agents[2];
        for (family, vip) in Family::BOTH.into_iter().zip(VIPS) {
            narrow(lab.router(), family, lab.client().address(family), "client");
            let node = lab.node(3).address(family);
            ip(lab.router(), family, &format!("route add {vip} via {node} table 77"));
            ip(lab.router(), family, &format!("rule add iif lo to {vip} lookup 77"));
            let before = packets(stranger, "forwarded-icmp-error");
            transfer(lab.client().netns(), SocketAddr::new(vip, 80), BYTES).unwrap();
            assert!(packets(stranger, "forwarded-icmp-error") > before, "{attach} {family:?}");
        }
        assert_eq!(packets(&cluster.agents[0], "forwarded-icmp-error"), 0, "{attach}");
        assert_eq!(stranger.json(&["flows"]).unwrap().as_array().map(Vec::len), Some(0), "{attach}");
    }
}

/// Returns the router of a node's default route.
fn gateway(node: &Namespace, family: Family) -> String {
    let shown = ip(node, family, "route show default");
    let mut words = shown.split_whitespace().skip_while(|word| *word != "via").skip(1);
    words.next().unwrap_or_else(|| panic!("no gateway in {shown:?}")).to_owned()
}

/// A router between the nodes, with a smaller MTU than the devices have: it names the outer packet,
/// and the client learns how long its own may be.
fn between_the_nodes(cluster: &Cluster, attach: &str) {
    let lab = &cluster.lab;
    let pod = lab.node(2).pod(1);
    for family in Family::BOTH {
        let (node, address) = (lab.node(2).address(family), pod.address(family));
        let (prefix, mtu) = if family == Family::V4 { (32, "mtu lock 1400") } else { (128, "mtu 1400") };
        let gateway = gateway(lab.node(1).netns(), family);
        ip(lab.node(1).netns(), family, &format!("route add {address}/{prefix} via {gateway} dev eth0"));
        ip(lab.router(), family, &format!("route add {address}/{prefix} via {node} {mtu}"));
        let to = cluster.at(1, family, REMOTE);
        let capture = Capture::start(lab.client().netns(), "eth0").unwrap();
        transfer(lab.client().netns(), to, BYTES).unwrap();
        let frames = capture.finish_valid().unwrap();
        let wanted = if family == Family::V4 { (3, 4) } else { (2, 0) };
        let told = frames.iter().any(|frame| error_about(frame, to) == Some(wanted));
        assert!(told, "{attach} {to}: the client was not told");
    }
    assert!(packets(&cluster.agents[0], "replied-icmp-error") >= 2, "{attach}");
    let direct = packets(&cluster.agents[0], "forwarded-direct");
    assert!(direct > 100, "{attach}: {direct}");
}

/// The same on the way of replies through the node in front: the pod learns it.
fn on_the_way_back(attach: &str, wire_offloads: bool, dispatch: &str) {
    let cluster = forwarding(2, "tunnel", attach, wire_offloads, &["--dispatch", dispatch]);
    let lab = &cluster.lab;
    let home = &cluster.agents[1];
    for family in Family::BOTH {
        let front = lab.node(1).address(family);
        let (prefix, mtu) = if family == Family::V4 { (32, "mtu lock 1400") } else { (128, "mtu 1400") };
        let gateway = gateway(lab.node(2).netns(), family);
        ip(lab.node(2).netns(), family, &format!("route add {front}/{prefix} via {gateway} dev eth0"));
        ip(lab.router(), family, &format!("route add {front}/{prefix} dev br0 {mtu}"));
        let before = packets(home, "delivered-icmp-error");
        transfer(lab.client().netns(), cluster.at(1, family, REMOTE), BYTES).unwrap();
        assert!(packets(home, "delivered-icmp-error") > before, "{attach} {family:?}: the pod was not told");
    }
    let replied = packets(home, "replied-to-front");
    assert!(replied > 100, "{attach}: {replied}");
}

rows! {
    fn on_the_way_back_by_tc() = on_the_way_back("tc", false, "ipip");
    fn on_the_way_back_by_tc_with_offloads() = on_the_way_back("tc", true, "udp");
    fn on_the_way_back_by_xdp() = on_the_way_back("xdp", false, "ipip");
}

/// Routers on both ways of direct forwarding.
fn on_both_ways(attach: &str, wire_offloads: bool, dispatch: &str) {
    let cluster = direct(attach, wire_offloads, &["--dispatch", dispatch]);
    between_the_nodes(&cluster, attach);
    towards_the_client_of_another_node(&cluster, attach);
}

rows! {
    fn on_both_ways_by_tc() = on_both_ways("tc", false, "ipip");
    fn on_both_ways_by_tc_with_offloads() = on_both_ways("tc", true, "ipip");
    fn on_both_ways_by_xdp() = on_both_ways("xdp", false, "ipip");
    fn on_both_ways_within_udp_by_tc() = on_both_ways("tc", false, "udp");
    fn on_both_ways_within_udp_by_tc_with_offloads() = on_both_ways("tc", true, "udp");
    fn on_both_ways_within_udp_by_xdp() = on_both_ways("xdp", false, "udp");
}
