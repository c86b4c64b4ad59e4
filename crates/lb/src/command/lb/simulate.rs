//! `lb simulate`: the outcome of requests while a cluster changes, second by second.

mod print;
#[cfg(test)]
mod tests;

use std::{collections::BTreeMap, time::Duration};

use anyhow::{Result, bail};
use clap::Args;
use serde::Serialize;
use traffic_policy_cluster::command::view::{self, Output, OutputArguments};
use traffic_policy_cluster::model::{Algorithm, Forwarding, Policy, ServiceName, object::Service};

use super::{
    BalancerArguments, SourceArguments, document, html, print::View, proxy::NamedProxy, what_if::forwarding,
};
use crate::{
    Balancer, Change, Cluster, Counts, Judge, Learn, Load, Measured, Moment, Proxy, Silence, Simulated,
    Simulation, Span, Timed,
    change::Objects,
    page::{Event, Page, Part, Second, Timeline},
};

/// Simulate events that concern a Service on a time line: when the balancer considers which node
/// healthy, and the outcome of each request: answered, lost, or cut. Nothing is sent and nothing is
/// changed; the same seed gives the same run.
#[derive(Debug, Args)]
pub(super) struct Arguments {
    /// The Service: NAME, or NAMESPACE/NAME.
    #[arg(value_name = "SERVICE")]
    service: String,
    /// An event and its time: '5s policy=Local'. Events are the flags of `lb what-if` without their
    /// dashes (policy=Local, drain=40s, forwarding=direct, algorithm=maglev,
    /// node=NAME=gone|drained|added, pod=NAME, scale=N, spread), and node=NAME=back|cut-off|notice,
    /// rollout, crash=NODE (its agent), outage=TIME (of the API); may be repeated.
    #[arg(
        long = "event",
        env = "TRAFFIC_POLICY_SIMULATE_EVENT",
        value_name = "TIME EVENT",
        value_delimiter = ','
    )]
    events: Vec<Timed>,
    /// Requests per second.
    #[arg(long, env = "TRAFFIC_POLICY_SIMULATE_RATE", value_name = "N", default_value = "100",
        value_parser = clap::value_parser!(u32).range(1..))]
    rate: u32,
    /// Length of the simulation.
    #[arg(long = "for", env = "TRAFFIC_POLICY_SIMULATE_FOR", value_name = "TIME", default_value = "60s")]
    lasts: Span,
    /// Seed of the random numbers that set the phases of the balancer's checks and the endpoint of
    /// each request.
    #[arg(long, env = "TRAFFIC_POLICY_SIMULATE_SEED", value_name = "N", default_value = "1")]
    seed: u64,
    /// The annotation traffic-policy.io/forwarding at the start: snat, direct or tunnel. Nodes are
    /// taken to open packets of the others.
    #[arg(long, env = "TRAFFIC_POLICY_SIMULATE_FORWARDING", value_name = "WAY", value_parser = forwarding)]
    forwarding: Option<Forwarding>,
    /// The annotation traffic-policy.io/algorithm at the start: random or maglev.
    #[arg(long, env = "TRAFFIC_POLICY_SIMULATE_ALGORITHM", value_name = "ALGORITHM")]
    algorithm: Option<Algorithm>,
    #[command(flatten)]
    delays: Delays,
    #[command(flatten)]
    proxy: ProxyArguments,
    #[command(flatten)]
    output: OutputArguments,
    #[command(flatten)]
    html: html::HtmlArguments,
    #[command(flatten)]
    source: SourceArguments,
    #[command(flatten)]
    balancer: BalancerArguments,
}

/// Delays of everything but the balancer. The defaults are assumptions.
#[derive(Debug, Args)]
#[command(next_help_heading = "Delays")]
struct Delays {
    /// Time between a request and the end of its answer; the node or pod in its path may vanish
    /// meanwhile.
    #[arg(long, env = "TRAFFIC_POLICY_SIMULATE_REQUEST_TIME", value_name = "TIME", default_value = "100ms")]
    request_time: Span,
    /// Time between an object's change and the agents' writing it.
    #[arg(long, env = "TRAFFIC_POLICY_SIMULATE_AGENT_DELAY", value_name = "TIME", default_value = "100ms")]
    agent_delay: Span,
    /// Time between a pod's change and that of its EndpointSlice.
    #[arg(
        long,
        env = "TRAFFIC_POLICY_SIMULATE_ENDPOINTS_DELAY",
        value_name = "TIME",
        default_value = "500ms"
    )]
    endpoints_delay: Span,
    /// Time until Kubernetes considers a silent node lost (--node-monitor-grace-period of its
    /// controller manager).
    #[arg(long, env = "TRAFFIC_POLICY_SIMULATE_NODE_GRACE", value_name = "TIME", default_value = "50s")]
    node_grace: Span,
    /// Time between a pod's creation and its being ready.
    #[arg(long, env = "TRAFFIC_POLICY_SIMULATE_POD_START", value_name = "TIME", default_value = "5s")]
    pod_start: Span,
    /// Time that a pod keeps serving after its deletion, as with a preStop hook that sleeps.
    #[arg(long, env = "TRAFFIC_POLICY_SIMULATE_POD_STOP", value_name = "TIME", default_value = "0")]
    pod_stop: Span,
    /// Time between the crash of an agent and its return.
    #[arg(long, env = "TRAFFIC_POLICY_SIMULATE_AGENT_RESTART", value_name = "TIME", default_value = "5s")]
    agent_restart: Span,
}

