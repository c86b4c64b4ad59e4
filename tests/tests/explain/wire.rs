//! Random flows from outside, first given to `explain` and then sent: the counter that moves, the
//! endpoint that receives them, and every byte of the received packet agree with the answer.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::thread::sleep;
use std::time::{Duration, Instant};

use fastrand::Rng;
use serde_json::json;
use socket2::Socket;
use traffic_policy_testing::agent::Agent;
use traffic_policy_testing::capture::{Capture, Frame};
use traffic_policy_testing::cluster::{Cluster, Protocol};
use traffic_policy_testing::counters::Counters;
use traffic_policy_testing::explain::{self, Answer, Flow};
use traffic_policy_testing::lab::{Family, Lab, plan};
use traffic_policy_testing::object::{Backend, Policy, Service, cluster_ip};
use traffic_policy_testing::pace::scaled;
use traffic_policy_testing::packet::{Packet, difference, flag};
use traffic_policy_testing::packet_socket;
use traffic_policy_testing::rows;

const FLOWS: u32 = 300;
const ETHERNET: usize = 14;
/// The sequence numbers of SYNs start here: they identify the flow.
const FIRST_SEQUENCE: u32 = 0x5eed_0000;

/// Every run sees the same random numbers.
pub const SEED: u64 = 0x9e37_79b9_7f4a_7c15;

fn announced(network: u8, number: u8, family: Family) -> IpAddr {
    match family {
        Family::V4 => [203, 0, 113, network * 50 + number].into(),
        Family::V6 => [0x2001, 0xdb8, 0xf, network.into(), 0, 0, 0, number.into()].into(),
    }
}

/// The number of Services, which count from 0: one with this number does not exist.
const SERVICES: u8 = 7;

fn node_port(number: u8) -> u16 {
    30_080 + u16::from(number)
}

/// Every address of a Service, on its own port and on an unused one.
fn destinations(cluster: &Cluster, family: Family) -> Vec<SocketAddr> {
    let mut all = Vec::new();
    for number in 0..=SERVICES {
        all.push(cluster.at(1, family, node_port(number)));
        for address in
            [announced(0, number, family), announced(1, number, family), cluster_ip(number, family)]
        {
            all.push(SocketAddr::new(address, 80));
            if number % 3 == 0 {
                all.push(SocketAddr::new(address, 81));
            }
        }
    }
    all.extend([22, 30_099].map(|port| cluster.at(1, family, port)));
    all
}

fn service(number: u8) -> Service {
    let external = if matches!(number, 1 | 2 | 5) { Policy::Local } else { Policy::Cluster };
    let internal = if number == 2 { Policy::Local } else { Policy::Cluster };
    let mut service =
        Cluster::node_port(&format!("s{number}"), external, node_port(number)).internal_policy(internal);
    for family in Family::BOTH {
        service = service
            .vip(announced(0, number, family))
            .external_ip(announced(1, number, family))
            .cluster_ip(cluster_ip(number, family));
    }
    match number {
        // The ranges admit half of the client's addresses; another Service has IPv4 only.
        4 => service.spec("loadBalancerSourceRanges", json!(["192.0.2.0/28", "2001:db8:c::/122"])),
        6 => service.families(&[Family::V4]),
        _ => service,
    }
}

fn backends(cluster: &Cluster, number: u8) -> Vec<Backend> {
    let at = |node: usize, pod| Backend::of(cluster.lab.node(node).pod(pod));
    match number {
        2 => vec![at(2, 1), at(2, 2)],
        3 => Vec::new(),
        5 => vec![at(1, 1).terminating(), at(1, 2).not_ready(), at(2, 1)],
        _ => cluster.backends(),
    }
}

/// Addresses of the client, inside and outside of the source ranges.
fn sources(cluster: &Cluster, family: Family) -> Vec<IpAddr> {
    let main = cluster.lab.client().address(family);
    let more: [IpAddr; 3] = match family {
        Family::V4 => ["192.0.2.11", "192.0.2.77", "192.0.2.200"].map(|ip| ip.parse().unwrap()),
        Family::V6 => ["2001:db8:c::11", "2001:db8:c::77", "2001:db8:c::200"].map(|ip| ip.parse().unwrap()),
    };
    for address in more {
        let netns = cluster.lab.client().netns();
        netns.netlink(async |net| net.address("eth0", address, family.prefix()).await).unwrap();
    }
    [&[main], &more[..]].concat()
}

fn random_flows(cluster: &Cluster) -> Vec<Flow> {
    let mut random = Rng::with_seed(SEED);
    let places = Family::BOTH.map(|family| (sources(cluster, family), destinations(cluster, family)));
    let mut used = BTreeSet::new();
    let mut flows = Vec::new();
    while flows.len() < FLOWS as usize {
        let (sources, destinations) = &places[random.usize(..2)];
        let source = SocketAddr::new(sources[random.usize(..sources.len())], random.u16(1024..65_024));
        // Each packet is the first of its flow, even if two destinations lead to one endpoint.
        if !used.insert(source) {
            continue;
        }
        let destination = destinations[random.usize(..destinations.len())];
        let flow = Flow::new(["TCP", "UDP"][random.usize(..2)], source, destination);
        flows.push(Flow { name: flows.len().to_string(), ..flow });
    }
    flows
}

