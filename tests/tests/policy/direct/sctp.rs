//! Associations: the endpoint sees the client. With `tunnel` it does where the port stays, and its
//! replies, aggregates among them, come back through the node in front. The pair of devices that
//! divides these comes with the first Service that needs it, and goes with `cleanup`.

use std::net::SocketAddr;
use std::process::Command;
use std::time::Duration;

use nix::net::if_::if_nametoindex;
use traffic_policy_testing::capture;
use traffic_policy_testing::cluster::{Cluster, TARGET};
use traffic_policy_testing::lab::{Family, Lab};
use traffic_policy_testing::netns::Namespace;
use traffic_policy_testing::object::{Port, Service, lease};
use traffic_policy_testing::pace::until;
use traffic_policy_testing::traffic::associations::{self, Association, Server};

use super::{NODE_PORT, VIPS};

/// Bytes in each direction.
const BYTES: u64 = 1_000_000;
const MTU: usize = 1500;
const ETHERNET: usize = 14;
/// The time limit; an emulated processor loads the programs in half a minute.
const PATIENCE: Duration = Duration::from_secs(30);
const DIVIDER: &str = "tp-sctp0";

/// The ways of replies that nodes of this version name.
const BACK: &str = "tunnel,tunnel-sctp";

fn service(forwarding: &str) -> Service {
    let service = Service::new("web").port(Port::sctp(TARGET, TARGET).node_port(NODE_PORT));
    VIPS.into_iter().fold(service, Service::vip).annotation("traffic-policy.io/forwarding", forwarding)
}

/// Two nodes and a pod on the second. `replies`: the ways of replies that both nodes name.
fn start(attach: &str, dispatch: &str, forwarding: &str, replies: &str) -> Cluster {
    let mut cluster = Cluster::start(Lab::builder().pods(&[0, 1]).wire_offloads(attach == "tc")).unwrap();
    let leases = cluster.lab.nodes().iter().map(|node| {
        let mut lease = lease::tunnels(node, &Family::BOTH, dispatch);
        lease["metadata"]["annotations"]["traffic-policy.io/opens-reply"] = replies.into();
        lease
    });
    let leases: Vec<_> = leases.collect();
    cluster.manifests.write("leases", &leases).unwrap();
    cluster.manifests.apply(&service(forwarding), &cluster.backends()).unwrap();
    cluster.launch(|agent| agent.attach(attach)).unwrap();
    for vip in VIPS {
        cluster.lab.route_vip(vip, cluster.lab.node(1)).unwrap();
    }
    cluster
}

/// Runs a program on a node, and returns what it prints.
fn said(node: &Namespace, program: &str, arguments: &[&str]) -> String {
    let mut command = Command::new(program);
    command.args(arguments);
    let output = node.output(command).unwrap();
    assert!(output.status.success(), "{program} {arguments:?}: {output:?}");
    String::from_utf8(output.stdout).unwrap()
}

fn has_divider(node: &Namespace) -> bool {
    node.run(|| if_nametoindex(DIVIDER).is_ok())
}

/// Messages and a megabyte each way. `sees`: whether the pod sees the client behind the frontend
/// with its own port, and behind the node port.
fn live(test: &str, [attach, dispatch, forwarding, replies]: [&str; 4], sees: [bool; 2]) {
    if !associations::are_there() {
        let why = "this kernel has no SCTP (`cargo xtask vm test policy::direct::sctp`)";
        traffic_policy_testing::skipped(test, why);
        return;
    }
    let cluster = start(attach, dispatch, forwarding, replies);
    let pod = cluster.lab.pods().next().unwrap();
    let servers = Family::BOTH.map(|family| Server::start(pod, family, TARGET).unwrap());
    let client = cluster.lab.client();
    let [front, home] = &cluster.agents[..] else { unreachable!("two nodes") };
    for (family, vip) in Family::BOTH.into_iter().zip(VIPS) {
        let targets = [SocketAddr::new(vip, TARGET), cluster.at(1, family, NODE_PORT)];
        for (to, sees) in targets.into_iter().zip(sees) {
            let what = format!("{attach}, {dispatch}, {forwarding} to {to}");
            let from = client.address(family);
            let front = cluster.lab.source_towards_pods(cluster.lab.node(1), family);
            let seen = if sees { from } else { front };
            let mut association = Association::open(client.netns(), SocketAddr::new(from, 0), to).unwrap();
            for bytes in [1, 300, 5000] {
                let answer = association.ask(bytes).unwrap_or_else(|error| panic!("{what}: {error:#}"));
                assert_eq!(answer, format!("{} {seen} {bytes}", pod.name), "{what}");
            }
            let mut burst = || association.burst(BYTES).unwrap_or_else(|error| panic!("{what}: {error:#}"));
            let longest = capture::longest(pod.netns(), "eth0", &mut burst).unwrap();
            assert!(longest.sent > MTU + ETHERNET, "{what}: no aggregates, at most {} bytes", longest.sent);
            assert_eq!(association.ask(7).unwrap(), format!("{} {seen} 7", pod.name), "{what}");
            association.shut_down().unwrap();
        }
    }
    drop(servers);
    let hook = if attach == "tc" { "tc-ingress" } else { "xdp" };
    let opened = front.packets(hook, "replied-opened").unwrap();
    let back = home.packets("tc-egress", "replied-to-front").unwrap();
    let what = format!("{attach}, {dispatch}, {forwarding}");
    println!("{what}: {back} replies to the node in front, which has opened {opened}");
    let come_back = replies == BACK && forwarding == "tunnel";
    assert_eq!((opened > 0, back > 0), (come_back, come_back), "{what}");
    for (hook, outcome) in [("tc-egress", "dropped-no-route"), ("tc-ingress", "dropped-sctp-fragment")] {
        assert_eq!(home.packets(hook, outcome).unwrap(), 0, "{what}: {outcome}");
    }
}