/// The proxy on the nodes, and how it notices nodes that went without a word.
#[derive(Debug, Args)]
#[command(next_help_heading = "Proxy")]
struct ProxyArguments {
    /// The proxy on all nodes: kube-proxy has no drain, ignores the annotations of traffic-policy,
    /// and forwards to a node that is gone until Kubernetes removes its endpoints.
    #[arg(
        long,
        env = "TRAFFIC_POLICY_SIMULATE_PROXY",
        value_name = "PROXY",
        default_value = "traffic-policy"
    )]
    proxy: NamedProxy,
    /// The agents' flag: the number of unanswered SYNs after which a node is suspected; 0 turns it
    /// off.
    #[arg(long, env = "TRAFFIC_POLICY_SIMULATE_SUSPECT_SYNS", value_name = "N", default_value_t = 3)]
    suspect_syns: u32,
    /// The agents' flag: the largest part of the nodes with endpoints that a node leaves out.
    #[arg(long, env = "TRAFFIC_POLICY_SIMULATE_MAX_LEFT_OUT", value_name = "PERCENT", default_value_t = 50,
        value_parser = clap::value_parser!(u8).range(0..=100))]
    max_left_out: u8,
    /// Number of TCP connections per second that each node makes to each other node with endpoints,
    /// besides those of the Service: their SYNs raise suspicions, too.
    #[arg(long, env = "TRAFFIC_POLICY_SIMULATE_OTHER_TCP", value_name = "N", default_value_t = 0,
        value_parser = clap::value_parser!(u32).range(0..=1000))]
    other_tcp: u32,
}

impl ProxyArguments {
    const fn proxy(&self) -> Proxy {
        match self.proxy {
            NamedProxy::KubeProxy => Proxy::KubeProxy,
            NamedProxy::TrafficPolicy => Proxy::TrafficPolicy(Silence {
                suspect_syns: self.suspect_syns,
                max_left_out: self.max_left_out,
                other_tcp: self.other_tcp,
            }),
        }
    }
}

impl Delays {
    const fn learn(&self) -> Learn {
        Learn {
            agent: self.agent_delay.0,
            endpoints: self.endpoints_delay.0,
            node_grace: self.node_grace.0,
            pod_start: self.pod_start.0,
            pod_stop: self.pod_stop.0,
            agent_restart: self.agent_restart.0,
        }
    }
}

impl Arguments {
    pub(super) fn execute(self) -> Result<()> {
        self.html.check()?;
        self.simulate(|judge, shown| {
            self.html.write(|| {
                let judgements: Vec<_> = judge.service(shown.service).into_iter().collect();
                let view = View { judge, why: false, all_nodes: false };
                Page::new(format!("Simulated: {}", shown.service))
                    .with(Part::Judged, &document::Document::new(&view, &judgements))?
                    .with(Part::Timeline, &shown.time_line())
            })?;
            match self.output.output {
                Output::Json => view::print_json(&shown.document()),
                Output::Table => view::print(|out| shown.print(out)),
            }
        })
    }

    /// Returns the cluster with the annotations that it is to begin with, if there are any.
    fn changed(&self, cluster: &Cluster, name: &ServiceName) -> Result<Option<Cluster>> {
        let changes: Vec<_> = self.forwarding.map(Change::Forwarding).into_iter().collect();
        let changes = changes.into_iter().chain(self.algorithm.map(Change::Algorithm));
        let Some(mut objects) = Objects::of(cluster, name) else { return Ok(None) };
        let mut is_changed = false;
        for change in changes {
            objects.make(&change)?;
            is_changed = true;
        }
        Ok(is_changed.then(|| objects.cluster()))
    }

