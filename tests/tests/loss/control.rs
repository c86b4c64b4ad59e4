//! The measurement itself: without an agent in the path it counts nothing; with a broken path it
//! counts what is missing.

use std::net::SocketAddr;
use std::thread::sleep;
use std::time::Duration;

use traffic_policy_testing::lab::{Family, Lab};
use traffic_policy_testing::traffic::server::Identity;
use traffic_policy_testing::traffic::{Faults, Ledger, Server};

use crate::cluster::{self, NODE_PORT, PATIENCE, POD_PORT};
use crate::meters::{Meters, both};
use crate::quiet;

/// The same load over the same devices, while agents of another cluster are killed and started as
/// in every other test: any loss here is caused by the machine.
#[test]
fn the_machine_loses_nothing() {
    let _alone = quiet::alone();
    let mut busy = cluster::start(&[1, 1, 0], "tc");
    let lab = Lab::builder().nodes(1).build().unwrap();
    let node = lab.node(1);
    let ledger = Ledger::default();
    let identity = Identity { pod: "host".to_owned(), node: node.name.clone() };
    let _server = Server::start_in(node.netns(), POD_PORT, identity, Faults::default(), &ledger).unwrap();
    for family in Family::BOTH {
        let targets = both(family, |family| SocketAddr::new(node.address(family), POD_PORT));
        let meters =
            Meters::start(&format!("control {family:?}, no agent in the path"), &lab, &targets, &ledger);
        busy.kill_agents().unwrap();
        busy.start_agents_again(PATIENCE).unwrap();
        // The load continues after the restart of the other lab's agents.
        sleep(Duration::from_secs(1));
        meters.finish(&lab);
    }
}

/// The meters detect a gap: the packet path is removed with the agent, as it would be if nothing
/// were pinned.
#[test]
fn a_gap_is_seen() {
    let _alone = quiet::alone();
    for attach in ["tc", "xdp"] {
        let mut cluster = cluster::start(&[1, 1, 0], attach);
        let targets = both(Family::V4, |family| cluster.at(1, family, NODE_PORT));
        let meters = Meters::start(
            &format!("{attach}, with a gap on purpose"),
            &cluster.lab,
            &targets,
            &cluster.ledger,
        );
        // Load before the gap.
        sleep(Duration::from_millis(300));
        cluster.kill_agents().unwrap();
        cluster.agents.iter().for_each(|agent| {
            assert!(agent.command(&["cleanup"]).unwrap().status.success());
        });
        cluster.start_agents_again(PATIENCE).unwrap();
        let counted = meters.stop(&cluster.lab);
        assert!(!counted.datagrams.is_clean() && !counted.held.is_clean() && !counted.new.is_clean());
    }
}
