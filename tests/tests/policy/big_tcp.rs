//! Aggregates of more than 65,535 bytes (BIG TCP), whose length no IP header field can hold: an
//! IPv6 packet has a hop-by-hop header for it, which its segments do not have; an IPv4 packet has
//! the length 0. They pass TC only, like any aggregate: XDP sees frames as they are on the wire.

use traffic_policy_dataplane::Kernel;
use traffic_policy_testing::agent::Agent;
use traffic_policy_testing::capture::Capture;
use traffic_policy_testing::cluster::Cluster;
use traffic_policy_testing::lab::{Family, Lab, Pod};
use traffic_policy_testing::netlink::Netlink;
use traffic_policy_testing::object::{Backend, Policy};
use traffic_policy_testing::traffic::transfer::transfer;

const REMOTE: u16 = 30080;
const LOCAL: u16 = 30081;
const BYTES: u64 = 24_000_000;
/// The most bytes of an aggregate, as the kernel is configured.
const LARGEST: u32 = 180_000;
const MTU: u32 = 1500;
const JUMBO_HEADER: u32 = 8;
/// The most bytes of a frame whose IP header can hold its length.
const TELLABLE: usize = 65_535 + 14;

/// The number of larger frames that a pod receives, and sends, in a transfer by a port of node-1.
fn larger(cluster: &Cluster, pod: &Pod, family: Family, port: u16) -> [usize; 2] {
    let capture = Capture::start(pod.netns(), "eth0").unwrap();
    let to = cluster.at(1, family, port);
    let report = transfer(cluster.lab.client().netns(), to, BYTES).unwrap();
    let frames = capture.finish().unwrap();
    let larger = |outgoing| {
        frames.iter().filter(|frame| frame.outgoing == outgoing && frame.bytes.len() > TELLABLE).count()
    };
    let larger = [larger(false), larger(true)];
    println!("{to}: {report:?}, larger frames to and from the pod: {larger:?}");
    larger
}

#[test]
fn whole_aggregates_are_translated() {
    let (kernel, release) = Kernel::found().unwrap();
    let cluster = Cluster::start(Lab::builder().pods(&[1, 1]).wire_offloads(true)).unwrap();
    let lab = &cluster.lab;
    // The stack's own forwarding (`ip6_forward`) takes the hop-by-hop header for part of each
    // segment, and finds the segments too long for a link with the MTU of the ends.
    let is_between = |namespace: &str, device: &str| {
        !(device == "eth0" && (namespace == "client" || namespace.starts_with("pod")))
    };
    let widened = async |net: &Netlink, device: &str| net.set_mtu(device, MTU + JUMBO_HEADER).await;
    lab.each_device(is_between, widened).unwrap();
    let ports = [("remote", REMOTE, lab.node(2).pod(1)), ("local", LOCAL, lab.node(1).pod(1))];
    for (name, port, pod) in ports {
        let service = Cluster::node_port(name, Policy::Cluster, port);
        cluster.manifests.apply(&service, &[Backend::of(pod)]).unwrap();
    }
    let agents = Agent::start_all(lab, |agent| agent.attach("tc")).unwrap();
    // The control: a veth makes none unless it is configured to.
    assert_eq!(larger(&cluster, ports[1].2, Family::V6, LOCAL), [0; 2]);
    let larger_ones = async |net: &Netlink, device: &str| net.allow_aggregates(device, LARGEST).await;
    lab.each_device(|_, _| true, larger_ones).unwrap();
    for family in Family::BOTH {
        if family == Family::V4 && !kernel.at_least(6, 3) {
            traffic_policy_testing::skipped(
                "whole_aggregates_are_translated by IPv4",
                format!("Linux {release} makes none"),
            );
            continue;
        }
        for (name, port, pod) in ports {
            let [received, sent] = larger(&cluster, pod, family, port);
            assert!(received > 0 && sent > 0, "{name} {family:?}: {received} received, {sent} sent");
        }
    }
    for outcome in
        ["dropped-internal-error", "dropped-mtu-exceeded", "passed-malformed", "passed-missed-tail-call"]
    {
        for hook in ["tc-ingress", "tc-egress"] {
            assert_eq!(agents[0].packets(hook, outcome).unwrap(), 0, "{hook} {outcome}");
        }
    }
}
