//! Nodes whose endpoints do not answer, or seem not to, while the node lives: none is left out.
//! Most cases end by cutting the node off; it must be left out then, so the test could fail.

use std::net::{IpAddr, SocketAddr};
use std::thread::sleep;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use socket2::{Domain, Socket, Type};
use traffic_policy_testing::cluster::TARGET;
use traffic_policy_testing::flood::{STRANGERS, Variation, Wire, stranger};
use traffic_policy_testing::lab::{Family, Node, plan};
use traffic_policy_testing::nftables;
use traffic_policy_testing::pace::until;
use traffic_policy_testing::packet::{Packet, flag};

use crate::watched::{NODE_PORT, Watched};

/// Drops packets that arrive at a node, or are forwarded by it, by an expression of nftables.
fn drop_at(node: &Node, what: &str) {
    let rules = format!(
        "table ip deaf {{ chain early {{ type filter hook prerouting priority -300; {what} drop\n }}\n }}\n"
    );
    node.netns().feed("nft", &["-f", "-"], &rules).unwrap();
}

#[test]
fn answers_that_take_another_way_and_forged_syns() {
    let mut watched = Watched::start();
    a_node_whose_answers_take_another_way(&watched);
    watched.begin_again();
    forged_syns_whose_sources_never_answer(&watched);
}

#[test]
fn an_agent_that_gets_no_processor_and_nodes_of_which_more_than_half_are_dead() {
    let mut watched = Watched::start();
    an_agent_that_gets_no_processor(&watched);
    watched.begin_again();
    no_more_than_half_of_the_nodes_are_left_out(&watched);
}

#[test]
fn a_pod_that_drops_everything() {
    let watched = Watched::start();
    let pod = watched.far().pod(1);
    pod.netns().nft_drop_input(nftables::Family::Ip, "deaf").unwrap();
    watched.connect(3);
    watched.none_is_dead("a deaf pod", true);
    // Only ARP is left of the node as well.
    watched.far().netns().nft_drop_input(nftables::Family::Ip, "firewall").unwrap();
    watched.connect(3);
    watched.none_is_dead("a deaf pod behind a firewall that eats the questions", true);
    watched.a_dead_one_is("a deaf pod");
}

#[test]
fn an_endpoint_whose_accept_queue_is_full() {
    let mut watched = Watched::start();
    let pod = watched.far().pod(1).name.clone();
    watched.cluster.stop_server(&pod);
    let at = SocketAddr::new(watched.far().pod(1).address(Family::V4), TARGET);
    let listener = watched.far().pod(1).netns().run(|| {
        let socket = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
        socket.set_reuse_address(true).unwrap();
        socket.bind(&at.into()).unwrap();
        socket.listen(0).unwrap();
        socket
    });
    watched.connect(3);
    watched.none_is_dead("a full accept queue", true);
    watched.a_dead_one_is("a full accept queue");
    drop(listener);
}

#[test]
fn an_endpoint_that_only_resets() {
    let mut watched = Watched::start();
    let pod = watched.far().pod(1).name.clone();
    watched.cluster.stop_server(&pod);
    let report = watched.connect(2);
    assert!(report.failed > 0, "the control: it resets: {report}");
    watched.none_is_dead("resets", false);
    watched.a_dead_one_is("resets");
}

#[test]
fn a_way_that_loses_packets() {
    let watched = Watched::start();
    for (percent, seconds) in [(10, 2), (30, 2), (50, 4)] {
        drop_at(watched.far(), &format!("numgen random mod 100 < {percent}"));
        watched.connect(seconds);
        watched.none_is_dead(&format!("{percent} % loss"), false);
        watched.far().netns().delete_nft_table(nftables::Family::Ip, "deaf").unwrap();
    }
    watched.a_dead_one_is("loss");
}

/// ARP and NDP are lost as well, and have to be asked again each second. The node may be found
/// dead, but not for good: after each of a few deaths it has to answer twice as long.
#[test]
fn a_way_that_loses_packets_of_all_kinds() {
    let watched = Watched::start();
    let lab = &watched.cluster.lab;
    let between = r#"iifname { "node-1", "node-3" } oifname { "node-1", "node-3" }"#;
    let mut before = 0.0;
    for (percent, most) in [(30, 2.5), (50, 4.5)] {
        watched.on_switch(&[("forward", &format!("{between} numgen random mod 100 < {percent}"))]);
        std::thread::scope(|scope| {
            let load = scope.spawn(|| watched.connect(4));
            while !load.is_finished() {
                lab.flush_neighbours().unwrap();
                // The interval at which the kernel would ask by itself.
                sleep(Duration::from_secs(1));
            }
        });
        watched.on_switch(&[]);
        let deaths = watched.suspicions("dead") - before;
        println!("{percent} % loss: {deaths} deaths, left out: {:?}", watched.left_out());
        assert!(deaths < most, "{percent} % loss: {deaths} deaths: {}", watched.agent.log());
        before += deaths;
        until("the node to be back", Duration::from_secs(80), || watched.left_out().is_empty());
    }
    let report = watched.connect(2);
    assert!(report.is_clean() && report.by_pod.len() == 3, "{report}");
    let suspicions = watched.suspicions("alive") + before;
    assert!(suspicions > 0.5, "nothing was suspected, so nothing is shown");
    watched.a_dead_one_is("loss of all kinds");
}