    /// Runs the simulation, and lets a function show it.
    fn simulate(&self, show: impl FnOnce(&Judge<'_>, &Shown<'_>) -> Result<()>) -> Result<()> {
        let Span(lasts) = self.lasts;
        if lasts.is_zero() {
            return Err(view::usage("--for 0: nothing would happen; write --for 60s").into());
        }
        let (named, overrides) = self.balancer.read()?;
        let mut cluster = self.source.read()?;
        let found = cluster.named(&self.service);
        let service: &Service = match found.as_slice() {
            [] => bail!("there is no Service {}", self.service),
            [service] => service,
            [first, ..] => bail!(
                "{} Services are called {}: write NAMESPACE/NAME, as {}",
                found.len(),
                self.service,
                first.name
            ),
        };
        let name = service.name.clone();
        if let Some(changed) = self.changed(&cluster, &name)? {
            cluster = changed;
        }
        let Some(service) = cluster.index().services().find(|service| service.name == name) else {
            bail!("there is no Service {name}");
        };
        let judge = Judge::new(&cluster, named, overrides);
        let (balancer, why) = judge.balancer(service);
        let simulation = Simulation {
            cluster: &cluster,
            service: &service.name,
            balancer,
            proxy: self.proxy.proxy(),
            events: self.events.clone(),
            learn: self.delays.learn(),
            load: Load { rate: self.rate, lasts, request: self.delays.request_time.0 },
            seed: self.seed,
            measured: Measured::default(),
        };
        // Events that cannot happen are errors of the arguments.
        let simulated = simulation.run().map_err(|error| view::usage(&error.to_string()))?;
        let shown = Shown {
            service: &service.name,
            policy: service.external_policy,
            balancer: &simulation.balancer,
            why_balancer: &why,
            forwarding: service.forwarding,
            algorithm: service.algorithm,
            proxy: self.proxy.proxy(),
            rate: self.rate,
            seed: self.seed,
            lasts,
            simulated: &simulated,
        };
        show(&judge, &shown)
    }
}

/// A run and what is needed to print it.
struct Shown<'s> {
    service: &'s ServiceName,
    policy: Policy,
    balancer: &'s Balancer,
    why_balancer: &'s str,
    /// The annotations at the start.
    forwarding: Option<Forwarding>,
    algorithm: Option<Algorithm>,
    proxy: Proxy,
    rate: u32,
    seed: u64,
    lasts: Duration,
    simulated: &'s Simulated,
}

#[derive(Serialize)]
struct Document<'s> {
    namespace: &'s str,
    name: &'s str,
    /// The policy at the start.
    policy: &'static str,
    balancer: &'static str,
    proxy: &'static str,
    rate: u32,
    seed: u64,
    lasts_seconds: f64,
    total: Counts,
    nodes: BTreeMap<&'s str, Counts>,
    pods: BTreeMap<&'s str, Counts>,
    /// The answered requests that went on through another node.
    outlived: u64,
    /// The reasons why requests were lost or cut.
    why: Vec<WhyDocument>,
    seconds: Vec<SecondDocument<'s>>,
    timeline: Vec<MomentDocument<'s>>,
}

#[derive(Serialize)]
struct WhyDocument {
    why: &'static str,
    requests: u64,
}

/// The requests that were sent in one second.
#[derive(Serialize)]
struct SecondDocument<'s> {
    second: usize,
    #[serde(flatten)]
    all: Counts,
    nodes: BTreeMap<&'s str, Counts>,
    pods: BTreeMap<&'s str, Counts>,
}

#[derive(Serialize)]
struct MomentDocument<'s> {
    at_seconds: f64,
    what: String,
    nodes: &'s [String],
}

impl Shown<'_> {
    /// Returns the time line for a page.
    fn time_line(&self) -> Timeline {
        let seconds = self.simulated.seconds.iter().map(|second| {
            let Counts { ok, delayed, lost, cut } = second.all;
            Second { ok, delayed, lost, cut }
        });
        let events = self
            .simulated
            .line
            .iter()
            .map(|moment| Event { second: moment.at.as_secs_f64(), what: print::sentence(moment) });
        Timeline {
            title: format!(
                "{}, {}, {}, {} requests a second",
                self.service,
                self.balancer.name,
                self.proxy.name(),
                self.rate
            ),
            seconds: seconds.collect(),
            events: events.collect(),
        }
    }

    fn document(&self) -> Document<'_> {
        let Simulated { nodes, pods, seconds, line, why, outlived, .. } = self.simulated;
        Document {
            namespace: &self.service.namespace,
            name: &self.service.name,
            policy: view::policy(self.policy),
            balancer: self.balancer.name,
            proxy: self.proxy.name(),
            rate: self.rate,
            seed: self.seed,
            lasts_seconds: self.lasts.as_secs_f64(),
            total: self.simulated.total(),
            nodes: self.simulated.by_node(),
            pods: self.simulated.by_pod(),
            outlived: *outlived,
            why: why
                .iter()
                .map(|(why, requests)| WhyDocument { why: print::why(*why), requests: *requests })
                .collect(),
            seconds: seconds
                .iter()
                .enumerate()
                .map(|(second, of)| SecondDocument {
                    second,
                    all: of.all,
                    nodes: named(nodes, &of.nodes),
                    pods: named(pods, &of.pods),
                })
                .collect(),
            timeline: line
                .iter()
                .map(|Moment { at, what, nodes }| MomentDocument {
                    at_seconds: at.as_secs_f64(),
                    what: print::what(what),
                    nodes,
                })
                .collect(),
        }
    }
}

fn named<'s>(names: &'s [String], counts: &BTreeMap<usize, Counts>) -> BTreeMap<&'s str, Counts> {
    counts.iter().filter_map(|(number, counts)| Some((names.get(*number)?.as_str(), *counts))).collect()
}
