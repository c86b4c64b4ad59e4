//! A lab with a server in each pod, a folder of manifests and agents: the basis of nearly every
//! test with traffic.

use std::net::SocketAddr;

use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};

use crate::agent::{Agent, AgentBuilder};
use crate::lab::{Family, Lab, LabBuilder};
use crate::object::{Backend, Manifests, Policy, Port, Service};
use crate::pace::{self, scaled};
use crate::traffic::{Answer, Ledger, Outcome, Probe, Server};

/// The port of the servers.
pub const TARGET: u16 = 8080;

/// A transport protocol for probes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Protocol {
    Tcp,
    Udp,
}

/// The lab and the parts that a test needs on it.
#[derive(Debug)]
pub struct Cluster {
    // The fields are dropped in this order.
    /// One agent for each node, once [`Self::launch`] has started them, or for each of the first
    /// nodes after [`Self::launch_first`].
    pub agents: Vec<Agent>,
    /// The servers, in the order of the lab's pods.
    servers: Vec<Option<Server>>,
    pub ledger: Ledger,
    pub manifests: Manifests,
    pub lab: Lab,
}

impl Protocol {
    pub const BOTH: [Self; 2] = [Self::Tcp, Self::Udp];

    pub fn probe(self, to: SocketAddr) -> Probe {
        match self {
            Self::Tcp => Probe::tcp(to),
            Self::Udp => Probe::udp(to),
        }
    }
}

impl Cluster {
    pub fn start(builder: LabBuilder) -> Result<Self> {
        Self::start_in(builder.build()?)
    }

    /// A variant of [`Self::start`] for a lab whose namespaces have been prepared.
    pub fn start_in(lab: Lab) -> Result<Self> {
        let ledger = Ledger::default();
        let servers =
            lab.pods().map(|pod| Server::start(pod, TARGET, &ledger).map(Some)).collect::<Result<_>>()?;
        let manifests = Manifests::of(&lab)?;
        Ok(Self { agents: Vec::new(), servers, ledger, manifests, lab })
    }

    /// Starts an agent on each node, and waits until they are ready.
    pub fn launch(&mut self, adapt: impl Fn(AgentBuilder) -> AgentBuilder) -> Result<()> {
        self.agents = Agent::start_all(&self.lab, adapt)?;
        Ok(())
    }

    /// Starts agents on the first `count` nodes, and waits until they are ready.
    pub fn launch_first(&mut self, count: usize, adapt: impl Fn(AgentBuilder) -> AgentBuilder) -> Result<()> {
        self.agents = Agent::start_first(count, &self.lab, adapt)?;
        Ok(())
    }

    /// Stops the server of a pod: new connections to it are refused from now on.
    pub fn stop_server(&mut self, pod: &str) {
        let number = self.lab.pods().position(|other| other.name == pod);
        drop(number.and_then(|number| self.servers[number].take()));
    }

    pub fn kill_agents(&mut self) -> Result<()> {
        self.agents.iter_mut().try_for_each(Agent::kill)
    }

    pub fn stop_agents(&mut self) -> Result<()> {
        self.agents.iter_mut().try_for_each(Agent::stop)
    }

    /// Starts all agents again and waits until they have taken over. The limit is that of a fast
    /// machine.
    pub fn start_agents_again(&mut self, limit: Duration) -> Result<()> {
        self.agents.iter_mut().try_for_each(Agent::start_again)?;
        self.agents.iter().try_for_each(|agent| agent.wait_ready(limit))
    }

    /// All pods as endpoints.
    pub fn backends(&self) -> Vec<Backend> {
        self.lab.pods().map(Backend::of).collect()
    }

    /// A Service with one node port, for TCP and UDP, to be completed and applied.
    pub fn node_port(name: &str, policy: Policy, port: u16) -> Service {
        Service::new(name)
            .policy(policy)
            .port(Port::tcp(80, TARGET).node_port(port))
            .port(Port::udp(80, TARGET).node_port(port))
    }

    /// The address and port of a node port on a node.
    pub fn at(&self, node: usize, family: Family, port: u16) -> SocketAddr {
        SocketAddr::new(self.lab.node(node).address(family), port)
    }

    /// Sends one probe from the client.
    pub fn ask(&self, protocol: Protocol, to: SocketAddr) -> Result<Outcome> {
        protocol.probe(to).from(self.lab.client().netns())
    }

    /// Sends one probe from the client, which must be answered, if late on a busy machine.
    pub fn answer(&self, protocol: Protocol, to: SocketAddr) -> Result<Answer> {
        protocol.probe(to).answer(self.lab.client().netns()).with_context(|| format!("{protocol:?} {to}"))
    }

    /// Probes until the outcome is the wanted one; fails with the last outcome. The limit is that
    /// of a fast machine.
    pub fn wait_for(
        &self,
        protocol: Protocol,
        to: SocketAddr,
        limit: Duration,
        wanted: impl Fn(&Outcome) -> bool,
    ) -> Result<Outcome> {
        let mut last = None;
        let found = pace::poll(limit, || match self.ask(protocol, to) {
            Ok(outcome) if !wanted(&outcome) => {
                last = Some(outcome);
                None
            }
            ended => Some(ended),
        });
        found.with_context(|| format!("{protocol:?} {to} after {:?}: {last:?}", scaled(limit)))?
    }

    /// Probes until each of the pods has answered, and returns all answers. Fails if another pod
    /// answered, or one was never chosen.
    pub fn ask_until_all(&self, protocol: Protocol, to: SocketAddr, pods: &[&str]) -> Result<Vec<Answer>> {
        let mut answers: Vec<Answer> = Vec::new();
        // With 4 endpoints and a fair choice, one is missed once in 10^12 runs.
        for _ in 0..100 {
            let answer = self.answer(protocol, to)?;
            ensure!(pods.contains(&answer.pod.as_str()), "{protocol:?} {to}: {} answered", answer.pod);
            answers.push(answer);
            if pods.iter().all(|pod| answers.iter().any(|answer| answer.pod == *pod)) {
                return Ok(answers);
            }
        }
        bail!("{protocol:?} {to}: not all of {pods:?} answered");
    }
}