/// The packet that a client sends, identified by its number.
fn packet(flow: &Flow, number: u32) -> Packet {
    let ends = |end: SocketAddr| (end.ip(), end.port());
    let (source, destination) = (ends(flow.source), ends(flow.destination));
    match flow.protocol.as_str() {
        "TCP" => Packet::tcp(source, destination, flag::SYN).numbers(FIRST_SEQUENCE + number, 0),
        _ => Packet::udp(source, destination).payload(format!("flow {number}").as_bytes()),
    }
}

/// The offset of the transport header in a frame without options.
fn transport(frame: &[u8]) -> Option<usize> {
    match frame.get(12..14)? {
        [0x08, 0x00] => Some(ETHERNET + 20),
        [0x86, 0xdd] => Some(ETHERNET + 40),
        _ => None,
    }
}

/// The number of the flow whose first packet a frame is.
fn number(frame: &[u8]) -> Option<u32> {
    let at = transport(frame)?;
    let protocol = if at == ETHERNET + 20 { frame[ETHERNET + 9] } else { frame[ETHERNET + 6] };
    let rest = frame.get(at..)?;
    match protocol {
        6 if rest[13] & 0x3f == flag::SYN => {
            u32::from_be_bytes(rest[4..8].try_into().ok()?).checked_sub(FIRST_SEQUENCE)
        }
        17 => std::str::from_utf8(&rest[8..]).ok()?.strip_prefix("flow ")?.parse().ok(),
        _ => None,
    }
}

/// Sends one packet and waits until the counter that `explain` named has moved. No other refusal
/// may be counted.
///
/// XDP leaves an answer to TC where the frame has no room for it, which only the device knows.
fn send(wire: &Socket, counters: &Counters, frame: &[u8], flow: &Flow, answer: &Answer) {
    let before = counters.read().unwrap();
    let wanted = (answer.hook.as_str(), answer.outcome.as_str());
    let otherwise = if answer.verdict == "reject" { ("tc", wanted.1) } else { wanted };
    assert_eq!(wire.send(frame).unwrap(), frame.len());
    let start = Instant::now();
    let after = loop {
        sleep(Duration::from_millis(1));
        let after = counters.read().unwrap();
        if after[&wanted] > before[&wanted] || after[&otherwise] > before[&otherwise] {
            break after;
        }
        let late = start.elapsed() > scaled(Duration::from_secs(3));
        let moved = || after.iter().filter(|(place, count)| before[*place] != **count).collect::<Vec<_>>();
        assert!(!late, "{flow:?}: {wanted:?} does not move, but {:?}: {answer:?}", moved());
    };
    for (place, count) in &after {
        let refusal = place.1.starts_with("dropped") || place.1.starts_with("rejected");
        let moved = count - before[place];
        let expected = *place == wanted || *place == otherwise;
        assert!(
            !refusal || moved == 0 || moved == 1 && expected,
            "{flow:?}: {place:?} moved by {moved}: {answer:?}"
        );
    }
}

/// The packet that `explain` predicts at the endpoint; its source port is the one that the port
/// search found.
fn translated(sent: &Packet, answer: &Answer, remote: bool, source_port: u16) -> Packet {
    let (source, endpoint) = (answer.source.unwrap(), answer.endpoint.unwrap());
    // The router and the node forward it, and another node forwards it to a pod of its own.
    let ttl = sent.ttl - 2 - u8::from(remote);
    sent.clone().source((source.ip(), source_port)).destination((endpoint.ip(), endpoint.port())).ttl(ttl)
}

/// The first packets that reached pods, by flow: pod and frame.
fn arrived(captured: &[(String, Vec<Frame>)]) -> BTreeMap<u32, Vec<(&str, &Frame)>> {
    let mut arrived: BTreeMap<u32, Vec<_>> = BTreeMap::new();
    for (pod, frames) in captured {
        for frame in frames.iter().filter(|frame| !frame.outgoing) {
            if let Some(number) = number(&frame.bytes) {
                arrived.entry(number).or_default().push((pod.as_str(), frame));
            }
        }
    }
    arrived
}

/// The source and destination ports that ICMP errors "port unreachable" at the client quote.
fn refusals(frames: &[Frame]) -> BTreeSet<(u16, u16)> {
    let ports = |frame: &Frame| {
        let at = transport(&frame.bytes)?;
        let (kind, inner) = if at == ETHERNET + 20 { ([3, 3], 20) } else { ([1, 4], 40) };
        let protocol = if inner == 20 { (9, 1) } else { (6, 58) };
        let is_icmp = frame.bytes[ETHERNET + protocol.0] == protocol.1;
        let quote = frame.bytes.get(at + 8 + inner..at + 8 + inner + 4)?;
        let port = |at: usize| u16::from_be_bytes([quote[at], quote[at + 1]]);
        (is_icmp && frame.bytes[at..at + 2] == kind).then(|| (port(0), port(2)))
    };
    frames.iter().filter_map(ports).collect()
}

