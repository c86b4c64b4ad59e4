//! A simulation as text: seconds in which something changes, totals, and the time line.

use std::{
    collections::{BTreeMap, BTreeSet},
    io::{self, Write},
    ops::RangeInclusive,
};

use traffic_policy_cluster::{command::view, model::Forwarding};

use super::{
    super::print::{natural, paragraph, percent, question},
    Shown,
};
use crate::{Counts, Moment, Second, What, Why};

/// The number of nodes up to which they are named; more are only counted.
const NAMED: usize = 6;

/// Describes an event and the nodes that it happened to.
pub(super) fn sentence(Moment { what: happened, nodes, .. }: &Moment) -> String {
    match nodes.is_empty() {
        true => what(happened),
        false => format!("{}: {}", names(nodes), what(happened)),
    }
}

impl Shown<'_> {
    pub(super) fn print(&self, out: &mut dyn Write) -> io::Result<()> {
        writeln!(
            out,
            "{}  externalTrafficPolicy {}; {} requests/s for {}, seed {}",
            self.service,
            view::policy(self.policy),
            self.rate,
            view::span(self.lasts),
            self.seed
        )?;
        writeln!(out, "balancer  {} ({})", self.balancer.name, self.why_balancer)?;
        writeln!(out, "proxy     {}{}\n", self.proxy.name(), self.annotations())?;
        self.seconds(out)?;
        writeln!(out)?;
        self.totals(out)?;
        if !self.simulated.line.is_empty() {
            writeln!(out)?;
        }
        for moment in &self.simulated.line {
            let title = format!("{:>9.3} s  ", moment.at.as_secs_f64());
            paragraph(out, &title, &sentence(moment))?;
        }
        Ok(())
    }

    /// Names the annotations at the start; kube-proxy knows none.
    fn annotations(&self) -> String {
        let way = self.forwarding.map(|way| format!("forwarding {}", way.name()));
        let algorithm = self.algorithm.map(|algorithm| format!("algorithm {algorithm}"));
        let named: Vec<_> = way.into_iter().chain(algorithm).collect();
        match named.is_empty() || self.proxy.is_kube_proxy() {
            true => String::new(),
            false => format!("; {}", named.join(", ")),
        }
    }

    fn seconds(&self, out: &mut dyn Write) -> io::Result<()> {
        let groups = grouped(&self.simulated.seconds);
        view::table(
            out,
            ["SECOND", "REQUESTS", "OK", "DELAYED", "LOST", "CUT", "SENT TO"],
            &groups,
            |(range, all, nodes)| {
                let second = match (range.start(), range.end()) {
                    (first, last) if first == last => first.to_string(),
                    (first, last) => format!("{first}–{last}"),
                };
                let [ok, delayed, lost, cut] = cells(all);
                [second, all.all().to_string(), ok, delayed, lost, cut, self.sent_to(nodes)]
            },
        )
    }

    fn sent_to(&self, nodes: &BTreeMap<usize, u64>) -> String {
        if nodes.is_empty() {
            return "nobody".to_owned();
        }
        if nodes.len() > NAMED {
            return format!("{} nodes", nodes.len());
        }
        let mut nodes: Vec<_> =
            nodes.iter().filter_map(|(node, sent)| Some((self.simulated.nodes.get(*node)?, sent))).collect();
        nodes.sort_by_cached_key(|(name, _)| natural(name));
        nodes.iter().map(|(name, sent)| format!("{name} {sent}")).collect::<Vec<_>>().join(", ")
    }

    fn totals(&self, out: &mut dyn Write) -> io::Result<()> {
        let total = self.simulated.total();
        writeln!(
            out,
            "TOTAL   {} requests: {} ok, {} delayed, {} lost, {} cut",
            total.all(),
            total.ok,
            total.delayed,
            total.lost,
            total.cut
        )?;
        let outlived = self.simulated.outlived;
        if total.delayed > 0 {
            let waits = self.forwarding.is_some_and(Forwarding::is_direct);
            writeln!(
                out,
                "  {} delayed: answered to the client's second SYN, a second later{}",
                total.delayed,
                if waits { ", or once their node was back or replaced" } else { "" }
            )?;
        }
        if outlived > 0 {
            writeln!(out, "  {outlived} ok or delayed: went on through another node")?;
        }
        for (reason, requests) in &self.simulated.why {
            writeln!(out, "  {requests} {}", why(*reason))?;
        }
        let mut pods: Vec<_> =
            self.simulated.by_pod().into_iter().filter(|(_, counts)| counts.all() > 0).collect();
        let answered = |counts: &Counts| counts.ok + counts.delayed;
        pods.sort_by(|(a, x), (b, y)| {
            answered(y).cmp(&answered(x)).then_with(|| natural(a).cmp(&natural(b)))
        });
        writeln!(out)?;
        view::table(out, ["POD", "OK", "DELAYED", "LOST", "CUT", "SHARE"], &pods, |(pod, counts)| {
            let share = percent(answered(counts) as f64 / answered(&total).max(1) as f64);
            let [ok, delayed, lost, cut] = cells(counts);
            [(*pod).to_owned(), ok, delayed, lost, cut, share]
        })
    }
}

