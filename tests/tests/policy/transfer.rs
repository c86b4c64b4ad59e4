//! 100 MB each way at once, every byte compared: through an endpoint of another node and through
//! one of this node.

use traffic_policy_testing::agent::Agent;
use traffic_policy_testing::cluster::{Cluster, Protocol};
use traffic_policy_testing::lab::{Family, Lab};
use traffic_policy_testing::object::{Backend, Policy};
use traffic_policy_testing::rows;
use traffic_policy_testing::traffic::transfer::transfer;

const REMOTE: u16 = 30080;
const LOCAL: u16 = 30081;
const BYTES: u64 = 100_000_000;

fn intact(attach: &str, wire_offloads: bool) {
    let cluster = Cluster::start(Lab::builder().pods(&[1, 1]).wire_offloads(wire_offloads)).unwrap();
    for (name, port, number) in [("remote", REMOTE, 2), ("local", LOCAL, 1)] {
        let backend = Backend::of(cluster.lab.node(number).pod(1));
        cluster.manifests.apply(&Cluster::node_port(name, Policy::Cluster, port), &[backend]).unwrap();
    }
    let agents = Agent::start_first(1, &cluster.lab, |agent| agent.attach(attach)).unwrap();
    for (family, port) in
        [(Family::V4, REMOTE), (Family::V6, REMOTE), (Family::V4, LOCAL), (Family::V6, LOCAL)]
    {
        let to = cluster.at(1, family, port);
        let report = transfer(cluster.lab.client().netns(), to, BYTES).unwrap();
        println!("{attach} {to}: {report:?}");
        // Datagrams are forwarded during the transfer and after it.
        cluster.answer(Protocol::Udp, to).unwrap();
    }
    for outcome in
        ["dropped-internal-error", "dropped-mtu-exceeded", "passed-malformed", "passed-missed-tail-call"]
    {
        for hook in ["xdp", "tc-ingress", "tc-egress"] {
            assert_eq!(agents[0].packets(hook, outcome).unwrap(), 0, "{attach} {hook} {outcome}");
        }
    }
}

rows! {
    fn by_native_xdp() = intact("xdp", false);
    fn by_generic_xdp() = intact("xdp-generic", false);
    /// Aggregates of up to 64 KB with unfinished checksums, as a veth has them by default.
    fn by_tc_with_offloads() = intact("tc", true);
}
