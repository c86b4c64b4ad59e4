//! The prefilter has no bit of a Service that has gone: packets to its address pass with the first
//! look of the packet path, as if it had never been.

use std::net::{IpAddr, Ipv4Addr};
use std::time::Duration;

use traffic_policy_testing::agent::Agent;
use traffic_policy_testing::cluster::{Cluster, TARGET};
use traffic_policy_testing::lab::Lab;
use traffic_policy_testing::object::{Port, Service};
use traffic_policy_testing::pace::until;
use traffic_policy_testing::pinned::{self, Entries};

const PATIENCE: Duration = Duration::from_secs(30);

fn service(name: &str, address: [u8; 4], port: u16) -> Service {
    Service::new(name).port(Port::tcp(port, TARGET)).vip(IpAddr::V4(Ipv4Addr::from(address)))
}

fn bits(agent: &Agent) -> Entries {
    pinned::maps(agent.pin_dir()).unwrap().remove("tp_prefilter").unwrap()
}

#[test]
fn a_service_that_has_gone_leaves_no_bits() {
    let cluster = Cluster::start(Lab::builder().pods(&[1])).unwrap();
    let backends = cluster.backends();
    let (stays, goes) = (service("stays", [203, 0, 113, 1], 80), service("goes", [203, 0, 113, 2], 8080));
    cluster.manifests.apply(&stays, &backends).unwrap();
    // A sweep runs every 2 s.
    let agent =
        Agent::builder(&cluster.lab, cluster.lab.node(1)).flags(&["--idle-udp", "8s"]).start().unwrap();
    agent.wait_ready(PATIENCE).unwrap();
    let before = bits(&agent);
    for _ in 0..2 {
        cluster.manifests.apply(&goes, &backends).unwrap();
        until("the Service has bits", PATIENCE, || bits(&agent) != before);
        cluster.manifests.delete(&goes).unwrap();
        until("its bits are cleared", PATIENCE, || bits(&agent) == before);
    }
}
