//! ICMP errors that a router sends: time exceeded, and packet too big.

use std::net::SocketAddr;
use std::process::Command;

use socket2::{Domain, Socket, Type};
use traffic_policy_testing::agent::Agent;
use traffic_policy_testing::capture::Capture;
use traffic_policy_testing::cluster::Cluster;
use traffic_policy_testing::lab::{Family, Lab};
use traffic_policy_testing::netns::Namespace;
use traffic_policy_testing::object::{Backend, Policy};
use traffic_policy_testing::pace::until;
use traffic_policy_testing::traffic::transfer::transfer;

use crate::icmp::error_about;

const PORT: u16 = 30080;

fn remote_only(builder: fn() -> traffic_policy_testing::lab::LabBuilder) -> Cluster {
    let cluster = Cluster::start(builder()).unwrap();
    let backend = Backend::of(cluster.lab.node(2).pod(1));
    cluster.manifests.apply(&Cluster::node_port("web", Policy::Cluster, PORT), &[backend]).unwrap();
    cluster
}

/// Sends one datagram with this TTL or hop limit.
pub fn datagram(namespace: &Namespace, to: SocketAddr, ttl: u32) {
    namespace.run(|| {
        let socket = Socket::new(Domain::for_address(to), Type::DGRAM, None).unwrap();
        if to.is_ipv4() {
            socket.set_ttl_v4(ttl).unwrap();
        } else {
            socket.set_unicast_hops_v6(ttl).unwrap();
        }
        socket.send_to(b"hello", &to.into()).unwrap();
    });
}

fn time_exceeded(attach: &str) {
    let cluster = remote_only(|| Lab::builder().pods(&[0, 1]));
    let lab = &cluster.lab;
    let agents = Agent::start_first(1, lab, |agent| agent.attach(attach)).unwrap();
    for (family, wanted) in [(Family::V4, 11), (Family::V6, 3)] {
        let to = cluster.at(1, family, PORT);
        let capture = Capture::start(lab.client().netns(), "eth0").unwrap();
        // The router decrements it, so node-1 receives 1; with 3 the packet would be forwarded.
        datagram(lab.client().netns(), to, 2);

        let least = if family == Family::V4 { 1 } else { 2 };
        // XDP leaves the packet to TC if the frame has no room for the answer.
        let rejected = || -> u64 {
            ["xdp", "tc-ingress"]
                .iter()
                .map(|hook| agents[0].packets(hook, "rejected-ttl-exceeded").unwrap())
                .sum()
        };
        let what = format!("{attach} {family:?}: the packet to be counted");
        until(&what, std::time::Duration::from_secs(5), || rejected() >= least);
        let frames = capture.finish_valid().unwrap();
        let errors: Vec<_> = frames.iter().filter_map(|frame| error_about(frame, to)).collect();
        assert_eq!(errors, [(wanted, 0)], "{attach} {family:?}");
    }
}

#[test]
fn time_exceeded_by_tc() {
    time_exceeded("tc");
}

#[test]
fn time_exceeded_by_xdp() {
    time_exceeded("xdp");
}

/// Pods that do not know the overlay's smaller MTU: client and pod learn it from the nodes.
fn smaller_overlay(attach: &str, wire_offloads: bool) {
    let cluster = if wire_offloads {
        remote_only(|| Lab::builder().pods(&[0, 1]).overlay().wire_offloads(true))
    } else {
        remote_only(|| Lab::builder().pods(&[0, 1]).overlay())
    };
    let lab = &cluster.lab;
    let node = lab.node(2);
    node.pod(1).netns().netlink(async |net| net.set_mtu("eth0", 1500).await).unwrap();
    node.netns()
        .netlink(async |net| {
            net.set_mtu("veth1", 1500).await?;
            net.set_mtu("cni0", 1500).await
        })
        .unwrap();
    let agents =
        Agent::start_first(1, lab, |agent| agent.attach(attach).devices(&["eth0", "flannel.1"])).unwrap();
    for family in Family::BOTH {
        let to = cluster.at(1, family, PORT);
        let capture = Capture::start(lab.client().netns(), "eth0").unwrap();
        transfer(lab.client().netns(), to, 4_000_000).unwrap();
        let frames = capture.finish_valid().unwrap();
        let wanted = if family == Family::V4 { (3, 4) } else { (2, 0) };
        let told = frames.iter().any(|frame| error_about(frame, to) == Some(wanted));
        assert!(told, "{attach} {family:?}: the client was not told");
    }
    assert!(agents[0].packets("tc-ingress", "rejected-mtu-exceeded").unwrap() >= 2);
}

#[test]
fn too_long_for_the_overlay_by_tc() {
    smaller_overlay("tc", true);
}

#[test]
fn too_long_for_the_overlay_by_generic_xdp() {
    smaller_overlay("xdp-generic", false);
}

/// The route back to the client has the smaller MTU: the endpoint gets the error.
fn smaller_way_back(attach: &str) {
    let cluster = remote_only(|| Lab::builder().pods(&[0, 1]));
    let lab = &cluster.lab;
    for (family, route) in
        [("-4", "default via 172.18.0.1 mtu lock 1400"), ("-6", "default via fd00:172:18::1 mtu 1400")]
    {
        let mut command = Command::new("ip");
        command.arg(family).args(["route", "replace"]).args(route.split(' '));
        let output = lab.node(1).netns().output(command).unwrap();
        assert!(output.status.success(), "{output:?}");
    }
    let agents = Agent::start_first(1, lab, |agent| agent.attach(attach)).unwrap();
    for family in Family::BOTH {
        transfer(lab.client().netns(), cluster.at(1, family, PORT), 4_000_000).unwrap();
    }
    assert!(agents[0].packets("tc-ingress", "rejected-mtu-exceeded").unwrap() >= 2);
}

#[test]
fn too_long_for_the_way_back_by_tc() {
    smaller_way_back("tc");
}

#[test]
fn too_long_for_the_way_back_by_xdp() {
    smaller_way_back("xdp");
}