fn agrees(attach: &str) {
    let cluster = Cluster::start(Lab::builder().pods(&[2, 2]).pod_offloads(false)).unwrap();
    let lab = &cluster.lab;
    for number in 0..SERVICES {
        cluster.manifests.apply(&service(number), &backends(&cluster, number)).unwrap();
    }
    let start = |builder: traffic_policy_testing::agent::AgentBuilder| {
        builder.attach(attach).flags(&["--service-cidr", "10.96.0.0/16,fd00:10:96::/112"])
    };
    let agent = start(Agent::builder(lab, lab.node(1))).start().unwrap();
    agent.wait_ready(Duration::from_secs(20)).unwrap();
    for family in Family::BOTH {
        let addresses: BTreeSet<_> = destinations(&cluster, family).into_iter().map(|to| to.ip()).collect();
        for address in addresses.into_iter().filter(|ip| *ip != lab.node(1).address(family)) {
            lab.route_vip(address, lab.node(1)).unwrap();
        }
        // Every neighbour is resolved, so that no packet waits.
        let pods: Vec<_> = lab.pods().map(|pod| pod.name.as_str()).collect();
        cluster.ask_until_all(Protocol::Tcp, cluster.at(1, family, node_port(0)), &pods).unwrap();
    }

    let flows = random_flows(&cluster);
    let answers = explain::live(&agent, &flows, &[]).unwrap();
    let captures: Vec<_> =
        lab.pods().map(|pod| (pod.name.clone(), Capture::start(pod.netns(), "eth0").unwrap())).collect();
    let at_client = Capture::start(lab.client().netns(), "eth0").unwrap();
    let wire = lab.client().netns().run(|| packet_socket::open("eth0", 0)).unwrap();
    let counters = Counters::of(&agent).unwrap();
    let gateway = plan::client_gateway(0).mac();
    for (number, (flow, answer)) in (0..).zip(flows.iter().zip(&answers)) {
        let frame = packet(flow, number).macs(lab.client().addresses.mac(), gateway).bytes();
        send(&wire, &counters, &frame, flow, answer);
    }
    // Time for the last packets to arrive: the absence of a packet cannot be waited for.
    sleep(Duration::from_millis(300));
    let captured: Vec<_> =
        captures.into_iter().map(|(pod, capture)| (pod, capture.finish_valid().unwrap())).collect();
    let refusals = refusals(&at_client.finish_valid().unwrap());
    let arrived = arrived(&captured);

    let mut seen: BTreeMap<&str, u32> = BTreeMap::new();
    for (number, (flow, answer)) in (0..).zip(flows.iter().zip(&answers)) {
        let what = format!("{attach} {flow:?} {answer:?}");
        *seen.entry(&answer.outcome).or_default() += 1;
        let frames = arrived.get(&number).map_or(&[][..], Vec::as_slice);
        let ports = (flow.source.port(), flow.destination.port());
        match answer.verdict.as_str() {
            "endpoints" => {
                let [(pod, frame)] = frames else { panic!("{what}: at {} pods", frames.len()) };
                let endpoint = answer.endpoint.unwrap();
                let chosen =
                    lab.pods().find(|pod| pod.addresses.of(family_of(endpoint)) == endpoint.ip()).unwrap();
                assert_eq!(*pod, chosen.name, "{what}");
                assert!(answer.candidates.contains(&endpoint), "{what}");
                let at = transport(&frame.bytes).unwrap();
                let source_port = u16::from_be_bytes([frame.bytes[at], frame.bytes[at + 1]]);
                if !answer.masquerade {
                    assert_eq!(answer.source, Some(flow.source), "{what}");
                    assert_eq!(source_port, flow.source.port(), "{what}");
                }
                let remote = chosen.node != lab.node(1).name;
                let expected = translated(&packet(flow, number), answer, remote, source_port).bytes();
                // All but the MAC addresses of the last wire.
                let difference = difference(&expected[ETHERNET..], &frame.bytes[ETHERNET..]);
                assert!(difference.is_none(), "{what}: {}", difference.unwrap());
            }
            "reject" => assert!(frames.is_empty() && refusals.contains(&ports), "{what}"),
            "drop" => assert!(frames.is_empty() && !refusals.contains(&ports), "{what}"),
            _ => assert!(frames.is_empty(), "{what}"),
        }
    }
    println!("{attach}: {seen:?}");
    for outcome in [
        "delivered",
        "dropped-no-local-endpoint",
        "dropped-source-range",
        "dropped-unallocated-cluster-ip",
        "forwarded",
        "rejected-no-endpoint",
        "rejected-unknown-port",
    ] {
        assert!(seen.contains_key(outcome), "{attach}: no flow is {outcome}: {seen:?}");
    }
}

fn family_of(address: SocketAddr) -> Family {
    if address.is_ipv4() { Family::V4 } else { Family::V6 }
}

rows! {
    fn by_tc() = agrees("tc");
    fn by_xdp() = agrees("xdp");
    fn by_generic_xdp() = agrees("xdp-generic");
}
