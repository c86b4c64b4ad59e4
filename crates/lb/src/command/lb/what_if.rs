//! `lb what-if`: a Service before and after a change, in comparison.

use std::{
    collections::{BTreeMap, BTreeSet},
    io::{self, Write},
};

use anyhow::{Result, bail};
use clap::{Args, ValueEnum};
use serde::Serialize;
use traffic_policy_cluster::command::view::{self, Output, OutputArguments};
use traffic_policy_cluster::model::{Algorithm, Forwarding, Policy};

use super::{BalancerArguments, SourceArguments, document, html, print, proxy::NamedProxy};
use crate::{
    Change, Cost, Fate, Judge, Judgement, NodeChange, PortJudgement, Row, Span, WhatIf, Who,
    page::{Page, Part},
};

/// Show what a change would do to a Service: which nodes turn unhealthy, what each pod gets,
/// how many requests are lost and for how long, and what makes the change lossless. Nothing is
/// changed.
///
/// Changes are applied in this order: --node, --pod, --scale, --spread, --policy, --drain,
/// --forwarding, --algorithm.
#[derive(Debug, Args)]
pub(super) struct Arguments {
    /// The Service: NAME, or NAMESPACE/NAME.
    #[arg(value_name = "SERVICE")]
    service: String,
    /// The new externalTrafficPolicy.
    #[arg(long, env = "TRAFFIC_POLICY_WHAT_IF_POLICY", value_name = "POLICY", ignore_case = true)]
    policy: Option<PolicyArgument>,
    /// A node that vanishes with its pods, is drained (its pods move to others), or is new; may be
    /// repeated.
    #[arg(long = "node", env = "TRAFFIC_POLICY_WHAT_IF_NODE", value_name = "NAME=gone|drained|added", value_delimiter = ',',
        value_parser = node)]
    nodes: Vec<(String, NodeChange)>,
    /// A pod that is deleted, by its name or address; may be repeated.
    #[arg(long = "pod", env = "TRAFFIC_POLICY_WHAT_IF_POD", value_name = "NAME", value_delimiter = ',')]
    pods: Vec<String>,
    /// The new number of ready pods. New ones are placed on the nodes with the fewest; the nodes
    /// with the most lose theirs first.
    #[arg(long, env = "TRAFFIC_POLICY_WHAT_IF_SCALE", value_name = "N", value_parser = clap::value_parser!(u16))]
    scale: Option<u16>,
    /// Spread the pods evenly over the nodes.
    #[arg(long, env = "TRAFFIC_POLICY_WHAT_IF_SPREAD")]
    spread: bool,
    /// The annotation traffic-policy.io/drain.
    #[arg(long, env = "TRAFFIC_POLICY_WHAT_IF_DRAIN", value_name = "TIME")]
    drain: Option<Span>,
    /// The annotation traffic-policy.io/forwarding: snat, direct or tunnel. Nodes are taken to open
    /// packets of the others.
    #[arg(long, env = "TRAFFIC_POLICY_WHAT_IF_FORWARDING", value_name = "WAY", value_parser = forwarding)]
    forwarding: Option<Forwarding>,
    /// The annotation traffic-policy.io/algorithm: random or maglev.
    #[arg(long, env = "TRAFFIC_POLICY_WHAT_IF_ALGORITHM", value_name = "ALGORITHM")]
    algorithm: Option<Algorithm>,
    /// The proxy on all nodes: kube-proxy has no drain, ignores the annotations of traffic-policy,
    /// and forwards to a node that is gone until Kubernetes removes its endpoints.
    #[arg(
        long,
        env = "TRAFFIC_POLICY_WHAT_IF_PROXY",
        value_name = "PROXY",
        default_value = "traffic-policy"
    )]
    proxy: NamedProxy,
    /// Requests per second: losses are then given as numbers, too.
    #[arg(long, env = "TRAFFIC_POLICY_WHAT_IF_RATE", value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    rate: Option<u32>,
    #[command(flatten)]
    output: OutputArguments,
    #[command(flatten)]
    html: html::HtmlArguments,
    #[command(flatten)]
    source: SourceArguments,
    #[command(flatten)]
    balancer: BalancerArguments,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum PolicyArgument {
    Cluster,
    Local,
}

pub(super) fn forwarding(text: &str) -> Result<Forwarding, String> {
    Forwarding::parse(text).ok_or_else(|| format!("`{text}` is not snat, direct or tunnel"))
}

