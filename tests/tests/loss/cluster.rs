//! The cluster on which all loss is measured: two nodes with pods and one without, agents on all,
//! one Service for all meters.

use std::time::Duration;

use traffic_policy_testing::cluster::{Cluster, TARGET};
use traffic_policy_testing::lab::Lab;
use traffic_policy_testing::object::{Port, Service};

use crate::meters;

pub const NODE_PORT: u16 = 30080;
pub const POD_PORT: u16 = TARGET;

/// The time limit; an agent of a debug build loads its programs in a second on a quiet machine.
pub const PATIENCE: Duration = Duration::from_secs(30);

/// The Service under load: TCP and UDP, policy Cluster.
pub fn web() -> Service {
    Service::new("web")
        .port(Port::tcp(80, POD_PORT).node_port(NODE_PORT))
        .port(Port::udp(80, POD_PORT).node_port(NODE_PORT))
}

/// Starts a cluster with one node for each element of `pods`, with that many pods, all of them
/// endpoints of [`web`].
pub fn start(pods: &[u8], attach: &str) -> Cluster {
    with_web(without_agents(pods, attach), attach)
}

/// A variant of [`start`] for agents that may be switched to XDP later.
pub fn on_finished_checksums(pods: &[u8], attach: &str) -> Cluster {
    with_web(without_agents(pods, "xdp"), attach)
}

fn with_web(mut cluster: Cluster, attach: &str) -> Cluster {
    cluster.manifests.apply(&web(), &cluster.backends()).unwrap();
    cluster.launch(|agent| agent.attach(attach)).unwrap();
    cluster
}

/// Starts the same cluster without agents and Services, but with pods that answer.
pub fn without_agents(pods: &[u8], attach: &str) -> Cluster {
    // TC meets unfinished checksums, as on any veth; XDP needs finished ones.
    let lab = Lab::builder().pods(pods).wire_offloads(attach == "tc").build().unwrap();
    meters::wait_before_sending_again(&lab);
    Cluster::start_in(lab).unwrap()
}
