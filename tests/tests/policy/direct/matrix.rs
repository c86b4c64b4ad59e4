//! The client's address, as pods see it, in every combination of IP family, protocol, hook of the
//! node in front, dispatch and layout of the network plugin; SNAT is the control of each.
//!
//! One cluster for each layout has all of its combinations: its nodes differ in hook and in what
//! they prefer to open, and each is in front once.

use std::collections::BTreeSet;
use std::io::Write;
use std::net::IpAddr;
use std::time::Duration;

use traffic_policy_testing::agent::Agent;
use traffic_policy_testing::capture::Capture;
use traffic_policy_testing::cluster::{Cluster, Protocol};
use traffic_policy_testing::lab::{Cni, Family, Lab};
use traffic_policy_testing::object::{Policy, lease};

use super::udp::UDP;
use super::{IP6IP6, IPIP, header};

/// The protocol number of TCP.
const TCP: u8 = 6;
const DIRECT: u16 = 30090;
const SNAT: u16 = 30091;
/// The hook of each node, and the dispatch that it prefers to open. The other two nodes differ in
/// dispatch or have the same hook as the third, so that each hook sends both kinds.
const NODES: [(&str, &str); 3] = [("tc", "ipip,udp"), ("xdp", "udp,ipip"), ("xdp", "ipip,udp")];
const PODS: [&str; 3] = ["pod-1-1", "pod-2-1", "pod-3-1"];

/// Hook, dispatch, family and protocol of what a pod of another node has seen.
type Cell = (&'static str, &'static str, &'static str, &'static str);

/// `None`: a veth for each pod, and routes between the nodes.
fn start(cni: Option<Cni>) -> Cluster {
    let lab = Lab::builder().pods(&[1, 1, 1]).wire_offloads(false);
    let mut cluster = Cluster::start(match cni {
        Some(cni) => lab.cni(cni),
        None => lab,
    })
    .unwrap();
    let leases: Vec<_> = (cluster.lab.nodes().iter().zip(NODES))
        .map(|(node, (_, prefers))| {
            // Outer packets have the address that leads to the pods as source.
            let mut lease = lease::opens_dispatch(node, &Family::BOTH, prefers);
            let from: BTreeSet<_> = Family::BOTH
                .into_iter()
                .flat_map(|family| [node.address(family), cluster.lab.source_towards_pods(node, family)])
                .map(|address| address.to_string())
                .collect();
            let from: Vec<_> = from.into_iter().collect();
            lease["metadata"]["annotations"]["traffic-policy.io/opens-from"] = from.join(",").into();
            lease
        })
        .collect();
    cluster.manifests.write("leases", &leases).unwrap();
    for (name, port) in [("direct", DIRECT), ("snat", SNAT)] {
        let service = Cluster::node_port(name, Policy::Cluster, port);
        let service = service.annotation("traffic-policy.io/forwarding", name);
        cluster.manifests.apply(&service, &cluster.backends()).unwrap();
    }
    let has_tunnels = cni.is_some_and(Cni::has_tunnels);
    let agents = cluster.lab.nodes().iter().zip(NODES).map(|(node, (hook, _))| {
        // No driver accepts XDP frames for a tunnel.
        let attach = if hook == "xdp" && has_tunnels { "xdp-generic" } else { hook };
        Agent::builder(&cluster.lab, node).attach(attach).devices(&[]).start().unwrap()
    });
    let agents: Vec<_> = agents.collect();
    for agent in &agents {
        agent.wait_ready(Duration::from_secs(20)).unwrap();
    }
    cluster.agents = agents;
    cluster
}

/// Asks a node port on a node until every pod has answered. Returns the address that each pod saw,
/// by node.
fn seen(cluster: &Cluster, protocol: Protocol, to: (usize, Family, u16)) -> BTreeSet<(usize, IpAddr)> {
    let (front, family, port) = to;
    let answers = cluster.ask_until_all(protocol, cluster.at(front, family, port), &PODS).unwrap();
    let node = |name: &str| 1 + cluster.lab.nodes().iter().position(|node| node.name == name).unwrap();
    answers.iter().map(|answer| (node(&answer.node), answer.client.ip())).collect()
}

