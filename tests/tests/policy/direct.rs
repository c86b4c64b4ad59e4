//! Direct forwarding: endpoints of other nodes see the client, and answer it without the node in
//! front.

mod aggregates;
mod changes;
mod explained;
mod forgotten;
mod fragments;
mod gone;
mod l2;
mod matrix;
mod refusals;
mod sctp;
mod tunnel;
mod udp;

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use serde_json::Value;
use traffic_policy_testing::capture::{Capture, Frame};
use traffic_policy_testing::cluster::{Cluster, Protocol, TARGET};
use traffic_policy_testing::lab::{Addresses, Family, Lab};
use traffic_policy_testing::object::{Port, Service, lease};
use traffic_policy_testing::pace::until;
use traffic_policy_testing::traffic::transfer::transfer;
use traffic_policy_testing::traffic::{Answer, HeldConnections};

const NODE_PORT: u16 = 30080;
const PATIENCE: Duration = Duration::from_secs(10);
const VIPS: [IpAddr; 2] = [
    IpAddr::V4(std::net::Ipv4Addr::new(203, 0, 113, 9)),
    IpAddr::V6(std::net::Ipv6Addr::new(0x2001, 0xdb8, 0x5, 0, 0, 0, 0, 9)),
];
const VIP_PORT: u16 = 80;
/// IPv4 within IPv4 (RFC 2003), IPv6 within IPv6 (RFC 2473).
const IPIP: u8 = 4;
const IP6IP6: u8 = 41;

fn service() -> Service {
    Service::new("web")
        .port(Port::tcp(VIP_PORT, TARGET).node_port(NODE_PORT))
        .port(Port::udp(VIP_PORT, TARGET).node_port(NODE_PORT))
        .vip(VIPS[0])
        .vip(VIPS[1])
}

/// Three nodes, pods on the second and third, and agents. These nodes say that they open packets.
fn start(attach: &str, flags: &[&str], opening: &[(usize, &[Family])]) -> Cluster {
    let mut cluster = Cluster::start(Lab::builder().pods(&[0, 1, 1])).unwrap();
    let leases: Vec<_> =
        opening.iter().map(|(number, families)| lease::opens(cluster.lab.node(*number), families)).collect();
    cluster.manifests.write("leases", &leases).unwrap();
    cluster.manifests.apply(&service(), &cluster.backends()).unwrap();
    cluster.launch(|agent| agent.attach(attach).flags(flags)).unwrap();
    for vip in VIPS {
        cluster.lab.route_vip(vip, cluster.lab.node(1)).unwrap();
    }
    cluster
}

/// All nodes open packets of both families.
const ALL: [(usize, &[Family]); 3] = [(1, &Family::BOTH), (2, &Family::BOTH), (3, &Family::BOTH)];

fn targets(cluster: &Cluster) -> Vec<(Family, SocketAddr)> {
    let of_family = |(family, vip): (Family, IpAddr)| {
        [cluster.at(1, family, NODE_PORT), SocketAddr::new(vip, VIP_PORT)].map(|to| (family, to))
    };
    Family::BOTH.into_iter().zip(VIPS).flat_map(of_family).collect()
}

fn answers(cluster: &Cluster, protocol: Protocol, to: SocketAddr) -> Vec<Answer> {
    (0..20).map(|_| cluster.answer(protocol, to).unwrap()).collect()
}

/// The addresses that the pods of a node see as the client's.
fn seen(answers: &[Answer], node: &str) -> Vec<IpAddr> {
    answers.iter().filter(|answer| answer.node == node).map(|answer| answer.client.ip()).collect()
}

/// The protocol, source and destination of a frame.
pub fn header(frame: &Frame) -> Option<(u8, IpAddr, IpAddr)> {
    let is_ip = [[8, 0], [0x86, 0xdd]].iter().any(|kind| frame.bytes.get(12..14) == Some(kind));
    if is_ip { ip_header(&frame.bytes[14..]) } else { None }
}

/// The protocol, source and destination of a packet without a link header.
fn ip_header(ip: &[u8]) -> Option<(u8, IpAddr, IpAddr)> {
    let v4 = |at: usize| Some(IpAddr::from(*ip.get(at..)?.first_chunk::<4>()?));
    let v6 = |at: usize| Some(IpAddr::from(*ip.get(at..)?.first_chunk::<16>()?));
    match ip.first()? >> 4 {
        4 => Some((*ip.get(9)?, v4(12)?, v4(16)?)),
        6 => Some((*ip.get(6)?, v6(8)?, v6(24)?)),
        _ => None,
    }
}

