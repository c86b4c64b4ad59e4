//! The cluster on which the demo runs.

use std::cell::Cell;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use anyhow::{Context, Result};
use traffic_policy_lb::Learn;
use traffic_policy_testing::agent::Agent;
use traffic_policy_testing::cgroup::Cgroup;
use traffic_policy_testing::cluster::{Cluster, TARGET};
use traffic_policy_testing::lab::{Family, Lab, LabBuilder, Node};
use traffic_policy_testing::object::{Policy, Port, Service};
use traffic_policy_testing::pace::poll;
use traffic_policy_testing::recording::Synced;
use traffic_policy_testing::traffic::{Target, http};

/// The Service's node port, TCP and UDP.
pub const NODE_PORT: u16 = 30080;
/// The Service's healthCheckNodePort, under policy Local.
pub const HEALTH_PORT: u16 = 32080;
/// Port of /healthz on every node.
pub const HEALTHZ_PORT: u16 = 10256;
const POD_PORT: u16 = TARGET;
/// Requests per second of the load balancer.
pub const RATE: u32 = 250;
pub const LOAD_BALANCER_IP: &str = "203.0.113.80";

/// Three nodes, one agent each; node-1 has one pod, node-2 two, node-3 none.
pub struct DemoCluster {
    pub base: Cluster,
    command: String,
    /// Cgroup of the processes of the last node. It is dropped after the agents.
    cgroup: Cgroup,
    /// Time from the last change of the objects to the maps of the slowest agent: the agent delay
    /// given to `lb simulate`.
    reaction: Cell<Duration>,
}

impl DemoCluster {
    pub fn build(attach: &str) -> Result<Self> {
        let mut base = Cluster::start(lab(attach))?;
        base.manifests.apply(&service(Policy::Cluster, None), &base.backends())?;
        let lab = &base.lab;
        let words = Agent::builder(lab, lab.node(1)).attach(attach).command_line();
        let command = format!("traffic-policy-agent {}", words.join(" "));
        let cgroup = Cgroup::create("traffic-policy-demo")?;
        let last = lab.nodes().len() - 1;
        let start = |(number, node)| {
            let agent = Agent::builder(lab, node).attach(attach);
            let agent = if number == last { agent.cgroup(cgroup.path()) } else { agent };
            agent.start()
        };
        let agents: Vec<_> = base.lab.nodes().iter().enumerate().map(start).collect::<Result<_>>()?;
        agents.iter().try_for_each(|agent| agent.wait_ready(Duration::from_secs(20)))?;
        base.agents = agents;
        Ok(Self { base, command, cgroup, reaction: Cell::new(Learn::default().agent) })
    }

    /// Returns the last node, which has no pod, and its agent. Connections of its processes in
    /// [`Self::cgroup`] are served.
    pub fn inside(&self) -> (&Node, &Agent) {
        let last = self.base.lab.nodes().len() - 1;
        (self.base.lab.node(last + 1), &self.base.agents[last])
    }

    pub fn cgroup(&self) -> &Cgroup {
        &self.cgroup
    }

    pub fn introduce(&self) {
        let line = |node: &Node| {
            let pods: Vec<_> =
                node.pods.iter().map(|pod| format!("{} {}", pod.name, pod.address(Family::V4))).collect();
            let pods = if pods.is_empty() { "no pod".to_owned() } else { pods.join(", ") };
            format!(" {} {:<12} {pods}", node.name, node.address(Family::V4).to_string())
        };
        println!("THE STAGE: network namespaces, real packets between them");
        println!();
        let client = format!("  client {} ── router ──", self.base.lab.client().address(Family::V4));
        let indent = " ".repeat(client.chars().count());
        for (number, node) in self.base.lab.nodes().iter().enumerate() {
            let (left, branch) = match number {
                0 => (client.as_str(), "┬──"),
                n if n + 1 == self.base.lab.nodes().len() => (indent.as_str(), "└──"),
                _ => (indent.as_str(), "├──"),
            };
            println!("{left}{branch}{}", line(node));
        }
        println!();
        println!("  (The client has no route to pods.)");
        println!();
        println!("On each node an agent runs, started as you would start it:");
        println!("  {}", self.command);
        println!(
            "The Service `web`, type LoadBalancer: node port {NODE_PORT} (TCP and UDP) → pods, port {POD_PORT}."
        );
    }

    pub fn client(&self) -> IpAddr {
        self.base.lab.client().address(Family::V4)
    }

