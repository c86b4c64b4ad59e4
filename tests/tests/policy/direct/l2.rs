//! Direct forwarding to MAC addresses: the packets between nodes are the client's own, and where
//! two nodes have different tables nothing is lost.

use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use traffic_policy_testing::agent::Agent;
use traffic_policy_testing::capture::{Capture, Frame};
use traffic_policy_testing::cluster::{Cluster, Protocol};
use traffic_policy_testing::lab::{Cni, Family, Lab, LabBuilder, Node};
use traffic_policy_testing::object::lease;
use traffic_policy_testing::pace::until;
use traffic_policy_testing::skipped;
use traffic_policy_testing::traffic::transfer::transfer;

use super::matrix::Passed;
use super::{IP6IP6, IPIP, NODE_PORT, VIP_PORT, VIPS, answers, header, seen, service};
use crate::route_mtus::ip;

const FLAGS: [&str; 8] =
    ["--forwarding", "direct", "--algorithm", "maglev", "--maglev-size", "251", "--dispatch", "l2"];
const PATIENCE: Duration = Duration::from_secs(20);
const TCP: u8 = 6;
const UDP: u8 = 17;

/// Three nodes with agents, pods on the second and third.
fn start(attach: &str) -> Cluster {
    start_lab(Lab::builder(), attach)
}

fn start_lab(lab: LabBuilder, attach: &str) -> Cluster {
    let mut cluster = Cluster::start(lab.pods(&[0, 1, 1])).unwrap();
    write_leases(&cluster, None);
    cluster.manifests.apply(&service(), &cluster.backends()).unwrap();
    cluster.launch(|agent| agent.attach(attach).flags(&FLAGS)).unwrap();
    for vip in VIPS {
        cluster.lab.route_vip(vip, cluster.lab.node(1)).unwrap();
    }
    // The first packet to each node resolves its neighbour, and names its endpoint until then.
    for family in Family::BOTH {
        answers(&cluster, Protocol::Tcp, vip(family));
    }
    cluster
}

/// Writes the Leases. `choice`: the settings by which each node says that it finds endpoints;
/// `None`: those of this agent.
fn write_leases(cluster: &Cluster, choice: Option<&str>) {
    let leases: Vec<_> = cluster.lab.nodes().iter().map(|node| lease::takes(node, choice)).collect();
    cluster.manifests.write("leases", &leases).unwrap();
}

fn vip(family: Family) -> SocketAddr {
    SocketAddr::new(VIPS[usize::from(family == Family::V6)], VIP_PORT)
}

/// The frames from the node in front that reach another node, and what clients are told meanwhile.
fn between(
    cluster: &Cluster,
    number: usize,
    protocol: Protocol,
    to: SocketAddr,
) -> (Vec<Frame>, Vec<IpAddr>) {
    let [front, node] = [1, number].map(|number| cluster.lab.node(number));
    let capture = Capture::start(node.netns(), "eth0").unwrap();
    let answers = answers(cluster, protocol, to);
    let frames = capture.finish_valid().unwrap().into_iter();
    let from_front = |frame: &Frame| !frame.outgoing && frame.bytes[6..12] == front.addresses.mac();
    // Neither ARP and neighbour discovery, nor what is left of connections of the other family.
    let of_service = |frame: &Frame| {
        header(frame).is_some_and(|(protocol, source, _)| {
            source.is_ipv4() == to.is_ipv4() && [TCP, UDP, IPIP, IP6IP6].contains(&protocol)
        })
    };
    (frames.filter(from_front).filter(of_service).collect(), seen(&answers, &node.name))
}