fn node(text: &str) -> Result<(String, NodeChange), String> {
    let Some((name, change)) = text.split_once('=').filter(|(name, _)| !name.is_empty()) else {
        return Err(format!("`{text}` is not NAME=gone, NAME=drained or NAME=added"));
    };
    Ok((name.to_owned(), change.parse()?))
}

impl Arguments {
    fn changes(&self) -> Vec<Change> {
        let mut changes = Vec::new();
        changes.extend(self.nodes.iter().map(|(name, change)| Change::Node(name.clone(), *change)));
        changes.extend(self.pods.iter().cloned().map(Change::PodDeleted));
        changes.extend(self.scale.map(|count| Change::Scale(count.into())));
        changes.extend(self.spread.then_some(Change::Spread));
        changes.extend(self.policy.map(|policy| match policy {
            PolicyArgument::Cluster => Change::Policy(Policy::Cluster),
            PolicyArgument::Local => Change::Policy(Policy::Local),
        }));
        changes.extend(self.drain.map(|Span(drain)| Change::Drain(drain)));
        changes.extend(self.forwarding.map(Change::Forwarding));
        changes.extend(self.algorithm.map(Change::Algorithm));
        changes
    }

    pub(super) fn execute(self) -> Result<()> {
        let changes = self.changes();
        if changes.is_empty() {
            return Err(view::usage(
                "name a change: --policy, --node, --pod, --scale, --spread, --drain, --forwarding or --algorithm",
            )
            .into());
        }
        self.html.check()?;
        let (named, overrides) = self.balancer.read()?;
        let cluster = self.source.read()?;
        let found: Vec<_> = cluster.named(&self.service).iter().map(|service| service.name.clone()).collect();
        let name = match found.as_slice() {
            [] => bail!("there is no Service {}", self.service),
            [name] => name,
            [first, ..] => {
                bail!(
                    "{} Services are called {}: write NAMESPACE/NAME, as {first}",
                    found.len(),
                    self.service
                )
            }
        };
        let Some(what_if) = WhatIf::new(&cluster, name, &changes, self.proxy.with_defaults())? else {
            bail!("there is no Service {name}")
        };
        let [before, after] = what_if.judges(named, &overrides);
        let (Some(old), Some(new)) = (before.service(name), after.service(name)) else {
            bail!(
                "Service {name} is not reached from outside: it is of type ClusterIP without externalIPs, or has no port that is served"
            );
        };
        let cost = what_if.cost(&(&before, &old), &(&after, &new));
        let compared = Compared {
            before: &before,
            after: &after,
            old: &old,
            new: &new,
            changes: &changes,
            cost: &cost,
            rate: self.rate,
        };
        self.html.write(|| compared.page())?;
        match self.output.output {
            Output::Json => view::print_json(&compared.document()),
            Output::Table => view::print(|out| compared.print(out)),
        }
    }
}

/// A Service before and after.
struct Compared<'c, 'a> {
    before: &'c Judge<'a>,
    after: &'c Judge<'a>,
    old: &'c Judgement<'a>,
    new: &'c Judgement<'a>,
    changes: &'c [Change],
    cost: &'c Cost,
    rate: Option<u32>,
}

/// One side of a line.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
struct Side {
    /// The number of ready pods.
    pods: usize,
    traffic: bool,
    request: String,
    share: f64,
}

#[derive(Serialize)]
struct NodeDocument {
    name: String,
    before: Option<Side>,
    after: Option<Side>,
}

#[derive(Serialize)]
struct PodDocument {
    pod: String,
    /// The value before the change; `null`: it did not exist.
    before: Option<f64>,
    after: Option<f64>,
}

#[derive(Serialize)]
struct Document<'c> {
    namespace: &'c str,
    name: &'c str,
    balancer: &'static str,
    policy: [&'static str; 2],
    /// The changes, in a few words each.
    changes: Vec<String>,
    nodes: Vec<NodeDocument>,
    pods: Vec<PodDocument>,
    skew: [Option<f64>; 2],
    cost: &'c Cost,
    /// The total loss, in seconds of all traffic.
    lost_seconds: f64,
    lost_requests: Option<f64>,
}

/// The number of nodes up to which each gets a line; with more, nodes that are alike share one.
const ALIKE: usize = 8;