/// Processes of each endpoint's node, and the pod of an endpoint itself, ask the node in front. No
/// host accepts a packet from outside with its own address as the source, so these get that of the
/// node in front.
fn clients_of_nodes_are_answered(cluster: &Cluster) {
    let pod = cluster.lab.pods().next().unwrap();
    let clients = [cluster.lab.node(2).netns(), cluster.lab.node(3).netns(), pod.netns()];
    for (family, protocol) in
        Family::BOTH.into_iter().flat_map(|family| Protocol::BOTH.map(|protocol| (family, protocol)))
    {
        let to = cluster.at(1, family, NODE_PORT);
        for client in clients {
            // With two endpoints, the client's own is missed once in 4,096 runs.
            for _ in 0..12 {
                protocol.probe(to).answer(client).unwrap();
            }
        }
    }
}

fn endpoints_see_the_client(attach: &str) {
    let cluster = start(attach, &["--forwarding", "direct"], &ALL);
    pods_see_the_client(&cluster, attach, |family| if family == Family::V4 { IPIP } else { IP6IP6 });
    clients_of_nodes_are_answered(&cluster);
}

/// `within`: the protocol of the packets between the nodes.
fn pods_see_the_client(cluster: &Cluster, attach: &str, within: fn(Family) -> u8) {
    for (protocol, (family, to)) in Protocol::BOTH
        .into_iter()
        .flat_map(|protocol| targets(cluster).into_iter().map(move |target| (protocol, target)))
    {
        let client = cluster.lab.client().address(family);
        let captures: Vec<_> = [2, 3]
            .map(|number| Capture::start(cluster.lab.node(number).netns(), "eth0").unwrap())
            .into_iter()
            .collect();
        let answers = answers(cluster, protocol, to);
        for node in ["node-2", "node-3"] {
            let seen = seen(&answers, node);
            assert!(!seen.is_empty(), "{attach} {protocol:?} {to}: {node} was never chosen");
            assert!(seen.iter().all(|ip| *ip == client), "{attach} {protocol:?} {to}: {seen:?}");
        }
        // Requests come within packets from the node in front to the pods, and replies leave for
        // the client from the address that it asked.
        let node = cluster.lab.node(1).address(family);
        let pods: Vec<_> = cluster.lab.pods().map(|pod| pod.address(family)).collect();
        let frames = captures.into_iter().flat_map(|capture| capture.finish_valid().unwrap());
        let frames: Vec<_> = frames.filter_map(|frame| Some((frame.outgoing, header(&frame)?))).collect();
        let is_request = |frame: &&(bool, (u8, IpAddr, IpAddr))| {
            let (outgoing, (protocol, from, to)) = frame;
            !outgoing && *protocol == within(family) && *from == node && pods.contains(to)
        };
        let is_reply = |frame: &&(bool, (u8, IpAddr, IpAddr))| {
            let (outgoing, (_, from, reached)) = frame;
            *outgoing && *from == to.ip() && *reached == client
        };
        for (what, count) in [
            ("requests", frames.iter().filter(is_request).count()),
            ("replies", frames.iter().filter(is_reply).count()),
        ] {
            assert!(count >= 20, "{attach} {protocol:?} {to}: {count} {what} in {frames:?}");
        }
    }
    // What a person sees of it, on the node in front.
    let said = |arguments: &[&str]| cluster.agents[0].json(arguments).unwrap();
    for (family, to) in targets(cluster) {
        let (from, to) = (cluster.lab.client().address(family).to_string(), to.to_string());
        let explain = |agent: usize, more: &[&str]| {
            let explained =
                cluster.agents[agent].command(&[&["explain", &from, &to], more].concat()).unwrap();
            String::from_utf8_lossy(&explained.stdout).into_owned()
        };
        let explained = explain(0, &[]);
        for text in
            ["forwarded-direct", "VERDICT     to ", "route: to node node-", "which opens it: unchanged"]
        {
            assert!(explained.contains(text), "no {text:?} in {explained}");
        }
        // And on the endpoint's node, as the sentence says.
        let (front, pod) = (cluster.lab.node(1), cluster.lab.pods().next().unwrap());
        let (front, pod) = (front.address(family).to_string(), pod.address(family));
        let at = SocketAddr::new(pod, TARGET).to_string();
        for within in ["ipip", "udp"] {
            let pod = pod.to_string();
            let explained = explain(1, &["--opened-from", &front, "--at", &pod, "--opened-within", within]);
            for text in ["opened: ", "(delivered, at tc)", from.as_str(), &format!("to {at}")] {
                assert!(explained.contains(text), "no {text:?} in {explained}");
            }
        }
        let stranger = if family == Family::V4 { "192.0.2.77" } else { "2001:db8:77::1" };
        let explained = explain(1, &["--opened-from", stranger, "--at", &pod.to_string()]);
        let refused = format!("not opened: {stranger} is no address in another node's Lease");
        assert!(explained.contains(&refused), "{explained}");
    }
    let served = said(&["services", "default/web"]);
    let served = served.as_array().unwrap();
    assert!(served.iter().all(|port| port["forwarding"] == "direct"), "{served:?}");
    let flows = said(&["flows"]);
    let flows = flows.as_array().unwrap();
    let direct = |flow: &&Value| flow["kind"] == "direct" && flow["source"] == flow["client"];
    assert_eq!(flows.iter().filter(direct).count(), flows.len(), "{flows:?}");
    let hook = if attach == "tc" { "tc-ingress" } else { "xdp" };
    assert!(cluster.agents[0].packets(hook, "forwarded-direct").unwrap() > 0, "{attach}");
    assert_eq!(cluster.agents[0].packets(hook, "forwarded").unwrap(), 0, "{attach}");
}