fn cells(counts: &Counts) -> [String; 4] {
    [counts.ok, counts.delayed, counts.lost, counts.cut].map(|count| count.to_string())
}

type Group = (RangeInclusive<usize>, Counts, BTreeMap<usize, u64>);

/// Groups consecutive seconds that are alike: the same nodes were sent requests, and requests were
/// delayed, lost or cut in all or in none.
fn grouped(seconds: &[Second]) -> Vec<Group> {
    let like = |second: &Second| {
        let nodes: BTreeSet<usize> = second.nodes.keys().copied().collect();
        (nodes, [second.all.delayed, second.all.lost, second.all.cut].map(|count| count > 0))
    };
    let mut groups: Vec<Group> = Vec::new();
    let mut last = None;
    for (number, second) in seconds.iter().enumerate() {
        let this = Some(like(second));
        if this != last {
            groups.push((number..=number, Counts::default(), BTreeMap::new()));
        }
        last = this;
        let Some((range, all, nodes)) = groups.last_mut() else { continue };
        *range = *range.start()..=number;
        *all = *all + second.all;
        for (node, counts) in &second.nodes {
            *nodes.entry(*node).or_default() += counts.all();
        }
    }
    groups
}

fn names(nodes: &[String]) -> String {
    let mut sorted: Vec<&String> = nodes.iter().collect();
    sorted.sort_by_cached_key(|name| natural(name));
    match sorted.as_slice() {
        [first, ..] if sorted.len() > NAMED => format!("{first} and {} others", sorted.len() - 1),
        _ => sorted.iter().map(|name| name.as_str()).collect::<Vec<_>>().join(", "),
    }
}

pub(super) const fn why(why: Why) -> &'static str {
    match why {
        Why::NoNode => "lost: the balancer had no node to send to",
        Why::NodeGone => "lost or cut: sent to a node that is gone",
        Why::Dropped => "lost: dropped by a node without a pod (policy Local)",
        Why::Refused => "lost: refused, no endpoint anywhere",
        Why::PodGone => "lost or cut: passed on to a pod that is gone",
        Why::Rehashed => "cut: the router sent them to another node, which did not know them",
        Why::CutByBalancer => "cut: the balancer cuts the connections of a node that turns unhealthy",
    }
}

pub(super) fn what(what: &What) -> String {
    match what {
        What::Event(event) => event.to_string(),
        What::Written => "the agent has written it".to_owned(),
        What::Drains(time) => format!("without a pod, forwards for {} more", view::span(*time)),
        What::DrainOver => "the drain is over".to_owned(),
        What::AgentBack => "the agent is back".to_owned(),
        What::ApiBack => "the API is back".to_owned(),
        What::TakenForLost => "taken for lost by Kubernetes, its pods are no endpoints any more".to_owned(),
        What::PodStarts(pod) => format!("pod {pod} starts"),
        What::PodReady(pod) => format!("pod {pod} is ready"),
        What::PodStopped(pod) => format!("pod {pod} has stopped"),
        What::Asks(asked) => match question(*asked).as_str() {
            "–" => "the balancer asks nothing from now on".to_owned(),
            asked => format!("the balancer asks {asked} from now on"),
        },
        What::Unhealthy => "turned unhealthy".to_owned(),
        What::Healthy => "turned healthy".to_owned(),
        What::LeftOut(node) => format!("{node} does not answer: left out of new connections"),
        What::NotLeftOut(node) => format!("{node} does not answer; not left out, for too many are"),
        What::TakenBack(node) => format!("{node} answers again"),
        What::CutOff => "no other node answers: cut off itself, leaves out nobody and says 503".to_owned(),
        What::InTouch => "another node answers: not cut off any more".to_owned(),
        What::FailsOpen => "all are unhealthy: the balancer sends to all of them".to_owned(),
        What::NobodyLeft => "all are unhealthy: the balancer sends to nobody".to_owned(),
    }
}