impl<'a> Compared<'_, 'a> {
    fn ports(&self) -> [Option<&PortJudgement<'a>>; 2] {
        [self.old.ports.first(), self.new.ports.first()]
    }

    fn nodes(&self) -> Vec<NodeDocument> {
        let sides = [(self.before, self.old), (self.after, self.new)].map(|(judge, judgement)| {
            let port = judgement.ports.first();
            port.map_or_else(BTreeMap::new, |port| by_name(judge, port, judgement.is_direct()))
        });
        let names: BTreeSet<&str> = sides.iter().flat_map(|side| side.keys().copied()).collect();
        names
            .into_iter()
            .map(|name| NodeDocument {
                name: name.to_owned(),
                before: sides[0].get(name).cloned(),
                after: sides[1].get(name).cloned(),
            })
            .collect()
    }

    fn pods(&self) -> Vec<PodDocument> {
        let sides = self.ports().map(|port| {
            let mut shares: BTreeMap<String, f64> = BTreeMap::new();
            for pod in port.into_iter().flat_map(|port| &port.pods) {
                *shares.entry(pod.label()).or_default() += pod.share;
            }
            shares
        });
        let names: BTreeSet<&String> = sides.iter().flat_map(BTreeMap::keys).collect();
        names
            .into_iter()
            .map(|pod| PodDocument {
                pod: pod.clone(),
                before: sides[0].get(pod).copied(),
                after: sides[1].get(pod).copied(),
            })
            .collect()
    }

    /// Returns the documents of `lb` before and after the change.
    fn sides(&self) -> [document::Document<'_>; 2] {
        [(self.before, self.old), (self.after, self.new)].map(|(judge, judgement)| {
            let view = print::View { judge, why: false, all_nodes: false };
            document::Document::new(&view, std::slice::from_ref(judgement))
        })
    }

    fn page(&self) -> Result<Page> {
        let [before, after] = self.sides();
        Page::new(format!("What if: {}", self.old.service.name))
            .with(Part::Judged, &before)?
            .with(Part::After, &after)?
            .with(Part::WhatIf, &self.document())
    }

    fn document(&self) -> Document<'_> {
        Document {
            namespace: &self.old.service.name.namespace,
            name: &self.old.service.name.name,
            balancer: self.old.balancer.name,
            policy: [view::policy(self.old.policy), view::policy(self.new.policy)],
            changes: self.changes.iter().map(words).collect(),
            nodes: self.nodes(),
            pods: self.pods(),
            skew: self.ports().map(|port| port.and_then(PortJudgement::skew)),
            cost: self.cost,
            lost_seconds: self.cost.weight(),
            lost_requests: self.rate.map(|rate| f64::from(rate) * self.cost.weight()),
        }
    }

    fn print(&self, out: &mut dyn Write) -> io::Result<()> {
        writeln!(
            out,
            "{}  externalTrafficPolicy {}",
            self.old.service.name,
            arrow(view::policy(self.old.policy), view::policy(self.new.policy))
        )?;
        writeln!(out, "balancer  {} ({})\n", self.old.balancer.name, self.old.why_balancer)?;
        let lines = grouped(self.nodes());
        view::table(out, ["NODE", "PODS", "TRAFFIC", "A REQUEST THERE", "SHARE"], &lines, Clone::clone)?;
        writeln!(out)?;
        view::table(out, ["POD", "BEFORE", "AFTER"], &self.pods(), |pod| {
            let share = |share: Option<f64>| share.map_or_else(|| "–".to_owned(), print::percent);
            [pod.pod.clone(), share(pod.before), share(pod.after)]
        })?;
        let skews = self.ports().map(|port| port.and_then(PortJudgement::skew));
        let [old, new] = skews.map(|skew| skew.map_or_else(|| "–".to_owned(), |skew| format!("{skew:.2}")));
        writeln!(out, "skew {} (largest share ÷ mean)\n", arrow(&old, &new))?;
        self.costs(out)
    }

    fn costs(&self, out: &mut dyn Write) -> io::Result<()> {
        let cost = self.cost;
        if cost.lost.is_empty() {
            writeln!(out, "LOST    nothing")?;
        }
        for loss in &cost.lost {
            let about = if loss.sure { "" } else { "about " };
            let requests = self.rate.map_or_else(String::new, |rate| {
                format!(" = {:.0} requests", f64::from(rate) * loss.weight())
            });
            let text = format!(
                "{} for up to {about}{} s{requests}: {}",
                print::percent(loss.share),
                loss.seconds,
                loss.why
            );
            print::paragraph(out, "LOST    ", &text)?;
        }
        for late in &cost.late {
            let about = if late.sure { "" } else { "about " };
            let text = format!(
                "{} for up to {about}{} s, by a second: {}",
                print::percent(late.share),
                late.seconds,
                late.why
            );
            print::paragraph(out, "LATE    ", &text)?;
        }
        for (share, what) in &cost.cut {
            print::paragraph(out, "CUT     ", &format!("{}: {what}", print::percent(*share)))?;
        }
        if cost.cut.is_empty() {
            writeln!(out, "CUT     no connection")?;
        }
        if let Some((seconds, sure)) = cost.drain {
            let about = if sure { "" } else { " (the balancer's times are assumed)" };
            writeln!(out, "DRAIN   lossless with traffic-policy.io/drain: \"{}s\"{about}", seconds.ceil())?;
        }
        for advice in &cost.advice {
            print::paragraph(out, "NOTE    ", advice)?;
        }
        Ok(())
    }
}