fn packets_are_the_clients_own(cluster: &Cluster, attach: &str) {
    for (protocol, number) in [(Protocol::Tcp, TCP), (Protocol::Udp, UDP)] {
        for family in Family::BOTH {
            let client = cluster.lab.client().address(family);
            for node in [2, 3] {
                let (frames, seen) = between(cluster, node, protocol, vip(family));
                let what = format!("{attach} {protocol:?} {family:?} node-{node}");
                assert!(!seen.is_empty() && seen.iter().all(|ip| *ip == client), "{what}: {seen:?}");
                assert!(!frames.is_empty(), "{what}");
                for frame in &frames {
                    let (protocol, from, to) = header(frame).unwrap();
                    assert_eq!((protocol, from), (number, client), "{what}");
                    // A capture is behind XDP, which has translated the packet for its pod.
                    assert!(attach == "xdp" || to == vip(family).ip(), "{what}: {to}");
                    assert_eq!(frame.bytes[..6], cluster.lab.node(node).addresses.mac(), "{what}");
                }
                // The control: the address of the node in front is no frontend of another node's.
                let (frames, seen) = between(cluster, node, protocol, cluster.at(1, family, NODE_PORT));
                assert!(!seen.is_empty() && seen.iter().all(|ip| *ip == client), "{what}: {seen:?}");
                let outer = if family == Family::V4 { IPIP } else { IP6IP6 };
                let is_named = |frame: &Frame| header(frame).is_some_and(|(protocol, ..)| protocol == outer);
                assert!(!frames.is_empty() && frames.iter().all(is_named), "{what}, node port");
            }
        }
    }
    // Nothing is lost of the MTU.
    for family in Family::BOTH {
        let report = transfer(cluster.lab.client().netns(), vip(family), 10_000_000).unwrap();
        println!("{attach} {family:?}: {report:?}");
    }
    for agent in &cluster.agents {
        for outcome in
            ["dropped-internal-error", "dropped-unknown-endpoint", "rejected-mtu-exceeded", "forwarded"]
        {
            for hook in ["xdp", "tc-ingress"] {
                assert_eq!(agent.packets(hook, outcome).unwrap(), 0, "{attach} {hook} {outcome}");
            }
        }
    }
    let served = served(cluster);
    assert!(served.contains(BY_MAC), "{served}");
}

/// The words of `services` where no endpoint is named.
const BY_MAC: &str = "direct, to 2 of 2 endpoints of other nodes, by MAC address to 2";

/// Returns the text of `services` on the node in front.
fn served(cluster: &Cluster) -> String {
    let served = cluster.agents[0].command(&["services", "default/web"]).unwrap();
    String::from_utf8_lossy(&served.stdout).into_owned()
}

/// The control: to nodes that say that they choose otherwise, and for clients with affinity, the
/// endpoint is named.
fn the_endpoint_is_named_where_another_node_may_choose_otherwise(cluster: &Cluster) {
    let all_are_named = |what: &str| {
        let mut frames = Vec::new();
        for node in [2, 3] {
            frames.extend(between(cluster, node, Protocol::Tcp, vip(Family::V4)).0);
        }
        let is_named = |frame: &Frame| header(frame).is_some_and(|(protocol, ..)| protocol == IPIP);
        assert!(!frames.is_empty() && frames.iter().all(is_named), "{what}");
    };
    cluster.manifests.service(&service().spec("sessionAffinity", "ClientIP".into())).unwrap();
    until("affinity", PATIENCE, || served(cluster).matches("a client keeps its endpoint").count() == 4);
    all_are_named("affinity");
    cluster.manifests.service(&service()).unwrap();
    until("no affinity", PATIENCE, || served(cluster).contains(BY_MAC));
    write_leases(cluster, Some("direct random 251"));
    until("the other nodes' choice", PATIENCE, || !served(cluster).contains("by MAC address"));
    all_are_named("direct random 251");
}

#[test]
fn packets_are_the_clients_own_unless_another_may_choose_otherwise_tc() {
    let cluster = start("tc");
    packets_are_the_clients_own(&cluster, "tc");
    the_endpoint_is_named_where_another_node_may_choose_otherwise(&cluster);
}

#[test]
fn packets_are_the_clients_own_and_differing_tables_lose_nothing_xdp() {
    let mut cluster = start("xdp");
    packets_are_the_clients_own(&cluster, "xdp");
    differing_tables_lose_nothing(&mut cluster);
}

/// Layouts whose routes to pods lead to their nodes: with a bridge for all pods of a node, and with
/// a veth for each and checksums that are finished by the card.
#[test]
fn packets_are_the_clients_own_in_other_layouts() {
    for (cni, attach) in [(Cni::FlannelHostGw, "xdp"), (Cni::Kindnet, "tc")] {
        if let Some(missing) = cni.missing().unwrap() {
            skipped(format!("l2 in {}", cni.name()), format!("there is {missing}"));
            continue;
        }
        packets_are_the_clients_own(&start_lab(Lab::builder().cni(cni), attach), attach);
    }
}