#[test]
fn come_back_through_tc_within_ip() {
    live("come_back_through_tc_within_ip", ["tc", "ipip,udp", "tunnel", BACK], [true, false]);
}

#[test]
fn come_back_through_xdp_within_udp() {
    live("come_back_through_xdp_within_udp", ["xdp", "udp,ipip", "tunnel", BACK], [true, false]);
}

/// Packets that leave no room for an outer one are the first that the client sends.
#[test]
fn are_answered_by_the_other_node_tc() {
    live("are_answered_by_the_other_node_tc", ["tc", "udp,ipip", "direct", BACK], [true; 2]);
}

#[test]
fn are_answered_by_the_other_node_xdp() {
    live("are_answered_by_the_other_node_xdp", ["xdp", "ipip,udp", "direct", BACK], [true; 2]);
}

/// A node of an earlier version opens requests, but its aggregates would be lost.
#[test]
fn use_snat_towards_a_node_that_says_nothing_of_it() {
    let test = "use_snat_towards_a_node_that_says_nothing_of_it";
    live(test, ["tc", "ipip,udp", "tunnel", "tunnel"], [false; 2]);
}

#[test]
fn their_device_comes_with_a_service_and_goes_with_cleanup() {
    let mut cluster = start("tc", "ipip,udp", "tunnel", BACK);
    let home = cluster.lab.node(2).netns().clone();
    until("the device that divides aggregates", PATIENCE, || has_divider(&home));
    let features = || said(&home, "ethtool", &["-k", DIVIDER]);
    let are_off = || {
        let features = features();
        ["tx-sctp-segmentation: off", "tx-checksum-sctp: off"].iter().all(|off| features.contains(off))
    };
    assert!(are_off(), "{}", features());
    // Somebody removes it; the agent is told of the device.
    said(&home, "ip", &["link", "delete", DIVIDER]);
    until("the device that somebody has removed", PATIENCE, || has_divider(&home));
    until("the device that divides", PATIENCE, are_off);
    // Or shuts its peer down, so that nothing would arrive.
    // Not by its name, which there is not at each moment: the agent makes the pair anew.
    let passes = || {
        let links = said(&home, "ip", &["-oneline", "link", "show"]);
        links.lines().any(|link| link.contains(DIVIDER) && link.contains("LOWER_UP"))
    };
    said(&home, "ip", &["link", "set", "tp-sctp1", "down"]);
    until("the device that passes packets", PATIENCE, passes);
    until("the device that divides", PATIENCE, are_off);
    // It outlives the agent, as the flows do.
    cluster.manifests.service(&service("snat")).unwrap();
    cluster.agents[1].kill().unwrap();
    assert!(has_divider(&home));
    cluster.agents[1].start_again().unwrap();
    cluster.agents[1].wait_ready(PATIENCE).unwrap();
    assert!(has_divider(&home));
    cluster.agents[1].stop().unwrap();
    assert!(has_divider(&home));
    assert!(cluster.agents[1].command(&["cleanup", "--force"]).unwrap().status.success());
    assert!(!has_divider(&home), "{}", cluster.agents[1].log());
}

/// The agent leaves it alone.
#[test]
fn a_device_of_another_with_that_name_stays() {
    let mut cluster = Cluster::start(Lab::builder().pods(&[0, 1])).unwrap();
    let home = cluster.lab.node(2).netns().clone();
    said(&home, "ip", &["link", "add", DIVIDER, "type", "veth", "peer", "name", "other"]);
    let index = || home.run(|| if_nametoindex(DIVIDER).unwrap());
    let before = index();
    let leases: Vec<_> =
        cluster.lab.nodes().iter().map(|node| lease::tunnels(node, &Family::BOTH, "ipip,udp")).collect();
    cluster.manifests.write("leases", &leases).unwrap();
    cluster.manifests.apply(&service("tunnel"), &cluster.backends()).unwrap();
    cluster.launch(|agent| agent.attach("tc")).unwrap();
    let said = ["replies of SCTP cannot go back", "the device tp-sctp0 is not the agent's"];
    cluster.agents[1].wait_said(&said, PATIENCE).unwrap();
    cluster.agents[1].stop().unwrap();
    assert!(cluster.agents[1].command(&["cleanup", "--force"]).unwrap().status.success());
    assert_eq!(index(), before);
}
