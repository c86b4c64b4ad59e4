//! Aggregates: of UDP datagrams that a client on the same machine hands over whole (`UDP_SEGMENT`),
//! of segments, cut on the way between the nodes, and those that the endpoint's node could make of
//! outer packets.

use std::net::{SocketAddr, UdpSocket};
use std::process::Command;
use std::time::Duration;

use nix::sys::socket::{setsockopt, sockopt};
use traffic_policy_testing::agent::Agent;
use traffic_policy_testing::cluster::Cluster;
use traffic_policy_testing::lab::{Family, Lab};
use traffic_policy_testing::object::lease;
use traffic_policy_testing::pace::scaled;
use traffic_policy_testing::traffic::transfer::transfer;

use super::{NODE_PORT, service};

const DATAGRAMS: usize = 20;
/// The bytes of each.
const SEGMENT: usize = 700;

fn start(forwarding: &str, dispatch: &str) -> Cluster {
    let mut cluster = Cluster::start(Lab::builder().pods(&[0, 1]).wire_offloads(true)).unwrap();
    let of = |node| lease::tunnels(node, &Family::BOTH, dispatch);
    let leases: Vec<_> = cluster.lab.nodes().iter().map(of).collect();
    cluster.manifests.write("leases", &leases).unwrap();
    cluster.manifests.apply(&service(), &cluster.backends()).unwrap();
    let flags = ["--forwarding", forwarding, "--dispatch", dispatch];
    cluster.launch(|agent| agent.attach("tc").flags(&flags)).unwrap();
    cluster
}

/// Sends a datagram, then an aggregate of many, and returns how many of those were answered.
fn ask(to: SocketAddr) -> usize {
    let any = if to.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" };
    let socket = UdpSocket::bind(any).unwrap();
    socket.set_read_timeout(Some(scaled(Duration::from_secs(2)))).unwrap();
    socket.connect(to).unwrap();
    let mut buffer = [0; 2048];
    socket.send(&[b'a'; SEGMENT]).unwrap();
    socket.recv(&mut buffer).expect("the first datagram is answered");
    let segment = i32::try_from(SEGMENT).unwrap();
    setsockopt(&socket, sockopt::UdpGsoSegment, &segment).unwrap();
    socket.send(&[b'b'; SEGMENT * DATAGRAMS]).unwrap();
    (0..DATAGRAMS).take_while(|_| socket.recv(&mut buffer).is_ok()).count()
}

fn each_datagram_arrives(cluster: &Cluster, dispatch: &str) {
    let [front, home] = &cluster.agents[..] else { unreachable!("two nodes") };
    for family in Family::BOTH {
        let to = cluster.at(1, family, NODE_PORT);
        let answered = cluster.lab.client().netns().run(|| ask(to));
        assert_eq!(answered, DATAGRAMS, "within {dispatch}, {family:?}");
    }
    // Each aggregate was one packet here.
    assert_eq!(front.packets("tc-ingress", "forwarded-direct").unwrap(), 4, "within {dispatch}");
    println!("delivered within {dispatch}: {}", home.packets("tc-ingress", "delivered").unwrap());
}

/// A card cuts an aggregate when it sends it, and so does the kernel for a card that cannot. Each
/// segment gets the outer header of the first one, with an identification of its own in IPv4.
fn each_segment_says_the_same(cluster: &Cluster, forwarding: &str, dispatch: &str) {
    let [front, home] = &cluster.agents[..] else { unreachable!("two nodes") };
    cluster.lab.router().set_offloads("node-2", false).unwrap();
    let packets = |agent: &Agent, hook, outcome| agent.packets(hook, outcome).unwrap();
    let counts = || {
        let sent = packets(front, "tc-ingress", "forwarded-direct");
        let opened = packets(home, "tc-ingress", "delivered");
        let replies =
            ["replied-local", "replied-to-front"].map(|outcome| packets(home, "tc-egress", outcome));
        [sent, opened, replies[0], replies[1]]
    };
    let before = counts();
    for family in Family::BOTH {
        let to = cluster.at(1, family, NODE_PORT);
        transfer(cluster.lab.client().netns(), to, 3_000_000).unwrap();
    }
    let now = counts();
    let [sent, opened, to_client, to_front] = std::array::from_fn(|number| now[number] - before[number]);
    assert!(opened > 2 * sent, "{sent} became {opened}: aggregates are cut");
    let (wanted, other) = if forwarding == "tunnel" { (to_front, to_client) } else { (to_client, to_front) };
    assert_eq!(other, 0, "{forwarding} within {dispatch}: replies that went the other way, of {wanted}");
    assert!(wanted > 0);
}

/// GRO merges no datagrams whose checksum is 0, which is that of outer packets
/// (`udp_gro_receive_segment`).
/// <https://github.com/torvalds/linux/blob/v6.12/net/ipv4/udp_offload.c>
fn outer_packets_are_not_merged_to_what_is_not_opened(cluster: &Cluster) {
    let agent = &cluster.agents[1];
    let delivered = || agent.packets("tc-ingress", "delivered").unwrap();
    let before = delivered();
    let home = cluster.lab.node(2).netns();
    home.set_gro("eth0", true).unwrap();
    for feature in ["rx-udp-gro-forwarding", "rx-gro-list"] {
        let mut command = Command::new("ethtool");
        command.args(["-K", "eth0", feature, "on"]);
        let output = home.output(command).unwrap();
        assert!(output.status.success(), "{feature}: {output:?}");
        for family in Family::BOTH {
            let to = cluster.at(1, family, NODE_PORT);
            let report = transfer(cluster.lab.client().netns(), to, 3_000_000).unwrap();
            println!("{feature}, {family:?}: {report:?}");
        }
    }
    assert!(delivered() > before + 100);
}

fn aggregates_become_what_they_were_made_of(dispatch: &str) {
    let cluster = start("direct", dispatch);
    each_datagram_arrives(&cluster, dispatch);
    if dispatch == "udp" {
        outer_packets_are_not_merged_to_what_is_not_opened(&cluster);
    }
    each_segment_says_the_same(&cluster, "direct", dispatch);
    let cluster = start("tunnel", dispatch);
    each_segment_says_the_same(&cluster, "tunnel", dispatch);
}

#[test]
fn become_what_they_were_made_of_within_ip() {
    aggregates_become_what_they_were_made_of("ipip");
}

#[test]
fn become_what_they_were_made_of_within_udp() {
    aggregates_become_what_they_were_made_of("udp");
}