fn words(change: &Change) -> String {
    match change {
        Change::Policy(policy) => format!("externalTrafficPolicy {}", view::policy(*policy)),
        Change::Node(name, NodeChange::Gone) => format!("node {name} gone"),
        Change::Node(name, NodeChange::Drained) => format!("node {name} drained"),
        Change::Node(name, NodeChange::Added) => format!("node {name} added"),
        Change::PodDeleted(pod) => format!("pod {pod} deleted"),
        Change::Scale(count) => format!("scaled to {count}"),
        Change::Spread => "pods spread".to_owned(),
        Change::Drain(drain) => format!("drain {}", view::span(*drain)),
        Change::Forwarding(way) => format!("forwarding {}", way.name()),
        Change::Algorithm(algorithm) => format!("algorithm {algorithm}"),
    }
}

fn by_name<'a>(judge: &Judge<'a>, port: &PortJudgement<'a>, is_direct: bool) -> BTreeMap<&'a str, Side> {
    let mut nodes = BTreeMap::new();
    for row in &port.rows {
        let side = side(row, is_direct);
        match row.who {
            Who::Node(name) => _ = nodes.insert(name, side),
            Who::Others(_) => {
                let names = judge.names(port, row, row.count);
                nodes.extend(names.into_iter().map(|name| (name, side.clone())));
            }
        }
    }
    nodes
}

fn side(row: &Row<'_>, is_direct: bool) -> Side {
    let share = row.share / row.count.max(1) as f64;
    let request = match row.fate {
        Fate::Served { here, of } if here > 0 && here < of => "delivered or forwarded".to_owned(),
        fate => print::fate(fate, is_direct),
    };
    Side { pods: row.pods, traffic: row.takes, request, share }
}

/// Returns lines for nodes; nodes that are alike before and after share one.
fn grouped(nodes: Vec<NodeDocument>) -> Vec<[String; 5]> {
    let mut groups: Vec<(Option<Side>, Option<Side>, Vec<String>)> = Vec::new();
    for node in nodes {
        let found =
            groups.iter_mut().find(|(before, after, _)| *before == node.before && *after == node.after);
        match found {
            Some((_, _, names)) => names.push(node.name),
            None => groups.push((node.before, node.after, vec![node.name])),
        }
    }
    let mut lines = Vec::new();
    for (before, after, names) in groups {
        let text = |of: fn(&Side) -> String| {
            let [old, new] = [&before, &after].map(|side| side.as_ref().map_or_else(|| "–".to_owned(), of));
            arrow(&old, &new)
        };
        let cells = [
            text(|side| side.pods.to_string()),
            text(|side| if side.traffic { "yes" } else { "no" }.to_owned()),
            text(|side| side.request.clone()),
            text(|side| print::percent(side.share)),
        ];
        let labels = match names.as_slice() {
            [first, ..] if names.len() > ALIKE => vec![format!("{first} and {} like it", names.len() - 1)],
            _ => names,
        };
        lines.extend(labels.into_iter().map(|label| {
            let [pods, traffic, request, share] = cells.clone();
            [label, pods, traffic, request, share]
        }));
    }
    lines.sort_by_cached_key(|line| print::natural(&line[0]));
    lines
}

/// Formats `a → b`, or `a` if nothing changes.
fn arrow(old: &str, new: &str) -> String {
    if old == new { old.to_owned() } else { format!("{old} → {new}") }
}