    pub fn node_port(&self, node: &Node) -> SocketAddr {
        SocketAddr::new(node.address(Family::V4), NODE_PORT)
    }

    /// Changes the Service, and waits until the health-check ports of all nodes reflect it.
    pub fn set(&self, policy: Policy, drain: Option<&str>) -> Result<()> {
        let since = Synced::now();
        self.base.manifests.apply(&service(policy, drain), &self.base.backends())?;
        for node in self.base.lab.nodes() {
            let wanted = (policy == Policy::Local).then_some(if node.pods.is_empty() { 503 } else { 200 });
            let follows = || self.health(node, Policy::Local).ok().map(|(status, _)| status) == wanted;
            poll(Duration::from_secs(10), || follows().then_some(()))
                .with_context(|| format!("{} does not follow the Service", node.name))?;
        }
        let client = self.base.lab.client().netns();
        let took =
            self.base.lab.nodes().iter().map(|node| {
                since.until_last(client, SocketAddr::new(node.address(Family::V4), HEALTHZ_PORT))
            });
        let slowest = took.collect::<Result<Vec<_>>>()?.into_iter().flatten().max();
        // Objects that are unchanged cause no write.
        self.reaction.set(slowest.unwrap_or_else(|| self.reaction.get()));
        Ok(())
    }

    /// Returns the time that the agents last took from a change of the objects to the maps.
    pub fn reaction(&self) -> Duration {
        self.reaction.get()
    }

    /// Returns a node's answer to a load balancer's health check: status, and the weight header
    /// under policy Local.
    pub fn health(&self, node: &Node, policy: Policy) -> Result<(u16, Option<String>)> {
        let (port, path) = health_check(policy);
        let server = SocketAddr::new(node.address(Family::V4), port);
        let response = http::get_from(self.base.lab.client().netns(), server, path)?;
        let weight = response.head.lines().find_map(|line| {
            line.to_ascii_lowercase().strip_prefix("x-load-balancing-endpoint-weight: ").map(str::to_owned)
        });
        Ok((response.status, weight))
    }

    /// Returns all nodes, for a load balancer that relies on the health check of `policy`.
    pub fn targets(&self, policy: Policy) -> Vec<Target> {
        let (port, path) = health_check(policy);
        let targets = self.base.lab.nodes().iter().map(|node| Target {
            node: node.name.clone(),
            traffic: self.node_port(node),
            health: SocketAddr::new(node.address(Family::V4), port),
            path: path.to_owned(),
        });
        targets.collect()
    }

    /// Returns the names of the nodes to which it sends requests.
    pub fn healthy(&self, policy: Policy) -> Vec<&str> {
        let nodes = self.base.lab.nodes().iter();
        let healthy = nodes.filter(|node| policy == Policy::Cluster || !node.pods.is_empty());
        healthy.map(|node| node.name.as_str()).collect()
    }

    pub fn node_at(&self, target: SocketAddr) -> Result<&str> {
        let node = self.base.lab.nodes().iter().find(|node| self.node_port(node) == target);
        node.map(|node| node.name.as_str()).with_context(|| format!("no node at {target}"))
    }
}

/// Returns three nodes with one, two and no pods.
pub fn lab(attach: &str) -> LabBuilder {
    Lab::builder().pods(&[1, 2, 0]).wire_offloads(attach == "tc")
}

/// Returns port and path of a node's health check.
pub fn health_check(policy: Policy) -> (u16, &'static str) {
    match policy {
        Policy::Cluster => (HEALTHZ_PORT, "/healthz"),
        Policy::Local => (HEALTH_PORT, "/"),
    }
}

/// Returns the Service of most scenes.
pub fn service(policy: Policy, drain: Option<&str>) -> Service {
    let service = Service::new("web")
        .policy(policy)
        .vip(LOAD_BALANCER_IP.parse().unwrap_or(IpAddr::V4([203, 0, 113, 80].into())))
        .port(Port::tcp(80, POD_PORT).node_port(NODE_PORT))
        .port(Port::udp(80, POD_PORT).node_port(NODE_PORT));
    let service = if policy == Policy::Local { service.health_port(HEALTH_PORT) } else { service };
    match drain {
        Some(drain) => service.annotation("traffic-policy.io/drain", drain),
        None => service,
    }
}

/// Prints a heading with the case it illustrates.
pub fn section(title: &str, story: &str) {
    println!("\n\n{title}\n{}\n{story}\n", "─".repeat(title.chars().count()));
}
