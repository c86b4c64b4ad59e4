//! A cluster of which one agent watches the nodes, and what it finds out about them.

use std::time::Duration;

use serde_json::Value;
use traffic_policy_testing::agent::Agent;
use traffic_policy_testing::cluster::{Cluster, TARGET};
use traffic_policy_testing::lab::{Family, Lab, LabBuilder, Node};
use traffic_policy_testing::object::{Backend, Port, Service};
use traffic_policy_testing::pace::{look_until, until};
use traffic_policy_testing::traffic::connections::{NewConnections, Report};

pub const NODE_PORT: u16 = 30_080;
const PATIENCE: Duration = Duration::from_secs(30);
/// New connections a second: three SYNs to each endpoint come in a fraction of a second.
const RATE: u32 = 60;

/// Three nodes with a pod each, and an agent on the first, by which all connections come.
pub struct Watched {
    pub agent: Agent,
    pub cluster: Cluster,
    /// The suspicions that ended before the present case, alive and dead.
    before: [f64; 2],
}

/// The results of suspicions, as the metric names them.
const RESULTS: [&str; 2] = ["alive", "dead"];

/// The Service of all connections.
pub fn web() -> Service {
    Service::new("web").port(Port::tcp(80, TARGET).node_port(NODE_PORT))
}

impl Watched {
    pub fn start() -> Self {
        Self::start_in(Lab::builder())
    }

    /// A variant of [`Self::start`] with another place of the client.
    pub fn start_in(lab: LabBuilder) -> Self {
        Self::start_with(lab, Cluster::backends)
    }

    /// A variant of [`Self::start_in`] with other endpoints than a pod of each node.
    pub fn start_with(lab: LabBuilder, backends: impl FnOnce(&Cluster) -> Vec<Backend>) -> Self {
        let cluster = Cluster::start(lab.pods(&[1, 1, 1])).unwrap();
        cluster.manifests.apply(&web(), &backends(&cluster)).unwrap();
        let agent = Agent::builder(&cluster.lab, cluster.lab.node(1)).start().unwrap();
        agent.wait_ready(PATIENCE).unwrap();
        Self { agent, cluster, before: [0.0; 2] }
    }

    /// Drops frames on the switch between the nodes and the router, ARP and NDP as well, in place
    /// of those dropped so far: hooks of the bridge, each with an expression of nftables. Ports are
    /// named as the nodes.
    pub fn on_switch(&self, drops: &[(&str, &str)]) {
        let mut rules = "table bridge lossy {}\ndelete table bridge lossy\n".to_owned();
        for (number, (hook, what)) in drops.iter().enumerate() {
            let chain = format!("chain c{number} {{ type filter hook {hook} priority 0; {what} drop\n }}");
            rules += &format!("table bridge lossy {{ {chain}\n }}\n");
        }
        self.cluster.lab.router().feed("nft", &["-f", "-"], &rules).unwrap();
    }

    pub fn far(&self) -> &Node {
        self.cluster.lab.node(3)
    }

    /// Opens connections for some seconds, whether or not they are answered.
    pub fn connect(&self, seconds: u32) -> Report {
        self.connect_by(Family::V4, seconds)
    }

    pub fn connect_by(&self, family: Family, seconds: u32) -> Report {
        let target = self.cluster.at(1, family, NODE_PORT);
        let client = self.cluster.lab.client().netns();
        NewConnections::start_bounded(client, RATE, (RATE * seconds).into(), move |_| Some(target)).wait()
    }

    pub fn left_out(&self) -> Vec<String> {
        let body: Value = serde_json::from_str(&self.agent.healthz().unwrap().body).unwrap();
        let names = body["leftOut"].as_array().map_or(&[][..], Vec::as_slice);
        names.iter().map(|name| name.as_str().unwrap().to_owned()).collect()
    }

    fn all_suspicions(&self) -> [f64; 2] {
        let metrics = self.agent.scrape().unwrap();
        RESULTS.map(|result| {
            metrics.value("traffic_policy_node_suspicions_total", &[("result", result)]).unwrap_or(0.0)
        })
    }

    /// The numbers of nodes that were suspected in this case, and found alive and dead.
    pub fn found(&self) -> [f64; 2] {
        let now = self.all_suspicions();
        [now[0] - self.before[0], now[1] - self.before[1]]
    }

    /// The number of nodes that were suspected in this case, with one of the results.
    pub fn suspicions(&self, result: &str) -> f64 {
        let number = RESULTS.iter().position(|known| *known == result).unwrap();
        self.found()[number]
    }

    /// Begins the next case: the nodes that were cut off are back.
    pub fn begin_again(&mut self) {
        for node in self.cluster.lab.nodes() {
            self.cluster.lab.mend(node).unwrap();
        }
        until("the nodes to be back", PATIENCE, || self.left_out().is_empty());
        self.before = self.all_suspicions();
    }

    /// Fails if a node was left out in this case; `suspected`: whether one must have been asked.
    pub fn none_is_dead(&self, what: &str, suspected: bool) {
        assert_eq!(self.left_out(), [""; 0], "{what}: {}", self.agent.log());
        assert!(self.suspicions("dead") < 0.5, "{what}: {}", self.agent.log());
        if suspected {
            assert!(self.suspicions("alive") > 0.5, "{what}: nothing was suspected, so nothing is shown");
        }
    }

    /// The control: a node that is really gone is left out.
    pub fn a_dead_one_is(&self, what: &str) {
        self.cluster.lab.cut(self.far()).unwrap();
        look_until(
            &format!("{what}: a dead node to be left out"),
            PATIENCE,
            || {
                self.connect(1);
                self.left_out()
            },
            |names| *names == [self.far().name.clone()],
        );
    }
}
