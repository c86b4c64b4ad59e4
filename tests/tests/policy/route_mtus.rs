//! Routes of a node that name an MTU smaller than that of their device (`ip route … mtu 1300`, not
//! locked): the kernel respects it when it forwards, so senders on either side of a node port get
//! the error.

use std::net::{IpAddr, SocketAddr};
use std::process::Command;
use std::time::Duration;

use traffic_policy_testing::agent::Agent;
use traffic_policy_testing::capture::Capture;
use traffic_policy_testing::cluster::Cluster;
use traffic_policy_testing::lab::{Family, Lab, plan};
use traffic_policy_testing::netns::Namespace;
use traffic_policy_testing::object::{Backend, Policy};
use traffic_policy_testing::pace::wait_for;
use traffic_policy_testing::traffic::transfer::transfer;

const PORT: u16 = 30080;
const BYTES: u64 = 200_000;
const ETHERNET: usize = 14;

/// Runs `ip` for a family, with arguments separated by spaces, and returns its output.
pub fn ip(namespace: &Namespace, family: Family, arguments: &str) -> String {
    let mut command = Command::new("ip");
    command.arg(if family == Family::V4 { "-4" } else { "-6" }).args(arguments.split(' '));
    let output = namespace.output(command).unwrap();
    assert!(output.status.success(), "{arguments}: {output:?}");
    String::from_utf8(output.stdout).unwrap()
}

/// Adds a route to one address, with an MTU.
pub fn narrow(node: &Namespace, family: Family, address: IpAddr, gateway: IpAddr, mtu: u32) {
    ip(node, family, &format!("route add {} via {gateway} mtu {mtu}", host(family, address)));
}

fn host(family: Family, address: IpAddr) -> String {
    format!("{address}/{}", if family == Family::V4 { 32 } else { 128 })
}

/// The length in bytes of the longest IP packet between client and node port, in a connection that
/// follows another one: an end that has learned the path MTU from the first sends no more, and
/// limits the other end by the MSS that it announces.
fn longest(cluster: &Cluster, family: Family) -> usize {
    let (client, pod) = (cluster.lab.client().netns(), cluster.lab.node(2).pod(1).netns());
    let to = cluster.at(1, family, PORT);
    for end in [client, pod] {
        ip(end, family, "route flush cache");
    }
    transfer(client, to, BYTES).unwrap();
    let capture = Capture::start(client, "eth0").unwrap();
    transfer(client, to, BYTES).unwrap();
    let frames = capture.finish_valid().unwrap();
    let ours = frames.iter().filter(|frame| has_port(&frame.bytes, to));
    ours.map(|frame| frame.bytes.len() - ETHERNET).max().unwrap_or_default()
}

/// Whether either end of a TCP segment is the node port.
fn has_port(frame: &[u8], to: SocketAddr) -> bool {
    let (protocol, ports) = if to.is_ipv4() { (23, 34) } else { (20, 54) };
    let ends = frame.get(ports..ports + 4).unwrap_or_default();
    frame.get(protocol) == Some(&6) && ends.chunks(2).any(|end| end == to.port().to_be_bytes())
}

fn followed(attach: &str, devices: &[&str]) {
    let cluster = Cluster::start(Lab::builder().pods(&[1, 1])).unwrap();
    let lab = &cluster.lab;
    let backend = Backend::of(lab.node(2).pod(1));
    cluster.manifests.apply(&Cluster::node_port("remote", Policy::Cluster, PORT), &[backend]).unwrap();
    let node = lab.node(1).netns();
    let to_pod = |family| (lab.node(2).pod(1).address(family), lab.node(2).address(family));
    // One route exists before the agent, one is added while it runs.
    for family in Family::BOTH {
        let (pod, gateway) = to_pod(family);
        narrow(node, family, pod, gateway, 1300);
    }
    let agents = Agent::start_first(1, lab, |agent| agent.attach(attach).devices(devices)).unwrap();
    for family in Family::BOTH {
        let wait = |what, wanted| {
            wait_for(what, Duration::from_secs(5), || (longest(&cluster, family) == wanted).then_some(()));
        };
        assert_eq!(longest(&cluster, family), 1300, "{attach} {family:?}");
        let (pod, gateway) = to_pod(family);
        ip(node, family, &format!("route replace {} via {gateway} mtu 1350", host(family, pod)));
        wait("a changed route's MTU", 1350);
        ip(node, family, &format!("route del {}", host(family, pod)));
        wait("the MTU without that route", 1500);
        // Replies use the route to the client.
        let (client, router) = (lab.client().address(family), plan::gateway(0).of(family));
        narrow(node, family, client, router, 1400);
        wait("a new route's MTU", 1400);
        ip(node, family, &format!("route del {}", host(family, client)));
        wait("the MTU without that route", 1500);
    }
    let told: u64 = ["xdp", "tc-ingress"]
        .iter()
        .map(|hook| agents[0].packets(hook, "rejected-mtu-exceeded").unwrap())
        .sum();
    assert!(told >= 6, "{attach}: {told}");
}

#[test]
fn followed_by_tc() {
    followed("tc", &[]);
}

#[test]
fn followed_by_xdp_on_a_named_device() {
    followed("xdp", &["eth0"]);
}
