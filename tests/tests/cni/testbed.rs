//! A lab in a plugin's layout with an agent on each node that finds its devices itself, and a
//! cgroup for each node's processes.

use std::io::Write;
use std::net::IpAddr;
use std::time::Duration;

use traffic_policy_testing::agent::Agent;
use traffic_policy_testing::cgroup::Cgroup;
use traffic_policy_testing::cluster::Cluster;
use traffic_policy_testing::lab::{Cni, Family};
use traffic_policy_testing::matrix;
use traffic_policy_testing::object::{Backend, Policy, Service};

/// The node port of a Service of policy Cluster with its only endpoint on node-2.
pub const REMOTE: u16 = 30082;

/// The ranges of ClusterIPs.
const SERVICE_CIDRS: &str = "10.96.0.0/16,fd00:10:96::/112";

pub struct Testbed {
    pub cluster: Cluster,
    /// The cgroups, in the order of the nodes.
    pub cgroups: Vec<Cgroup>,
}

impl Testbed {
    /// Starts a testbed. Returns `None`, and prints the reason, if the machine lacks the programs
    /// that write rules, or its kernel the tunnels.
    pub fn start(cni: Cni, attach: &str, delivery: &str) -> Option<Self> {
        if let Some(missing) = cni.missing().unwrap() {
            // Written to stderr directly: the test harness would capture it otherwise.
            writeln!(std::io::stderr(), "SKIPPED {} {attach}: there is {missing}", cni.name()).ok();
            return None;
        }
        // TC meets unfinished checksums, as on any veth; XDP needs finished ones.
        let lab = matrix::lab().wire_offloads(attach == "tc").cni(cni);
        let mut cluster = Cluster::start(lab).unwrap();
        let lab = &cluster.lab;
        let far = [Backend::of(lab.node(2).pod(1))];
        cluster.manifests.apply(&Cluster::node_port("remote", Policy::Cluster, REMOTE), &far).unwrap();
        let [with_all, local] = matrix::services();
        for service in [with_cluster_ips(with_all), local] {
            cluster.manifests.apply(&service, &cluster.backends()).unwrap();
        }
        let name = |node: &str| format!("{}-{node}", lab.id());
        let cgroups: Vec<_> =
            lab.nodes().iter().map(|node| Cgroup::create(&name(&node.name)).unwrap()).collect();
        let start = |(node, cgroup): (_, &Cgroup)| {
            let agent = Agent::builder(lab, node).attach(attach).devices(&[]).cgroup(cgroup.path());
            agent.flags(&["--service-cidr", SERVICE_CIDRS, "--local-delivery", delivery]).start().unwrap()
        };
        cluster.agents = lab.nodes().iter().zip(&cgroups).map(start).collect();
        for agent in &cluster.agents {
            agent.wait_ready(Duration::from_secs(20)).unwrap();
        }
        Some(Self { cluster, cgroups })
    }
}

/// The ClusterIP of the Service with endpoints on all nodes.
pub fn cluster_ip(family: Family) -> IpAddr {
    match family {
        Family::V4 => [10, 96, 0, 10].into(),
        Family::V6 => [0xfd00, 0x10, 0x96, 0, 0, 0, 0, 0x10].into(),
    }
}

fn with_cluster_ips(service: Service) -> Service {
    service.cluster_ip(cluster_ip(Family::V4)).cluster_ip(cluster_ip(Family::V6))
}