#[test]
fn endpoints_see_the_client_tc() {
    endpoints_see_the_client("tc");
}

#[test]
fn endpoints_see_the_client_xdp() {
    endpoints_see_the_client("xdp");
}

/// Nobody else can open the packet: an older agent, or kube-proxy, or one whose Lease has no
/// address of that family.
#[test]
fn a_node_that_does_not_open_packets_gets_them_as_ever() {
    let opening = [(1, &Family::BOTH[..]), (2, &[Family::V4][..]), (3, &[Family::V6][..])];
    let cluster = start("tc", &["--forwarding", "direct"], &opening);
    for (family, opens, other) in [(Family::V4, "node-2", "node-3"), (Family::V6, "node-3", "node-2")] {
        let (client, front) = (cluster.lab.client().address(family), cluster.lab.node(1).address(family));
        let answers = answers(&cluster, Protocol::Tcp, cluster.at(1, family, NODE_PORT));
        for (node, address) in [(opens, client), (other, front)] {
            let seen = seen(&answers, node);
            assert!(!seen.is_empty() && seen.iter().all(|ip| *ip == address), "{node} {family:?}: {seen:?}");
        }
    }
}

/// Open connections stay where they are, in both directions of the change.
#[test]
fn the_annotation_changes_it_without_cutting_a_connection() {
    let cluster = start("tc", &[], &ALL);
    let to = Family::BOTH.map(|family| cluster.at(1, family, NODE_PORT));
    let (client, front) = (cluster.lab.client().addresses, cluster.lab.node(1).addresses);
    let is_seen = |addresses: Addresses| {
        for (to, family) in to.into_iter().zip(Family::BOTH) {
            let ip = addresses.of(family);
            let what = format!("pods see {ip}");
            until(&what, PATIENCE, || {
                answers(&cluster, Protocol::Tcp, to).iter().all(|answer| answer.client.ip() == ip)
            });
        }
    };
    is_seen(front);
    let pause = Duration::from_millis(20);
    let held = || HeldConnections::start(cluster.lab.client().netns(), &to, 8, pause).unwrap();
    let first = held();
    cluster.manifests.service(&service().annotation("traffic-policy.io/forwarding", "direct")).unwrap();
    is_seen(client);
    let second = held();
    cluster.manifests.service(&service()).unwrap();
    is_seen(front);
    for (begun, held) in [("snat", first), ("direct", second)] {
        let report = held.finish();
        assert!(report.is_clean(), "begun under {begun}: {report}");
    }
}

/// 30 MB each way at once, every byte compared: the segments that the client sends fit once it has
/// heard of the smaller MTU.
fn bulk_data_passes(attach: &str, dispatch: &str, wire_offloads: bool) {
    let mut cluster = Cluster::start(Lab::builder().pods(&[0, 1]).wire_offloads(wire_offloads)).unwrap();
    let of = |node| lease::opens_dispatch(node, &Family::BOTH, dispatch);
    let leases: Vec<_> = cluster.lab.nodes().iter().map(of).collect();
    cluster.manifests.write("leases", &leases).unwrap();
    cluster.manifests.apply(&service(), &cluster.backends()).unwrap();
    let flags = ["--forwarding", "direct", "--dispatch", dispatch];
    cluster.launch(|agent| agent.attach(attach).flags(&flags)).unwrap();
    for family in Family::BOTH {
        let to = cluster.at(1, family, NODE_PORT);
        let report = transfer(cluster.lab.client().netns(), to, 30_000_000).unwrap();
        println!("{attach} {family:?}: {report:?}");
    }
    let [front, home] = &cluster.agents[..] else { unreachable!("two nodes") };
    for (agent, node) in [(front, "front"), (home, "home")] {
        for outcome in
            ["dropped-internal-error", "dropped-unknown-endpoint", "dropped-mtu-exceeded", "forwarded"]
        {
            for hook in ["xdp", "tc-ingress"] {
                assert_eq!(agent.packets(hook, outcome).unwrap(), 0, "{attach} {node} {hook} {outcome}");
            }
        }
    }
    assert!(home.packets("tc-ingress", "delivered").unwrap() > 100, "{attach}");
}

/// Aggregates of up to 64 KB with unfinished checksums.
#[test]
fn bulk_data_passes_tc_with_offloads() {
    bulk_data_passes("tc", "ipip", true);
}

#[test]
fn bulk_data_passes_xdp() {
    bulk_data_passes("xdp", "ipip", false);
}
