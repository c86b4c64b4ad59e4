//! Reachability in a lab where no agent runs: in each variant, clients have no way to pods.

use std::net::SocketAddr;
use std::time::Duration;

use traffic_policy_testing::lab::{Family, Lab, LabBuilder};
use traffic_policy_testing::pace::scaled;
use traffic_policy_testing::traffic::connections::ask_from;
use traffic_policy_testing::traffic::server::Identity;
use traffic_policy_testing::traffic::{Faults, Ledger, Outcome, Probe, Server};

const PORT: u16 = 8080;
const SOON: Duration = Duration::from_secs(3);
const NEVER: Duration = Duration::from_millis(300);

fn variants() -> [(&'static str, LabBuilder); 5] {
    [
        ("plain", Lab::builder()),
        ("overlay", Lab::builder().overlay()),
        ("two uplinks", Lab::builder().two_uplinks()),
        ("client on the switch", Lab::builder().client_on_switch()),
        ("offloads", Lab::builder().wire_offloads(true).strict_rp_filter()),
    ]
}

#[test]
fn client_reaches_nodes_but_not_pods() {
    for (variant, builder) in variants() {
        let lab = builder.build().unwrap();
        let ledger = Ledger::default();
        let on_node = Identity { pod: "host".to_owned(), node: "node-2".to_owned() };
        let node = lab.node(2);
        let _on_node = Server::start_in(node.netns(), PORT, on_node, Faults::default(), &ledger).unwrap();
        let _in_pod = Server::start(node.pod(1), PORT, &ledger).unwrap();
        for family in Family::BOTH {
            let answer =
                ask_from(lab.client().netns(), SocketAddr::new(node.address(family), PORT), scaled(SOON));
            let answer = answer.unwrap_or_else(|error| panic!("{variant}: {error:#}"));
            assert_eq!(
                (answer.pod.as_str(), answer.client.ip()),
                ("host", lab.client().address(family)),
                "{variant}"
            );
            let pod = SocketAddr::new(node.pod(1).address(family), PORT);
            for namespace in [lab.client().netns(), lab.router()] {
                assert!(
                    ask_from(namespace, pod, NEVER).is_err(),
                    "{variant}: {} has a way to pods",
                    namespace.name()
                );
            }
        }
    }
}

#[test]
fn two_labs_at_once_do_not_meet() {
    let (one, two) = (Lab::builder().nodes(1).build().unwrap(), Lab::builder().nodes(1).build().unwrap());
    let ledger = Ledger::default();
    let _server = Server::start(one.node(1).pod(1), PORT, &ledger).unwrap();
    let address = SocketAddr::new(one.node(1).pod(1).address(Family::V4), PORT);
    assert_eq!(address.ip(), two.node(1).pod(1).address(Family::V4));
    ask_from(one.node(1).netns(), address, scaled(SOON)).unwrap();
    let refused = ask_from(two.node(1).netns(), address, scaled(SOON)).unwrap_err();
    assert!(format!("{refused:#}").contains("refused"), "{refused:#}");
}

#[test]
fn answer_refusal_and_silence_differ() {
    let lab = Lab::builder().nodes(1).build().unwrap();
    let node = lab.node(1);
    let on_node = Identity { pod: "host".to_owned(), node: node.name.clone() };
    let server =
        Server::start_in(node.netns(), PORT, on_node, Faults::default(), &Ledger::default()).unwrap();
    let from = lab.client().netns();
    let targets = Family::BOTH.map(|family| SocketAddr::new(node.address(family), PORT));
    let probes = || targets.iter().flat_map(|target| [Probe::tcp(*target), Probe::udp(*target)]);
    for probe in probes() {
        let answer = probe.source_port(4321).answer(from).unwrap();
        assert_eq!((answer.node.as_str(), answer.client.port()), ("node-1", 4321));
    }
    drop(server);
    for probe in probes() {
        let outcome = probe.from(from).unwrap();
        assert!(outcome.is_refused_at_once(), "{outcome:?}");
    }
    lab.cut(node).unwrap();
    for probe in probes() {
        assert_eq!(probe.from(from).unwrap(), Outcome::Silent);
    }
    lab.mend(node).unwrap();
    from.ping(node.address(Family::V4), scaled(SOON)).unwrap();
}
