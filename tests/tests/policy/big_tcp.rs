//! Aggregates of more than 65,535 bytes (BIG TCP), whose length no IP header field can hold: an
//! IPv6 packet has a hop-by-hop header for it, which its segments do not have; an IPv4 packet has
//! the length 0. They pass TC only, like any aggregate: XDP sees frames as they are on the wire.
//! Also within outer packets, of which the kernel's own tunnels make none.

use std::process::Command;

use traffic_policy_dataplane::Kernel;
use traffic_policy_testing::agent::Agent;
use traffic_policy_testing::capture::Capture;
use traffic_policy_testing::cluster::Cluster;
use traffic_policy_testing::lab::{Cni, Family, Lab, LabBuilder, Pod};
use traffic_policy_testing::netlink::Netlink;
use traffic_policy_testing::object::{Backend, Policy, lease};
use traffic_policy_testing::rows;
use traffic_policy_testing::traffic::transfer::transfer;

const REMOTE: u16 = 30080;
const LOCAL: u16 = 30081;
const BYTES: u64 = 24_000_000;
/// The most bytes of an aggregate, as the kernel is configured.
const LARGEST: u32 = 180_000;
const MTU: u32 = 1500;
/// Room for a hop-by-hop header and for outer headers.
const ROOM: u32 = 8 + 48;
/// The most bytes of a frame whose IP header can hold its length.
const TELLABLE: usize = 65_535 + 14;
/// The most segments that are lost in a transfer: those of four aggregates. Where aggregates are
/// lost, it is those of dozens. Those that overtake each other, when a sender goes on on another
/// CPU, are sent again as well, and come twice.
const MOST_LOST: u32 = 500;

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
    assert!(report.lost < MOST_LOST, "{to}: {report:?}");
    larger
}

/// Sends aggregates through node-1 to endpoints of node-2 and of node-1 itself, and back.
/// `dispatch`: the outer packets that the nodes open; `flags`: those of the agents.
fn whole_aggregates_pass(lab: LabBuilder, dispatch: &str, flags: &[&str]) {
    let (kernel, release) = Kernel::found().unwrap();
    let cluster = Cluster::start(lab.pods(&[1, 1]).wire_offloads(true)).unwrap();
    let lab = &cluster.lab;
    let leases: Vec<_> =
        lab.nodes().iter().map(|node| lease::tunnels(node, &Family::BOTH, dispatch)).collect();
    cluster.manifests.write("leases", &leases).unwrap();
    // The stack's own forwarding (`ip6_forward`) takes the hop-by-hop header for part of each
    // segment, and finds the segments too long for a link with the MTU of the ends.
    let is_between = |namespace: &str, device: &str| {
        !(device == "eth0" && (namespace == "client" || namespace.starts_with("pod")))
    };
    let widened = async |net: &Netlink, device: &str| net.set_mtu(device, MTU + ROOM).await;
    lab.each_device(is_between, widened).unwrap();
    let ports = [("remote", REMOTE, lab.node(2).pod(1)), ("local", LOCAL, lab.node(1).pod(1))];
    for (name, port, pod) in ports {
        let service = Cluster::node_port(name, Policy::Cluster, port);
        cluster.manifests.apply(&service, &[Backend::of(pod)]).unwrap();
    }
    let agents = Agent::start_all(lab, |agent| agent.attach("tc").flags(flags)).unwrap();
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
        let travels_inside = !flags.is_empty() && family == Family::V6;
        if travels_inside {
            segment_outer_packets(lab);
        }
        for (name, port, pod) in ports {
            let [received, sent] = larger(&cluster, pod, family, port);
            let received = received > 0 || travels_inside && name == "remote";
            assert!(received && sent > 0, "{name} {family:?}: {received} received, {sent} sent");
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

/// Has the nodes' devices divide aggregates within outer packets, as cards do that cannot. A veth
/// would pass on those of IPv6 whole, though the outer header has no room for their length, and a
/// bridge that asks netfilter (`br_validate_ipv6`) would cut them.
/// <https://github.com/torvalds/linux/blob/v6.12/net/bridge/br_netfilter_ipv6.c>
fn segment_outer_packets(lab: &Lab) {
    for node in lab.nodes() {
        let mut command = Command::new("ethtool");
        command.args(["-K", "eth0", "tx-ipxip6-segmentation", "off"]);
        let output = node.netns().output(command).unwrap();
        assert!(output.status.success(), "{}: {output:?}", node.name);
    }
}

/// Pods behind a veth of their own: a bridge divides aggregates that were within outer packets
/// (`br_dev_setup` sets no `hw_enc_features`).
fn whole_aggregates_travel(forwarding: &str, dispatch: &str) {
    let lab = Lab::builder().cni(Cni::Kindnet);
    whole_aggregates_pass(lab, dispatch, &["--forwarding", forwarding, "--dispatch", dispatch]);
}

rows! {
    fn whole_aggregates_are_translated() = whole_aggregates_pass(Lab::builder(), "ipip", &[]);
    fn whole_aggregates_travel_within_ip() = whole_aggregates_travel("direct", "ipip");
    fn whole_aggregates_travel_within_udp() = whole_aggregates_travel("direct", "udp");
    fn whole_aggregates_travel_there_and_back_within_ip() = whole_aggregates_travel("tunnel", "ipip");
    fn whole_aggregates_travel_there_and_back_within_udp() = whole_aggregates_travel("tunnel", "udp");
}
