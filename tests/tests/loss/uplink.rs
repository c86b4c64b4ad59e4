//! A node's path to the client fails over to its other uplink while no agent runs.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::thread::sleep;
use std::time::Duration;

use traffic_policy_testing::agent::Agent;
use traffic_policy_testing::lab::{Family, Lab, plan};
use traffic_policy_testing::object::{Backend, Manifests};
use traffic_policy_testing::traffic::{Ledger, Outcome, Probe, Server};

use crate::cluster::{NODE_PORT, PATIENCE, POD_PORT, web};
use crate::quiet;

/// The earlier flows and next hops still exist. The packet path does not look up routes again
/// unless an agent reports a change, and the kernel announced this one while no agent ran.
#[test]
fn the_next_agent_notices() {
    let _alone = quiet::alone();
    let lab = Lab::builder().pods(&[0, 1]).two_uplinks().wire_offloads(true).build().unwrap();
    let ledger = Ledger::default();
    let _servers: Vec<_> = lab.pods().map(|pod| Server::start(pod, POD_PORT, &ledger).unwrap()).collect();
    let backends: Vec<_> = lab.pods().map(Backend::of).collect();
    Manifests::of(&lab).unwrap().apply(&web(), &backends).unwrap();
    let mut agents = Agent::start_all(&lab, |agent| agent.devices(&["eth0"])).unwrap();
    agents[0].stop().unwrap();
    let builder = Agent::builder(&lab, lab.node(1)).devices(&["eth0", "eth1"]);
    agents[0] = builder.start().unwrap();
    agents[0].wait_ready(PATIENCE).unwrap();

    let target = SocketAddr::new(lab.node(1).address(Family::V4), NODE_PORT);
    let ask = |port| {
        let probe = Probe::udp(target).source_port(port).limit(Duration::from_millis(300));
        probe.from(lab.client().netns()).unwrap()
    };
    // Requests arrive on eth0, replies leave by eth1, where the default route leads. Each is sent
    // twice, as the first packet to a neighbour that is not resolved leaves no next hop behind.
    let ports = 22_000..22_010_u16;
    assert!(ports.clone().chain(ports.clone()).all(|port| matches!(ask(port), Outcome::Answered(_))));

    agents[0].kill().unwrap();
    let default = IpAddr::V4(Ipv4Addr::UNSPECIFIED);
    let first = plan::gateway(0).of(Family::V4);
    lab.node(1).netns().netlink(async |net| net.route(default, 0, first).await).unwrap();
    lab.second_router().unwrap().netlink(async |net| net.down("client").await).unwrap();
    sleep(Duration::from_millis(300));
    let outcomes: Vec<_> = ports.clone().map(ask).collect();
    assert!(
        outcomes.iter().all(|outcome| *outcome == Outcome::Silent),
        "the old way was not used: {outcomes:?}"
    );

    agents[0].start_again().unwrap();
    agents[0].wait_ready(PATIENCE).unwrap();
    for port in ports {
        assert!(
            matches!(ask(port), Outcome::Answered(_)),
            "a flow still goes the old way: {}",
            agents[0].log()
        );
    }
}
