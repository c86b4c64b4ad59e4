//! Direct forwarding: endpoints of other nodes see the client, and answer it without the node in
//! front.

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use serde_json::{Value, json};
use traffic_policy_testing::capture::{Capture, Frame};
use traffic_policy_testing::cluster::{Cluster, Protocol, TARGET};
use traffic_policy_testing::lab::{Family, Lab, Node};
use traffic_policy_testing::object::{Port, Service};
use traffic_policy_testing::pace::until;
use traffic_policy_testing::traffic::transfer::transfer;
use traffic_policy_testing::traffic::{Answer, HeldConnections};

const NODE_PORT: u16 = 30080;
const PATIENCE: Duration = Duration::from_secs(10);
const VIP: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(203, 0, 113, 9));
const VIP_PORT: u16 = 80;
const IPIP: u8 = 4;

/// The Lease by which a node says that it opens packets.
fn lease(node: &Node) -> Value {
    json!({
        "apiVersion": "coordination.k8s.io/v1",
        "kind": "Lease",
        "metadata": {
            "namespace": "traffic-policy",
            "name": format!("traffic-policy-opens-{}", node.name),
            "labels": {"traffic-policy.io/opens": "ipip"},
            "annotations": {"traffic-policy.io/opens-from": node.address(Family::V4).to_string()},
        },
        "spec": {"holderIdentity": node.name},
    })
}

fn service() -> Service {
    Service::new("web")
        .port(Port::tcp(VIP_PORT, TARGET).node_port(NODE_PORT))
        .port(Port::udp(VIP_PORT, TARGET).node_port(NODE_PORT))
        .vip(VIP)
}

/// Three nodes, pods on the second and third, and agents. These nodes say that they open packets.
fn start(attach: &str, flags: &[&str], opening: &[usize]) -> Cluster {
    let mut cluster = Cluster::start(Lab::builder().pods(&[0, 1, 1])).unwrap();
    let leases: Vec<_> = opening.iter().map(|number| lease(cluster.lab.node(*number))).collect();
    cluster.manifests.write("leases", &leases).unwrap();
    cluster.manifests.apply(&service(), &cluster.backends()).unwrap();
    cluster.launch(|agent| agent.attach(attach).flags(flags)).unwrap();
    cluster.lab.route_vip(VIP, cluster.lab.node(1)).unwrap();
    cluster
}

fn targets(cluster: &Cluster) -> [SocketAddr; 2] {
    [cluster.at(1, Family::V4, NODE_PORT), SocketAddr::new(VIP, VIP_PORT)]
}

fn answers(cluster: &Cluster, protocol: Protocol, to: SocketAddr) -> Vec<Answer> {
    (0..20).map(|_| cluster.answer(protocol, to).unwrap()).collect()
}

/// The addresses that the pods of a node see as the client's.
fn seen(answers: &[Answer], node: &str) -> Vec<IpAddr> {
    answers.iter().filter(|answer| answer.node == node).map(|answer| answer.client.ip()).collect()
}

/// The protocol, source and destination of an IPv4 frame.
fn header(frame: &Frame) -> Option<(u8, [u8; 4], [u8; 4])> {
    let ip = frame.bytes.get(14..34)?;
    let is_v4 = frame.bytes[12..14] == [8, 0];
    is_v4.then(|| (ip[9], ip[12..16].try_into().unwrap(), ip[16..20].try_into().unwrap()))
}

