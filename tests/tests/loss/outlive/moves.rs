//! Connections to external IPs, and to node ports on an address that moves to another node, outlive
//! the node in front, as those to addresses of load balancers do.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::thread::sleep;

use traffic_policy_testing::cluster::{Cluster, TARGET};
use traffic_policy_testing::lab::{Family, Lab};
use traffic_policy_testing::object::{Port, Service, lease};
use traffic_policy_testing::traffic::HeldConnections;

use super::{
    CONNECTIONS, LOOK, OUTLIVE, PAUSE, VIPS, assert_none_cut, await_endpoints, front_vanishes, hold, report,
    sent_on, some, start_with,
};
use crate::cluster::NODE_PORT;
use crate::quiet;

/// Addresses in the network of the nodes that no Node object has.
const FLOATING: [IpAddr; 2] = [
    IpAddr::V4(Ipv4Addr::new(172, 18, 0, 150)),
    IpAddr::V6(Ipv6Addr::new(0xfd00, 0x172, 0x18, 0, 0, 0, 0, 0x150)),
];
const AT_FLOATING: [&str; 2] = ["--node-port-addresses", "primary,172.18.0.150/32,fd00:172:18::150/128"];
/// The pods that are endpoints at first, of nodes 3 and 4; those in front have none.
const PODS: [u8; 4] = [0, 0, 4, 4];
const ENDPOINTS: [usize; 4] = [0, 1, 4, 5];

fn external() -> Service {
    Service::new("web").port(Port::tcp(80, TARGET)).external_ip(VIPS[0]).external_ip(VIPS[1])
}

fn node_port() -> Service {
    Service::new("web").port(Port::tcp(80, TARGET).node_port(NODE_PORT))
}

/// Replaces two of four pods, whose servers still run.
fn replace_pods(cluster: &Cluster, service: &Service) {
    for backends in [&[0, 1, 2, 4, 5][..], &[1, 2, 4, 5], &[1, 2, 4, 5, 6], &[1, 2, 4, 6]] {
        cluster.manifests.endpoints(service, &some(cluster, backends)).unwrap();
        await_endpoints(cluster, backends.len());
    }
}

#[track_caller]
fn assert_sent_on(cluster: &Cluster) {
    let packets = sent_on(cluster);
    println!("{packets} packets were sent on to a former owner");
    assert!(packets > 0, "the control: no former owner was needed");
}

fn an_external_ip(attach: &str, family: Family) {
    let _alone = quiet::alone();
    let cluster = start_with(&external(), &PODS, attach, &OUTLIVE, &ENDPOINTS);
    let held = hold(&cluster, family);
    replace_pods(&cluster, &external());
    front_vanishes(&cluster);
    let report = report(&format!("{attach}, {family:?}, an external IP"), held);
    assert_none_cut(&cluster, family, &report);
    assert_sent_on(&cluster);
}

#[test]
fn an_external_ip_tc() {
    an_external_ip("tc", Family::V6);
}

#[test]
fn an_external_ip_xdp() {
    an_external_ip("xdp", Family::V4);
}

/// Starts agents that serve node ports on the floating addresses, which nodes 1 and 2 have at hand;
/// the first one answers for them.
fn floating(attach: &str) -> Cluster {
    let lab = Lab::builder().pods(&PODS).wire_offloads(attach == "tc");
    let mut cluster = Cluster::start(lab).unwrap();
    let lease = |node| lease::tunnels(node, &Family::BOTH, "ipip,udp");
    let leases: Vec<_> = cluster.lab.nodes().iter().map(lease).collect();
    cluster.manifests.write("leases", &leases).unwrap();
    cluster.manifests.apply(&node_port(), &some(&cluster, &ENDPOINTS)).unwrap();
    for number in [1, 2] {
        let node = cluster.lab.node(number).netns();
        node.sysctls(&[("net.ipv4.conf.eth0.arp_ignore", "1")]).unwrap();
        has_floating(&cluster, number, "lo");
    }
    has_floating(&cluster, 1, "eth0");
    cluster.launch(|agent| agent.attach(attach).flags(&OUTLIVE).flags(&AT_FLOATING)).unwrap();
    cluster
}

fn has_floating(cluster: &Cluster, number: usize, device: &str) {
    let node = cluster.lab.node(number).netns();
    node.netlink(async |net| {
        for address in FLOATING {
            net.floating_address(device, address).await?;
        }
        Ok(())
    })
    .unwrap();
}

/// The first node vanishes; the second one takes its floating addresses, and says so to the router.
fn floats_away(cluster: &Cluster, family: Family) {
    cluster.lab.cut(cluster.lab.node(1)).unwrap();
    has_floating(cluster, 2, "eth0");
    let moved = FLOATING[usize::from(family == Family::V6)];
    cluster.lab.router().netlink(async |net| net.delete_neighbour(moved).await).unwrap();
    // Requests that were under way are sent again, after 200 ms at least, and then twice that.
    sleep(3 * LOOK);
}

fn a_node_port(attach: &str, family: Family) {
    let _alone = quiet::alone();
    let cluster = floating(attach);
    let target = SocketAddr::new(FLOATING[usize::from(family == Family::V6)], NODE_PORT);
    let held = HeldConnections::start(cluster.lab.client().netns(), &[target], CONNECTIONS, PAUSE).unwrap();
    // Every connection is established, and has had requests.
    sleep(LOOK);
    replace_pods(&cluster, &node_port());
    floats_away(&cluster, family);
    let report = report(&format!("{attach}, {family:?}, a node port whose address moves"), held);
    assert_none_cut(&cluster, family, &report);
    assert_sent_on(&cluster);
}

#[test]
fn a_node_port_tc() {
    a_node_port("tc", Family::V4);
}

#[test]
fn a_node_port_xdp() {
    a_node_port("xdp", Family::V6);
}