/// The node's answers return through the router (an asymmetric route).
fn a_node_whose_answers_take_another_way(watched: &Watched) {
    let lab = &watched.cluster.lab;
    let here = lab.node(1).address(Family::V4);
    let router = IpAddr::from(plan::gateway(0).v4);
    watched.far().netns().netlink(async |net| net.route(here, 32, router).await).unwrap();
    let report = watched.connect(2);
    assert_eq!(report.failed, 0, "{report}");
    watched.none_is_dead("an asymmetric route", false);
    watched.a_dead_one_is("an asymmetric route");
    watched.far().netns().netlink(async |net| net.delete_route(here, 32).await).unwrap();
}

/// Forged SYNs: the endpoints send SYN-ACKs, so no node is suspected.
fn forged_syns_whose_sources_never_answer(watched: &Watched) {
    let lab = &watched.cluster.lab;
    let quietly = lab.router().netlink(async |net| {
        let [(network, prefix), _] = STRANGERS;
        net.route(network, prefix, lab.client().address(Family::V4)).await
    });
    quietly.unwrap();
    let node = lab.node(1);
    let wire = Wire::open(lab.router(), ("br0", &node.name), plan::gateway(0), node.addresses).unwrap();
    let target = (node.address(Family::V4), 0);
    let until = Instant::now() + Duration::from_secs(2);
    let mut number = 0;
    while Instant::now() < until {
        let copies = (number..number + 100).map(|number: u32| Variation {
            source: (stranger(Family::V4, number), 1024 + (number & 0x7fff) as u16),
            destination_port: NODE_PORT,
            sequence: number.wrapping_mul(0x9e37_79b9),
        });
        wire.flood(Packet::tcp(target, target, flag::SYN), copies).unwrap();
        number += 100;
        // Some thousand a second: the pods answer each.
        sleep(Duration::from_millis(20));
    }
    watched.none_is_dead("forged SYNs", false);
    watched.a_dead_one_is("forged SYNs");
}

/// A neighbour that answers ARP for a dead node keeps that node in the lists, but removes no living
/// one.
#[test]
fn a_neighbour_that_answers_arp_for_a_dead_node() {
    let watched = Watched::start();
    let (spoofer, far) = (watched.cluster.lab.node(2), watched.far());
    let address = far.address(Family::V4);
    watched.cluster.lab.cut(far).unwrap();
    spoofer.netns().netlink(async |net| net.address("eth0", address, 24).await).unwrap();
    spoofer.netns().nft_drop_input(nftables::Family::Ip, "spoofer").unwrap();
    watched.connect(4);
    watched.none_is_dead("spoofed ARP", true);
}

/// More than half of the nodes are gone: the agent leaves out at most half of them.
fn no_more_than_half_of_the_nodes_are_left_out(watched: &Watched) {
    let lab = &watched.cluster.lab;
    lab.cut(lab.node(2)).unwrap();
    lab.cut(lab.node(3)).unwrap();
    watched.connect(4);
    let left_out = watched.left_out();
    assert_eq!(left_out.len(), 1, "{left_out:?}: {}", watched.agent.log());
}

/// The agent stands still while it asks: an answer that it reads late is an answer.
fn an_agent_that_gets_no_processor(watched: &Watched) {
    watched.far().pod(1).netns().nft_drop_input(nftables::Family::Ip, "deaf").unwrap();
    let pid = Pid::from_raw(watched.agent.pid().unwrap().try_into().unwrap());
    std::thread::scope(|scope| {
        let load = scope.spawn(|| watched.connect(6));
        while !load.is_finished() {
            kill(pid, Signal::SIGSTOP).unwrap();
            // Longer than a question may take.
            sleep(Duration::from_millis(500));
            kill(pid, Signal::SIGCONT).unwrap();
            // Long enough to begin the next one.
            sleep(Duration::from_millis(130));
        }
    });
    watched.connect(3);
    watched.none_is_dead("an agent that stands still", true);
    watched.a_dead_one_is("an agent that stands still");
    watched.far().pod(1).netns().delete_nft_table(nftables::Family::Ip, "deaf").unwrap();
}