/// Returns the combinations in which a pod saw the client.
fn cells(name: &str, cluster: &Cluster) -> BTreeSet<Cell> {
    let lab = &cluster.lab;
    let mut cells = BTreeSet::new();
    let fronts = 1..=NODES.len();
    for (front, family, protocol) in fronts
        .flat_map(|front| Family::BOTH.map(|family| (front, family)))
        .flat_map(|(front, family)| Protocol::BOTH.map(|protocol| (front, family, protocol)))
    {
        let (client, node) = (lab.client().address(family), lab.node(front));
        let what = format!("{name}, {} in front, {family:?} {protocol:?}", node.name);
        let device = match family {
            _ if name != Cni::FlannelVxlan.name() => "eth0",
            Family::V4 => "flannel.1",
            Family::V6 => "flannel-v6.1",
        };
        let captures = [1, 2, 3].map(|number| Capture::start(lab.node(number).netns(), device).unwrap());
        let direct = seen(cluster, protocol, (front, family, DIRECT));
        let frames = captures.map(|capture| capture.finish_valid().unwrap());
        let everyone: BTreeSet<_> = [1, 2, 3].map(|number| (number, client)).into();
        assert_eq!(direct, everyone, "{what}: what pods see");
        let ipip = if family == Family::V4 { IPIP } else { IP6IP6 };
        let source = lab.source_towards_pods(node, family);
        for (home, frames) in (1..).zip(frames).filter(|(home, _)| *home != front) {
            let dispatch = NODES[home - 1].1.split(',').next().unwrap();
            let within = if dispatch == "udp" { UDP } else { ipip };
            let pod = lab.node(home).pod(1).address(family);
            let came: BTreeSet<_> = frames
                .iter()
                .filter(|frame| !frame.outgoing)
                .filter_map(header)
                .filter(|(_, from, to)| *from == source && *to == pod)
                .map(|(protocol, ..)| protocol)
                // Connections of the control before this one still end.
                .filter(|protocol| *protocol != TCP)
                .collect();
            assert_eq!(came, BTreeSet::from([within]), "{what}: what reaches node-{home}");
            let family = if family == Family::V4 { "IPv4" } else { "IPv6" };
            let protocol = if protocol == Protocol::Tcp { "TCP" } else { "UDP" };
            cells.insert((NODES[front - 1].0, dispatch, family, protocol));
        }
        // The control: the node's address, but for its own pod.
        let snat = seen(cluster, protocol, (front, family, SNAT));
        let nodes = [1, 2, 3].map(|home| (home, if home == front { client } else { source }));
        assert_eq!(snat, nodes.into(), "{what}: what pods see under snat");
    }
    cells
}

fn pods_see_the_client_in_every_combination(cni: Option<Cni>) {
    let name = cni.map_or("veths", Cni::name);
    if let Some(missing) = cni.and_then(|cni| cni.missing().unwrap()) {
        // Written to stderr directly: the test harness would capture it otherwise.
        writeln!(std::io::stderr(), "SKIPPED {name}: there is {missing}").ok();
        return;
    }
    let cluster = start(cni);
    let found = cells(name, &cluster);
    for (hook, dispatch, family, protocol) in &found {
        println!("{name} {hook} {dispatch} {family} {protocol}: the client");
    }
    assert_eq!(found.len(), 16, "{found:?}");
    // The hooks that did it: XDP unless the way to pods is a tunnel; packets whose next hop is not
    // known yet are left to TC.
    let has_tunnels = cni.is_some_and(Cni::has_tunnels);
    for (agent, (hook, _)) in cluster.agents.iter().zip(NODES) {
        let count = |hook| agent.packets(hook, "forwarded-direct").unwrap();
        let (xdp, tc) = (count("xdp"), count("tc-ingress"));
        let is_so = if hook == "xdp" && !has_tunnels { xdp > 4 * tc } else { xdp == 0 && tc > 0 };
        assert!(is_so, "{name} {hook}: XDP {xdp}, TC {tc}");
    }
}

#[test]
fn a_veth_for_each_pod() {
    pods_see_the_client_in_every_combination(None);
}

#[test]
fn a_bridge_for_all_pods() {
    pods_see_the_client_in_every_combination(Some(Cni::Bridge));
}

#[test]
fn an_overlay_between_nodes() {
    pods_see_the_client_in_every_combination(Some(Cni::FlannelVxlan));
}
