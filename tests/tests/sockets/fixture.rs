//! The testbed of socket tests: two nodes, of which the first has an agent, and a cgroup for each
//! node's processes with one below it for its pods.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use traffic_policy_testing::agent::Agent;
use traffic_policy_testing::cgroup::Cgroup;
use traffic_policy_testing::cluster::{Cluster, TARGET};
use traffic_policy_testing::lab::{Family, Lab};
use traffic_policy_testing::object::{Backend, Port, Service, cluster_ip};
use traffic_policy_testing::pace;

use traffic_policy_tests::caller::{Caller, Kind};

pub const PORT: u16 = 80;
pub const NODE_PORT: u16 = 30080;
/// The ranges of the cluster IPs of these tests.
const SERVICE_CIDRS: &str = "10.96.0.0/16,fd00:10:96::/112";

pub struct SocketCluster {
    pub cluster: Cluster,
    cgroups: Vec<Cgroups>,
}

pub struct Cgroups {
    pub pods: Cgroup,
    pub node: Cgroup,
}

impl SocketCluster {
    /// Starts a testbed; `pods` is the number of pods of each node.
    pub fn start(pods: &[u8], prepare: impl FnOnce(&Cluster)) -> Self {
        Self::start_with(pods, &[], prepare)
    }

    /// A variant of [`Self::start`] with more flags for the agent.
    pub fn start_with(pods: &[u8], flags: &[&str], prepare: impl FnOnce(&Cluster)) -> Self {
        Self::start_on(1, pods, flags, prepare)
    }

    /// A variant of [`Self::start`] with an agent on each node, for what another node does itself.
    pub fn start_on_all(pods: &[u8], prepare: impl FnOnce(&Cluster)) -> Self {
        Self::start_on(pods.len(), pods, &[], prepare)
    }

    /// Starts agents on the first `nodes` nodes.
    fn start_on(nodes: usize, pods: &[u8], flags: &[&str], prepare: impl FnOnce(&Cluster)) -> Self {
        let mut cluster = Cluster::start(Lab::builder().pods(pods)).unwrap();
        prepare(&cluster);
        let cgroups: Vec<_> = cluster
            .lab
            .nodes()
            .iter()
            .map(|node| {
                let cgroup = Cgroup::create(&format!("{}-{}", cluster.lab.id(), node.name)).unwrap();
                Cgroups { pods: cgroup.below("pods").unwrap(), node: cgroup }
            })
            .collect();
        let start = |(node, cgroups): (_, &Cgroups)| {
            let agent = Agent::builder(&cluster.lab, node).cgroup(cgroups.node.path());
            agent.flags(&["--service-cidr", SERVICE_CIDRS]).flags(flags).start().unwrap()
        };
        cluster.agents = cluster.lab.nodes().iter().zip(&cgroups).take(nodes).map(start).collect();
        for agent in &cluster.agents {
            agent.wait_ready(Duration::from_secs(20)).unwrap();
        }
        Self { cluster, cgroups }
    }

    /// The cgroups of a node; nodes count from 1.
    pub fn cgroups(&self, node: usize) -> &Cgroups {
        &self.cgroups[node - 1]
    }

    /// Starts a process on a node.
    pub fn on_node(&self, node: usize) -> Caller {
        Caller::start(
            env!("CARGO_BIN_EXE_caller"),
            self.cluster.lab.node(node).netns(),
            &self.cgroups(node).node,
        )
    }

    /// Starts a process in a pod.
    pub fn in_pod(&self, node: usize, pod: usize) -> Caller {
        Caller::start(
            env!("CARGO_BIN_EXE_caller"),
            self.cluster.lab.node(node).pod(pod).netns(),
            &self.cgroups(node).pods,
        )
    }

    pub fn pod_address(&self, node: usize, pod: usize, family: Family) -> IpAddr {
        self.cluster.lab.node(node).pod(pod).address(family)
    }

    /// Returns a pod as an endpoint.
    pub fn backend(&self, node: usize, pod: usize) -> Backend {
        Backend::of(self.cluster.lab.node(node).pod(pod))
    }

    /// The number of calls on a node with this outcome.
    pub fn calls(&self, node: usize, outcome: &str) -> u64 {
        self.cluster.agents[node - 1].packets("socket", outcome).unwrap()
    }
}

/// The address and port of the n-th Service.
pub fn service_at(number: u8, kind: Kind) -> SocketAddr {
    SocketAddr::new(cluster_ip(number, kind.family()), PORT)
}

/// The n-th Service, TCP and UDP, of type ClusterIP.
pub fn service(number: u8) -> Service {
    Service::new(&format!("service-{number}"))
        .only_cluster_ip()
        .cluster_ips(number)
        .port(Port::tcp(PORT, TARGET))
        .port(Port::udp(PORT, TARGET))
}

/// Waits until `work` returns a value.
#[track_caller]
pub fn until<T>(what: &str, work: impl FnMut() -> Option<T>) -> T {
    pace::wait_for(what, Duration::from_secs(10), work)
}

/// The number of an error that must come at once: not after a retransmission, which takes a second.
pub fn error_at_once<T: std::fmt::Debug>(call: impl FnOnce() -> io::Result<T>) -> i32 {
    let start = Instant::now();
    let error = call().unwrap_err();
    assert!(start.elapsed() < Duration::from_secs(1), "{error} after {:?}", start.elapsed());
    error.raw_os_error().unwrap()
}
