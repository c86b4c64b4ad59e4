//! An MTU of 9,000 bytes: frames of several buffers, which XDP translates like all others.

use traffic_policy_testing::agent::Agent;
use traffic_policy_testing::cluster::{Cluster, Protocol};
use traffic_policy_testing::lab::{Family, Lab};
use traffic_policy_testing::netlink::Netlink;
use traffic_policy_testing::object::{Backend, Policy};
use traffic_policy_testing::rows;
use traffic_policy_testing::traffic::transfer::transfer;

const REMOTE: u16 = 30080;
const LOCAL: u16 = 30081;
const NONE: u16 = 30082;
const MTU: u32 = 9000;
const BYTES: u64 = 40_000_000;

/// Checks a transfer; `hook` is where its packets must be translated.
fn intact(attach: &str, hook: &str) {
    let cluster = Cluster::start(Lab::builder().pods(&[1, 1])).unwrap();
    let jumbo = async |net: &Netlink, device: &str| net.set_mtu(device, MTU).await;
    cluster.lab.each_device(|_, _| true, jumbo).unwrap();
    for (name, port, number) in [("remote", REMOTE, 2), ("local", LOCAL, 1)] {
        let backend = Backend::of(cluster.lab.node(number).pod(1));
        cluster.manifests.apply(&Cluster::node_port(name, Policy::Cluster, port), &[backend]).unwrap();
    }
    cluster.manifests.apply(&Cluster::node_port("none", Policy::Cluster, NONE), &[]).unwrap();
    let agents = Agent::start_first(1, &cluster.lab, |agent| agent.attach(attach)).unwrap();
    let count = |hook: &str, outcome: &str| agents[0].packets(hook, outcome).unwrap();
    for family in Family::BOTH {
        for (port, there, back) in
            [(REMOTE, Some("forwarded"), Some("replied")), (LOCAL, Some("delivered"), None)]
        {
            let before = [there, back].map(|outcome| outcome.map_or(0, |outcome| count(hook, outcome)));
            let to = cluster.at(1, family, port);
            let report = transfer(cluster.lab.client().netns(), to, BYTES).unwrap();
            cluster.answer(Protocol::Udp, to).unwrap();
            for (outcome, before) in [there, back].into_iter().zip(before) {
                let Some(outcome) = outcome else { continue };
                let packets = count(hook, outcome) - before;
                println!("{attach} {to}: {report:?}, {outcome} {packets} by {hook}");
                // Frames that fit into a page would be more than twice as many. Acknowledgements
                // are counted, too.
                let fewest = BYTES / u64::from(MTU);
                assert!(
                    (fewest..2 * fewest + fewest / 2).contains(&packets),
                    "{packets} {outcome} by {hook}"
                );
            }
        }
        // TC answers frames of several buffers; in generic XDP each frame is in one buffer.
        let refused_by = if attach == "xdp" { "tc-ingress" } else { hook };
        let before = count(refused_by, "rejected-no-endpoint");
        let none = Protocol::Udp.probe(cluster.at(1, family, NONE)).length(8900);
        let outcome = none.from(cluster.lab.client().netns()).unwrap();
        assert!(outcome.is_refused_at_once(), "{attach} {family:?}: {outcome:?}");
        assert_eq!(
            count(refused_by, "rejected-no-endpoint") - before,
            1,
            "{attach} {family:?} by {refused_by}"
        );
    }
    for outcome in
        ["dropped-internal-error", "dropped-mtu-exceeded", "passed-malformed", "passed-missed-tail-call"]
    {
        for hook in ["xdp", "tc-ingress", "tc-egress"] {
            assert_eq!(count(hook, outcome), 0, "{attach} {hook} {outcome}");
        }
    }
}

rows! {
    fn by_native_xdp() = intact("xdp", "xdp");
    fn by_generic_xdp() = intact("xdp-generic", "xdp");
    fn by_tc() = intact("tc", "tc-ingress");
}