/// An overlay is a segment, too, if the programs are on its devices: frames in the tunnel have the
/// MAC addresses of those.
#[test]
fn packets_are_the_clients_own_in_an_overlay() {
    let cni = Cni::FlannelVxlan;
    if let Some(missing) = cni.missing().unwrap() {
        return skipped("l2 in an overlay", format!("there is {missing}"));
    }
    let mut cluster = Cluster::start(Lab::builder().cni(cni).pods(&[0, 1, 1])).unwrap();
    let lab = &cluster.lab;
    let devices = [(Family::V4, "flannel.1"), (Family::V6, "flannel-v6.1")];
    let mac = |node: &Node, device: &str| {
        let shown = ip(node.netns(), Family::V4, &format!("link show dev {device}"));
        let mut words = shown.split_whitespace().skip_while(|word| *word != "link/ether").skip(1);
        words.next().unwrap_or_else(|| panic!("no MAC address in {shown:?}")).to_owned()
    };
    let leases: Vec<_> = lab
        .nodes()
        .iter()
        .map(|node| {
            let mut lease = lease::takes(node, None);
            let annotations = &mut lease["metadata"]["annotations"];
            let from = Family::BOTH.map(|family| lab.source_towards_pods(node, family).to_string());
            annotations["traffic-policy.io/opens-from"] = from.join(",").into();
            let macs = devices.map(|(_, device)| mac(node, device));
            annotations["traffic-policy.io/opens-l2-at"] = macs.join(",").into();
            lease
        })
        .collect();
    cluster.manifests.write("leases", &leases).unwrap();
    cluster.manifests.apply(&service(), &cluster.backends()).unwrap();
    cluster.launch(|agent| agent.attach("tc").devices(&[]).flags(&FLAGS)).unwrap();
    for (family, device) in devices {
        let (lab, to) = (&cluster.lab, vip(family));
        lab.route_vip(to.ip(), lab.node(1)).unwrap();
        let client = lab.client().address(family);
        for (protocol, number) in [(Protocol::Tcp, TCP), (Protocol::Udp, UDP)] {
            for home in [2, 3].map(|number| lab.node(number)) {
                // By name, as the control, and by MAC address.
                for (to, wanted) in [(cluster.at(1, family, NODE_PORT), None), (to, Some((number, client)))] {
                    let what = format!("{protocol:?} {to} {}", home.name);
                    let capture = Capture::start(home.netns(), device).unwrap();
                    let answers = answers(&cluster, protocol, to);
                    let seen = seen(&answers, &home.name);
                    assert!(!seen.is_empty() && seen.iter().all(|ip| *ip == client), "{what}: {seen:?}");
                    let frames = capture.finish_valid().unwrap();
                    let read = |frame: &Frame| Passed::read(frame.outgoing, frame.bytes.get(14..)?);
                    let passed = frames.iter().filter_map(read);
                    let came = passed.filter(|packet| !packet.outgoing && packet.ports[1] == to.port());
                    let came: BTreeSet<_> = came.map(|packet| packet.header).collect();
                    let outer = if family == Family::V4 { IPIP } else { IP6IP6 };
                    let source = lab.source_towards_pods(lab.node(1), family);
                    let pod = home.pod(1).address(family);
                    let expected = match wanted {
                        Some((number, client)) => (number, client, to.ip()),
                        None => (outer, source, pod),
                    };
                    assert_eq!(came, BTreeSet::from([expected]), "{what}");
                }
            }
        }
    }
}

/// Two nodes whose tables differ, each sure that the other one's is its own: what the first sends
/// to the second goes on to the endpoint that the second's table names, within IP, and never back.
fn differing_tables_lose_nothing(cluster: &mut Cluster) {
    let node = cluster.lab.node(2);
    cluster.agents[1].stop().unwrap();
    let flags = FLAGS.map(|flag| if flag == "251" { "509" } else { flag });
    let builder = Agent::builder(&cluster.lab, node);
    cluster.agents[1] = builder.attach("xdp").flags(&flags).start().unwrap();
    cluster.agents[1].wait_ready(PATIENCE).unwrap();
    for family in Family::BOTH {
        let capture = Capture::start(cluster.lab.node(3).netns(), "eth0").unwrap();
        let client = cluster.lab.client().address(family);
        let answers: Vec<_> = (0..40).map(|_| cluster.answer(Protocol::Tcp, vip(family)).unwrap()).collect();
        assert!(answers.iter().all(|answer| answer.client.ip() == client), "{family:?}: {answers:?}");
        let frames = capture.finish_valid().unwrap();
        let outer = if family == Family::V4 { IPIP } else { IP6IP6 };
        let second = cluster.lab.node(2).addresses.mac();
        let went_on = frames.iter().filter(|frame| !frame.outgoing && frame.bytes[6..12] == second);
        let went_on = went_on.filter(|frame| header(frame).is_some_and(|(protocol, ..)| protocol == outer));
        assert!(went_on.count() > 0, "{family:?}: the tables do not differ");
    }
}