fn endpoints_see_the_client(attach: &str) {
    let cluster = start(attach, &["--forwarding", "direct"], &[1, 2, 3]);
    let client = cluster.lab.client().addresses.v4;
    for (protocol, to) in
        Protocol::BOTH.into_iter().flat_map(|protocol| targets(&cluster).map(|to| (protocol, to)))
    {
        let captures: Vec<_> = [2, 3]
            .map(|number| Capture::start(cluster.lab.node(number).netns(), "eth0").unwrap())
            .into_iter()
            .collect();
        let answers = answers(&cluster, protocol, to);
        for node in ["node-2", "node-3"] {
            let seen = seen(&answers, node);
            assert!(!seen.is_empty(), "{attach} {protocol:?} {to}: {node} was never chosen");
            assert!(
                seen.iter().all(|ip| *ip == IpAddr::from(client)),
                "{attach} {protocol:?} {to}: {seen:?}"
            );
        }
        // Requests come within packets from the node in front to the pods, and replies leave for
        // the client from the address that it asked.
        let node = cluster.lab.node(1).addresses.v4.octets();
        let pods: Vec<_> = cluster.lab.pods().map(|pod| pod.addresses.v4.octets()).collect();
        let frames = captures.into_iter().flat_map(|capture| capture.finish_valid().unwrap());
        let frames: Vec<_> = frames.filter_map(|frame| Some((frame.outgoing, header(&frame)?))).collect();
        let IpAddr::V4(asked) = to.ip() else { unreachable!("IPv4 only") };
        let is_request = |frame: &&(bool, (u8, [u8; 4], [u8; 4]))| {
            let (outgoing, (protocol, from, to)) = frame;
            !outgoing && *protocol == IPIP && *from == node && pods.contains(to)
        };
        let is_reply = |frame: &&(bool, (u8, [u8; 4], [u8; 4]))| {
            let (outgoing, (_, from, to)) = frame;
            *outgoing && *from == asked.octets() && *to == client.octets()
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
    let (from, to) = (client.to_string(), targets(&cluster)[0].to_string());
    let explain = |agent: usize, more: &[&str]| {
        let explained = cluster.agents[agent].command(&[&["explain", &from, &to], more].concat()).unwrap();
        String::from_utf8_lossy(&explained.stdout).into_owned()
    };
    let explained = explain(0, &[]);
    for text in ["forwarded-direct", "VERDICT     to ", "route: to node node-", "which opens it: unchanged"] {
        assert!(explained.contains(text), "no {text:?} in {explained}");
    }
    // And on the endpoint's node, as the sentence says.
    let (front, pod) = (cluster.lab.node(1), cluster.lab.pods().next().unwrap());
    let (front, pod) = (front.addresses.v4.to_string(), pod.addresses.v4.to_string());
    let explained = explain(1, &["--opened-from", &front, "--at", &pod]);
    for text in ["opened: ", "(delivered, at tc)", from.as_str(), &format!("to {pod}:{TARGET}")] {
        assert!(explained.contains(text), "no {text:?} in {explained}");
    }
    let stranger = explain(1, &["--opened-from", "192.0.2.77", "--at", &pod]);
    assert!(stranger.contains("not opened: 192.0.2.77 is no address in another node's Lease"), "{stranger}");
    let served = said(&["services", "default/web"]);
    assert_eq!(served[0]["forwarding"], "direct", "{served}");
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

/// Nobody else can open the packet: an older agent, or kube-proxy. IPv6 is not forwarded directly.
#[test]
fn a_node_that_does_not_open_packets_gets_them_as_ever() {
    let cluster = start("tc", &["--forwarding", "direct"], &[1, 2]);
    let (client, front) = (cluster.lab.client().addresses, cluster.lab.node(1).addresses);
    let to = cluster.at(1, Family::V4, NODE_PORT);
    let answers_v4 = answers(&cluster, Protocol::Tcp, to);
    assert!(seen(&answers_v4, "node-2").iter().all(|ip| *ip == IpAddr::from(client.v4)));
    let others = seen(&answers_v4, "node-3");
    assert!(!others.is_empty() && others.iter().all(|ip| *ip == IpAddr::from(front.v4)), "{others:?}");
    let answers_v6 = answers(&cluster, Protocol::Tcp, cluster.at(1, Family::V6, NODE_PORT));
    assert!(answers_v6.iter().all(|answer| answer.client.ip() == IpAddr::from(front.v6)), "{answers_v6:?}");
}

/// Open connections stay where they are, in both directions of the change.
#[test]
fn the_annotation_changes_it_without_cutting_a_connection() {
    let cluster = start("tc", &[], &[1, 2, 3]);
    let to = cluster.at(1, Family::V4, NODE_PORT);
    let (client, front) = (cluster.lab.client().addresses.v4, cluster.lab.node(1).addresses.v4);
    let is_seen = |ip: IpAddr| {
        let what = format!("pods see {ip}");
        until(&what, PATIENCE, || {
            answers(&cluster, Protocol::Tcp, to).iter().all(|answer| answer.client.ip() == ip)
        });
    };
    is_seen(front.into());
    let pause = Duration::from_millis(20);
    let held = || HeldConnections::start(cluster.lab.client().netns(), &[to], 8, pause).unwrap();
    let first = held();
    cluster.manifests.service(&service().annotation("traffic-policy.io/forwarding", "direct")).unwrap();
    is_seen(client.into());
    let second = held();
    cluster.manifests.service(&service()).unwrap();
    is_seen(front.into());
    for (begun, held) in [("snat", first), ("direct", second)] {
        let report = held.finish();
        assert!(report.is_clean(), "begun under {begun}: {report}");
    }
}

/// 30 MB each way at once, every byte compared: the segments that the client sends fit once it has
/// heard of the smaller MTU.
fn bulk_data_passes(attach: &str, wire_offloads: bool) {
    let mut cluster = Cluster::start(Lab::builder().pods(&[0, 1]).wire_offloads(wire_offloads)).unwrap();
    let leases: Vec<_> = cluster.lab.nodes().iter().map(lease).collect();
    cluster.manifests.write("leases", &leases).unwrap();
    cluster.manifests.apply(&service(), &cluster.backends()).unwrap();
    cluster.launch(|agent| agent.attach(attach).flags(&["--forwarding", "direct"])).unwrap();
    let to = cluster.at(1, Family::V4, NODE_PORT);
    let report = transfer(cluster.lab.client().netns(), to, 30_000_000).unwrap();
    println!("{attach}: {report:?}");
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
    bulk_data_passes("tc", true);
}

#[test]
fn bulk_data_passes_xdp() {
    bulk_data_passes("xdp", false);
}
