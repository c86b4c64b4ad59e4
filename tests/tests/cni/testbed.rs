//! A lab in a plugin's layout with an agent on each node that finds its devices itself, and a
//! cgroup for each node's processes.

use std::io::Write;
use std::time::Duration;

use traffic_policy_testing::agent::Agent;
use traffic_policy_testing::cgroup::Cgroup;
use traffic_policy_testing::cluster::Cluster;
use traffic_policy_testing::lab::Cni;
use traffic_policy_testing::matrix;
use traffic_policy_testing::object::{Backend, Policy};

use crate::sockets;

/// The node port of a Service of policy Cluster with its only endpoint on node-2.
pub const REMOTE: u16 = 30082;

pub struct Testbed {
    pub cluster: Cluster,
    /// The cgroups, in the order of the nodes.
    pub cgroups: Vec<Cgroup>,
}

impl Testbed {
    /// Starts a testbed. Returns `None`, and prints the reason, if the machine lacks the programs
    /// that write rules, or its kernel the tunnels.
    pub fn start(cni: Cni, attach: &str) -> Option<Self> {
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
        for service in [sockets::with_cluster_ips(with_all), local] {
            cluster.manifests.apply(&service, &cluster.backends()).unwrap();
        }
        let name = |node: &str| format!("{}-{node}", lab.id());
        let cgroups: Vec<_> =
            lab.nodes().iter().map(|node| Cgroup::create(&name(&node.name)).unwrap()).collect();
        let start = |(node, cgroup): (_, &Cgroup)| {
            let agent = Agent::builder(lab, node).attach(attach).devices(&[]).cgroup(cgroup.path());
            agent.flags(&["--service-cidr", sockets::SERVICE_CIDRS]).start().unwrap()
        };
        cluster.agents = lab.nodes().iter().zip(&cgroups).map(start).collect();
        for agent in &cluster.agents {
            agent.wait_ready(Duration::from_secs(20)).unwrap();
        }
        Some(Self { cluster, cgroups })
    }
}
