//! The cluster that all loss is measured on: two nodes with pods and one without, agents on all, one Service for all
//! meters.

use std::net::SocketAddr;
use std::time::Duration;

use traffic_policy_testing::agent::{Agent, AgentBuilder};
use traffic_policy_testing::lab::{Family, Lab};
use traffic_policy_testing::object::{Backend, Manifests, Port, Service};
use traffic_policy_testing::traffic::{Ledger, Server};

pub const NODE_PORT: u16 = 30080;
pub const POD_PORT: u16 = 8080;

/// An agent of a debug build loads its programs in a second on a quiet machine.
pub const PATIENCE: Duration = Duration::from_secs(30);

pub struct Cluster {
    // In the order in which they have to go.
    pub agents: Vec<Agent>,
    _servers: Vec<Server>,
    pub ledger: Ledger,
    pub manifests: Manifests,
    pub lab: Lab,
}

/// The Service under load. TCP and UDP; policy Cluster.
pub fn web() -> Service {
    Service::new("web")
        .port(Port::tcp(80, POD_PORT).node_port(NODE_PORT))
        .port(Port::udp(80, POD_PORT).node_port(NODE_PORT))
}

impl Cluster {
    /// As many nodes as there are numbers, each with that many pods, all of them endpoints of [`web`].
    pub fn start(pods: &[u8], attach: &str) -> Self {
        Self::without_agents(pods, attach).with_web(attach)
    }

    /// As [`Self::start`], for agents that may be told to use XDP later.
    pub fn on_finished_checksums(pods: &[u8], attach: &str) -> Self {
        Self::without_agents(pods, "xdp").with_web(attach)
    }

    fn with_web(mut self, attach: &str) -> Self {
        self.manifests.apply(&web(), &self.backends()).unwrap();
        self.launch(|agent| agent.attach(attach));
        self
    }

    /// The same before anything is in it, but pods that answer.
    pub fn without_agents(pods: &[u8], attach: &str) -> Self {
        // TC meets unfinished checksums as on any veth; XDP needs finished ones.
        let lab = Lab::builder().pods(pods).wire_offloads(attach == "tc").build().unwrap();
        let ledger = Ledger::default();
        let servers = lab.pods().map(|pod| Server::start(pod, POD_PORT, &ledger).unwrap()).collect();
        let manifests = Manifests::of(&lab).unwrap();
        Self { agents: Vec::new(), _servers: servers, ledger, manifests, lab }
    }

    /// Starts the agents, and waits until they are ready.
    pub fn launch(&mut self, adapt: impl Fn(AgentBuilder) -> AgentBuilder) {
        self.agents = Agent::start_all(&self.lab, adapt).unwrap();
    }

    /// All pods, as endpoints.
    pub fn backends(&self) -> Vec<Backend> {
        self.lab.pods().map(Backend::of).collect()
    }

    pub fn port_of(&self, node: usize, family: Family) -> SocketAddr {
        SocketAddr::new(self.lab.node(node).address(family), NODE_PORT)
    }

    pub fn kill(&mut self) {
        self.agents.iter_mut().for_each(|agent| agent.kill().unwrap());
    }

    pub fn stop(&mut self) {
        self.agents.iter_mut().for_each(|agent| agent.stop().unwrap());
    }

    /// Starts all agents again and waits until they have taken over.
    pub fn start_again(&mut self) {
        self.agents.iter_mut().for_each(|agent| agent.start_again().unwrap());
        self.agents.iter().for_each(|agent| agent.wait_ready(PATIENCE).unwrap());
    }
}
