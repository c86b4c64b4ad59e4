//! `--pod-services on`: what pods send to Services is translated at the host side of their devices,
//! for pods whose sockets no program sees. Here that is every pod: agents of tests have no cgroup.
//! Layouts of network plugins need `nft` and `ip`: without them tests are skipped.

mod changes;
mod choice;
mod explained;
mod layouts;
mod refusals;
mod rules;
mod user_stack;

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use traffic_policy_testing::agent::{Agent, AgentBuilder};
use traffic_policy_testing::cluster::{Cluster, Protocol, TARGET};
use traffic_policy_testing::lab::{Cni, Family, Lab, Pod};
use traffic_policy_testing::object::{Backend, Policy, Port, Service};
use traffic_policy_testing::skipped;
use traffic_policy_testing::traffic::{Answer, Outcome};

const PORT: u16 = 80;
const NODE_PORT: u16 = 30_080;
const SERVICE_CIDRS: &str = "10.96.0.0/16,fd00:10:96::/112";
const ON: &[&str] = &["--pod-services", "on"];
const OFF: &[&str] = &[];

/// Two nodes with pods, in the layout of a plugin, whose agents have these flags.
struct Scene {
    cluster: Cluster,
}

impl Scene {
    /// Starts a scene with two pods on each node, and an agent on that of the pod that asks; `None`
    /// if a program is missing that the layout needs.
    fn start(cni: Option<Cni>, flags: &[&str], prepare: impl FnOnce(&Cluster)) -> Option<Self> {
        Self::start_with([2, 2], 1, cni, flags, prepare)
    }

    /// Starts a scene with two nodes, with as many pods as `pods` says, and agents on the first
    /// `agents` of them.
    fn start_with(
        pods: [u8; 2],
        agents: usize,
        cni: Option<Cni>,
        flags: &[&str],
        prepare: impl FnOnce(&Cluster),
    ) -> Option<Self> {
        let lab = Lab::builder().pods(&pods);
        let lab = match cni {
            Some(cni) => {
                if let Some(program) = Cni::missing_program() {
                    skipped("pod_services", format!("there is no {program}"));
                    return None;
                }
                lab.cni(cni)
            }
            None => lab,
        };
        let mut cluster = Cluster::start(lab).unwrap();
        prepare(&cluster);
        let adapt = |agent: AgentBuilder| agent.flags(&["--service-cidr", SERVICE_CIDRS]).flags(flags);
        cluster.launch_first(agents, adapt).unwrap();
        Some(Self { cluster })
    }

    /// The pod that asks: the first one of the first node.
    fn client(&self) -> &Pod {
        self.pod(1, 1)
    }

    fn pod(&self, node: usize, pod: usize) -> &Pod {
        self.cluster.lab.node(node).pod(pod)
    }

    fn ask(&self, protocol: Protocol, to: SocketAddr) -> Outcome {
        protocol.probe(to).from(self.client().netns()).unwrap()
    }

    #[track_caller]
    fn answer(&self, protocol: Protocol, to: SocketAddr) -> Answer {
        let answer = protocol.probe(to).answer(self.client().netns());
        answer.unwrap_or_else(|error| panic!("{protocol:?} {to}: {error:#}"))
    }

    fn agent(&self) -> &Agent {
        &self.cluster.agents[0]
    }

    fn packets(&self, hook: &str, outcome: &str) -> u64 {
        self.agent().packets(hook, outcome).unwrap()
    }
}

/// The n-th address of the ranges of ClusterIPs.
fn cluster_ip(number: u8, family: Family) -> IpAddr {
    match family {
        Family::V4 => [10, 96, 0, number].into(),
        Family::V6 => [0xfd00, 0x10, 0x96, 0, 0, 0, 0, number.into()].into(),
    }
}

fn at(number: u8, family: Family) -> SocketAddr {
    SocketAddr::new(cluster_ip(number, family), PORT)
}

/// The n-th Service, TCP and UDP, of type ClusterIP.
fn service(number: u8) -> Service {
    Service::new(&format!("service-{number}"))
        .only_cluster_ip()
        .cluster_ip(cluster_ip(number, Family::V4))
        .cluster_ip(cluster_ip(number, Family::V6))
        .port(Port::tcp(PORT, TARGET))
        .port(Port::udp(PORT, TARGET))
}
