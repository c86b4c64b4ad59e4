//! Changes on the node and in the cluster that must not affect traffic.

use std::net::{IpAddr, Ipv4Addr};
use std::thread::sleep;
use std::time::{Duration, Instant};

use traffic_policy_testing::agent::Agent;
use traffic_policy_testing::control_plane::ControlPlane;
use traffic_policy_testing::lab::{Family, Lab};
use traffic_policy_testing::object::{Backend, Policy, Port, Service};

use crate::cluster::{self, NODE_PORT, PATIENCE, POD_PORT, web};
use crate::meters::{Meters, both};
use crate::quiet;

const TIME: Duration = Duration::from_secs(3);

/// The number of times that an agent writes the maps while other Services change: fewer would mean
/// little. A busy machine gathers more changes into one.
const SYNCS: usize = 21;

/// Services are created, changed and deleted, until the agent has written the maps often enough.
/// Some share pods with the Service under load as endpoints: that such a Service loses one does not
/// concern the pod itself.
fn services_come_and_go(control_plane: &ControlPlane, backends: &[Backend], agent: &Agent) -> usize {
    let start = Instant::now();
    let mut changes = 0;
    while start.elapsed() < TIME || syncs(agent) < SYNCS {
        assert!(start.elapsed() < PATIENCE, "{changes} changes, written in {} steps", syncs(agent));
        for number in 0..20_u16 {
            let policy = if number % 2 == 0 { Policy::Cluster } else { Policy::Local };
            let service = Service::new(&format!("other-{number}"))
                .policy(policy)
                .port(Port::tcp(80, POD_PORT).node_port(31_000 + number))
                .port(Port::udp(80, POD_PORT).node_port(31_000 + number));
            control_plane.apply(&service, &backends[..usize::from(number) % (backends.len() + 1)]).unwrap();
            sleep(Duration::from_millis(5));
            control_plane.endpoints(&service, backends).unwrap();
            // One round later, the Service of half a round ago is deleted: about ten exist at each
            // moment.
            let gone = Service::new(&format!("other-{}", (number + 10) % 20));
            control_plane.delete(&gone);
            sleep(Duration::from_millis(5));
            changes += 4;
        }
    }
    changes
}

/// The number of times that an agent has written the maps.
fn syncs(agent: &Agent) -> usize {
    agent.log().lines().filter(|line| line.contains("synced")).count()
}

/// Routes, addresses, neighbours and links of the nodes change, none of those that the traffic
/// uses. Each change makes the agent invalidate all stored next hops.
fn the_network_changes(lab: &Lab) -> usize {
    let start = Instant::now();
    let mut changes = 0;
    for node in lab.nodes() {
        node.netns().netlink(async |net| net.bridge("spare0", [2, 0, 0, 0, 0, 1], 1500).await).unwrap();
    }
    while start.elapsed() < TIME {
        for (node, number) in lab.nodes().iter().zip(0_u8..) {
            let own = node.address(Family::V4);
            let far = IpAddr::V4(Ipv4Addr::new(203, 0, 113, number));
            let neighbour = IpAddr::V4(Ipv4Addr::new(172, 18, 0, 240 + number));
            let gateway = lab.node(1 + (usize::from(number) + 1) % lab.nodes().len()).address(Family::V4);
            assert_ne!(own, gateway);
            let mac = |last| [2, 0, 0, 0, number, last];
            let round = u8::try_from(changes % 200).unwrap();
            node.netns()
                .netlink(async |net| {
                    net.route(far, 32, gateway).await?;
                    net.neighbour("eth0", neighbour, mac(round)).await?;
                    net.neighbour("eth0", neighbour, mac(round + 1)).await?;
                    net.up("spare0").await?;
                    net.down("spare0").await?;
                    net.delete_route(far, 32).await
                })
                .unwrap();
            changes += 6;
        }
        sleep(Duration::from_millis(5));
    }
    changes
}

fn churn(attach: &str, family: Family) {
    let _alone = quiet::alone();
    let mut cluster = cluster::without_agents(&[1, 1, 0], attach);
    let control_plane = ControlPlane::start(&cluster.lab).unwrap();
    let backends = cluster.backends();
    control_plane.apply(&web(), &backends).unwrap();
    cluster.launch(|agent| agent.attach(attach).kubeconfig(control_plane.kubeconfig())).unwrap();
    let targets = both(family, |family| cluster.at(1, family, NODE_PORT));
    let start = |what: &str| {
        Meters::start(&format!("{attach} {family:?} {what}"), &cluster.lab, &targets, &cluster.ledger)
    };

    let meters = start("other Services come and go");
    let agent = &cluster.agents[0];
    let changes = services_come_and_go(&control_plane, &backends, agent);
    meters.finish(&cluster.lab);
    println!("  {changes} changes of other Services, written by node-1 in {} steps", syncs(agent));

    let meters = start("routes, neighbours and links change");
    let changes = the_network_changes(&cluster.lab);
    meters.finish(&cluster.lab);
    println!("  {changes} changes of the nodes' networks");
}

#[test]
fn tc() {
    churn("tc", Family::V4);
}

#[test]
fn xdp() {
    churn("xdp", Family::V6);
}
