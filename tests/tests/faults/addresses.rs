//! A node with more addresses of its own than the maps can hold, caused by leftovers on kube-ipvs0
//! or by many VIPs.

use std::net::{IpAddr, Ipv4Addr};
use std::time::Duration;

use traffic_policy_testing::agent::Agent;
use traffic_policy_testing::cluster::{Cluster, Protocol};
use traffic_policy_testing::lab::{Family, Lab};
use traffic_policy_testing::object::Policy;
use traffic_policy_testing::traffic::Outcome;

const SOON: Duration = Duration::from_secs(20);
/// The number of addresses; the maps hold 4096.
const MANY: u32 = 4200;

#[test]
fn more_addresses_than_there_is_room_for() {
    let cluster = Cluster::start(Lab::builder().pods(&[1])).unwrap();
    let node = cluster.lab.node(1).netns();
    let many = node.netlink(async |netlink| {
        for number in 0..MANY {
            let address = IpAddr::V4(Ipv4Addr::from_bits(0xc612_0000 + number));
            netlink.address("lo", address, 32).await?;
        }
        Ok(())
    });
    many.unwrap();
    cluster.manifests.apply(&Cluster::node_port("web", Policy::Cluster, 30080), &cluster.backends()).unwrap();
    let agents = Agent::start_all(&cluster.lab, |agent| agent).unwrap();
    let answered = |outcome: &Outcome| matches!(outcome, Outcome::Answered(_));
    for family in Family::BOTH {
        cluster.wait_for(Protocol::Tcp, cluster.at(1, family, 30080), SOON, answered).unwrap();
    }
    // A Service that is added later is written, too; the log has a single line about the addresses.
    cluster
        .manifests
        .apply(&Cluster::node_port("more", Policy::Cluster, 30081), &cluster.backends())
        .unwrap();
    cluster.wait_for(Protocol::Tcp, cluster.at(1, Family::V4, 30081), SOON, answered).unwrap();
    assert_eq!(agents[0].healthz().unwrap().status, 200);
    let log = agents[0].log();
    assert_eq!(log.lines().filter(|line| line.contains("find no room")).count(), 1, "{log}");
}
