//! Changes of a cluster from one moment to the next, as load balancers learn of them. Pure.

mod alike;
mod heard;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};

use traffic_policy_cluster::model::{Policy, ServiceName, object::Readiness};

pub use self::heard::Heard;

use self::alike::tell;
use super::{
    finding::Level,
    judge::Judge,
    nodes::{Kind, Who},
    probe::expected_text,
    verdict::{Answer, Fate, Judgement, Membership, Question, Row},
};

/// The consequences of the objects at one moment, without the objects.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Snapshot {
    /// Each Node with its properties for all Services.
    nodes: BTreeMap<String, Class>,
    services: BTreeMap<ServiceName, Service>,
}

/// The properties that the answer of a node without an endpoint depends on, in words.
type Class = String;

#[derive(Clone, Debug, PartialEq)]
struct Service {
    policy: Policy,
    /// The balancer, and the time until it acts on a refusal.
    believes: Option<String>,
    ports: BTreeMap<String, Port>,
    /// Findings of levels error and warning, by their codes.
    findings: BTreeMap<&'static str, Found>,
}

/// The level of a finding, and its sentence.
#[derive(Clone, Debug, PartialEq)]
struct Found(Level, String);

#[derive(Clone, Debug, Default, PartialEq)]
struct Port {
    own: BTreeMap<String, State>,
    /// Nodes that need no entry of their own, with their number.
    others: BTreeMap<Class, (State, usize)>,
    lost: f64,
}

/// The state of a node for a Service port.
#[derive(Clone, Copy, Debug, PartialEq)]
struct State {
    healthy: bool,
    takes: bool,
    pods: usize,
    answer: Answer,
    fate: Fate,
}

fn class(kind: &Kind<'_>) -> Class {
    let mut words = Vec::new();
    words.extend(kind.zone.map(|zone| format!("zone {zone}")));
    let marks = [
        (kind.leaving, "leaving"),
        (kind.excluded, "excluded from balancers"),
        (kind.readiness == Readiness::Unknown, "kubelet silent"),
    ];
    words.extend(marks.iter().filter(|(is, _)| *is).map(|(_, word)| (*word).to_owned()));
    words.join(", ")
}

impl State {
    fn of(row: &Row<'_>) -> Self {
        let healthy = row.membership == Membership::Member && row.answer.is_healthy();
        Self { healthy, takes: row.takes, pods: row.pods, answer: row.answer, fate: row.fate }
    }
}

impl Snapshot {
    #[must_use]
    pub fn new<'a>(judge: &Judge<'a>, judgements: &[Judgement<'a>]) -> Self {
        let nodes = judge.cluster.index().nodes();
        Self {
            nodes: nodes.map(|node| (node.name.clone(), class(&judge.nodes.kind(&node.name)))).collect(),
            services: judgements
                .iter()
                .map(|judgement| (judgement.service.name.clone(), Service::new(judgement)))
                .collect(),
        }
    }

    /// Returns the changes since `self`, a sentence each.
    #[must_use]
    pub fn changes(&self, new: &Self) -> Vec<String> {
        let mut lines = Vec::new();
        let changed = self.nodes(new, &mut lines);
        let names: BTreeSet<_> = self.services.keys().chain(new.services.keys()).collect();
        for name in names {
            match (self.services.get(name), new.services.get(name)) {
                (Some(old), Some(now)) => {
                    let mut told = Vec::new();
                    Between { old: self, new, changed: &changed }.service(old, now, &mut told);
                    lines.extend(told.into_iter().map(|line| format!("{name}: {line}")));
                }
                (None, Some(now)) => {
                    lines.push(format!("{name}: is reached from outside: {}", now.state()));
                    lines.extend(now.found().map(|line| format!("{name}: {line}")));
                }
                (Some(_), None) => lines.push(format!("{name}: is not reached from outside any more")),
                (None, None) => {}
            }
        }
        lines
    }

    /// Returns the state of each Service and its findings, a sentence each.
    #[must_use]
    pub fn beginning(&self) -> Vec<String> {
        let mut lines = Vec::new();
        for (name, service) in &self.services {
            lines.push(format!("{name}: {}", service.state()));
            lines.extend(service.found().map(|line| format!("{name}: {line}")));
        }
        lines
    }

    /// Reports Nodes that were added, removed, or whose properties changed. Returns their names.
    fn nodes(&self, new: &Self, lines: &mut Vec<String>) -> BTreeSet<String> {
        let mut changed = BTreeSet::new();
        let mut told: BTreeMap<String, Vec<&str>> = BTreeMap::new();
        for name in self.nodes.keys().chain(new.nodes.keys()).collect::<BTreeSet<_>>() {
            let words = |class: &Class| if class.is_empty() { "nothing" } else { class }.to_owned();
            let what = match (self.nodes.get(name), new.nodes.get(name)) {
                (Some(old), Some(now)) if old == now => continue,
                (Some(old), Some(now)) => {
                    format!("said of the Node: {} → {}", words(old), words(now))
                }
                (None, Some(now)) if now.is_empty() => "a new Node".to_owned(),
                (None, Some(now)) => format!("a new Node: {now}"),
                (Some(_), None) => "the Node is gone".to_owned(),
                (None, None) => continue,
            };
            changed.insert(name.clone());
            told.entry(what).or_default().push(name);
        }
        tell(told, lines);
        changed
    }

    fn state<'p>(&self, port: &'p Port, node: &str) -> Option<&'p State> {
        port.own.get(node).or_else(|| Some(&port.others.get(self.nodes.get(node)?)?.0))
    }
}

impl Service {
    fn new(judgement: &Judgement<'_>) -> Self {
        let balancer = &judgement.balancer;
        let notices = balancer.notices_refusal(judgement.policy);
        let asks = judgement.ports.iter().any(|port| port.question != Question::Nothing);
        let about = if notices.sure { "" } else { "about " };
        let mut ports: BTreeMap<String, Port> = BTreeMap::new();
        for port in &judgement.ports {
            let label = match judgement.ports.as_slice() {
                [_] => String::new(),
                _ => port.keys.first().map_or_else(String::new, |key| {
                    format!("{}/{}{} ", key.port, key.protocol, if key.ipv6 { "/IPv6" } else { "" })
                }),
            };
            ports.insert(label, Port::new(port));
        }
        Self {
            policy: judgement.policy,
            believes: asks
                .then(|| format!("{} knows within {about}{} s", balancer.name, notices.value.as_secs_f64())),
            ports,
            findings: judgement
                .findings
                .iter()
                .rev()
                .filter(|finding| finding.level != Level::Note)
                .map(|finding| (finding.code, Found(finding.level, finding.what.clone())))
                .collect(),
        }
    }

    /// Returns the findings, a sentence each.
    fn found(&self) -> impl Iterator<Item = String> {
        self.findings.iter().map(|(code, found)| found.line(code))
    }

    fn state(&self) -> String {
        let policy = policy(self.policy);
        let ports = self.ports.iter().map(|(label, port)| {
            let (healthy, nodes, pods) = port.counts();
            format!(
                "{label}{healthy} of {nodes} nodes healthy, {pods} ready pod{}",
                if pods == 1 { "" } else { "s" }
            )
        });
        format!("policy {policy}, {}", ports.collect::<Vec<_>>().join("; "))
    }
}

impl Found {
    fn line(&self, code: &str) -> String {
        let Self(level, what) = self;
        format!("{} {code}: {what}", level.name())
    }
}

const fn policy(policy: Policy) -> &'static str {
    match policy {
        Policy::Cluster => "Cluster",
        Policy::Local => "Local",
    }
}

impl Port {
    fn new(port: &super::PortJudgement<'_>) -> Self {
        let mut own = BTreeMap::new();
        let mut others: BTreeMap<Class, (State, usize)> = BTreeMap::new();
        for row in &port.rows {
            let state = State::of(row);
            match row.who {
                Who::Node(name) => _ = own.insert(name.to_owned(), state),
                Who::Others(_) => others.entry(class(&row.kind)).or_insert((state, 0)).1 += row.count,
            }
        }
        Self { own, others, lost: port.lost }
    }

    /// Returns the numbers of healthy nodes, all nodes, and ready pods.
    fn counts(&self) -> (usize, usize, usize) {
        let own = self.own.values().map(|state| (state, 1));
        let all = own.chain(self.others.values().map(|(state, count)| (state, *count)));
        all.fold((0, 0, 0), |(healthy, nodes, pods), (state, count)| {
            let is_healthy = if state.healthy { count } else { 0 };
            (healthy + is_healthy, nodes + count, pods + state.pods * count)
        })
    }
}

struct Between<'s> {
    old: &'s Snapshot,
    new: &'s Snapshot,
    /// Nodes whose properties changed.
    changed: &'s BTreeSet<String>,
}

impl Between<'_> {
    fn service(&self, old: &Service, new: &Service, lines: &mut Vec<String>) {
        if old.policy != new.policy {
            lines.push(format!("externalTrafficPolicy {} → {}", policy(old.policy), policy(new.policy)));
        }
        for (label, now) in &new.ports {
            match old.ports.get(label) {
                Some(before) => self.port(label, before, now, new.believes.as_deref(), lines),
                None => lines.push(format!("{label}is judged by itself")),
            }
        }
        for (code, found) in &new.findings {
            // Its sentence has numbers, which may change often.
            if old.findings.get(code).is_none_or(|before| before.0 != found.0) {
                lines.push(found.line(code));
            }
        }
        for code in old.findings.keys().filter(|code| !new.findings.contains_key(*code)) {
            lines.push(format!("{code} is over"));
        }
    }

    fn port(&self, label: &str, old: &Port, new: &Port, believes: Option<&str>, lines: &mut Vec<String>) {
        let names: BTreeSet<_> = old.own.keys().chain(new.own.keys()).chain(self.changed).collect();
        let mut told: BTreeMap<String, Vec<&str>> = BTreeMap::new();
        for name in names {
            if let Some(what) = differs(self.old.state(old, name), self.new.state(new, name), believes) {
                told.entry(format!("{label}{what}")).or_default().push(name);
            }
        }
        tell(told, lines);
        for (class, (now, count)) in &new.others {
            let before = old.others.get(class).map(|(state, _)| state);
            if before.is_some()
                && let Some(what) = differs(before, Some(now), believes)
            {
                let which = if class.is_empty() { String::new() } else { format!(" ({class})") };
                lines.push(format!("{count} nodes without a pod{which}: {label}{what}"));
            }
        }
        if (old.lost - new.lost).abs() >= 0.0005 {
            lines.push(format!(
                "{label}lost {:.1} % → {:.1} % of the requests",
                old.lost * 100.0,
                new.lost * 100.0
            ));
        }
    }
}

/// Describes the change of a node's state for a Service port; `None` if there is none.
fn differs(old: Option<&State>, new: Option<&State>, believes: Option<&str>) -> Option<String> {
    let (Some(old), Some(new)) = (old, new) else {
        let (state, word) = match (old, new) {
            (None, Some(new)) => (new, "is there"),
            (Some(old), None) => (old, "is gone"),
            _ => return None,
        };
        let health = if state.healthy { "healthy" } else { "unhealthy" };
        return Some(format!("{word}, {health}, {}", pods(state.pods)));
    };
    let mut parts = Vec::new();
    let (before, after) = (expected_text(old.answer), expected_text(new.answer));
    if before != after {
        parts.push(format!("{before} → {after}"));
    }
    if old.pods != new.pods {
        parts.push(format!("{} → {}", old.pods, pods(new.pods)));
    }
    if old.fate_word() != new.fate_word() {
        parts.push(format!("a request there: {} → {}", old.fate_word(), new.fate_word()));
    }
    let head = match (old.healthy != new.healthy, old.takes != new.takes) {
        (true, _) if new.healthy => "turns healthy",
        (true, _) => "turns unhealthy",
        (false, true) if new.takes => "gets traffic, for all are unhealthy",
        (false, true) => "gets no traffic any more",
        (false, false) if parts.is_empty() => return None,
        (false, false) if new.healthy => "stays healthy",
        (false, false) => "stays unhealthy",
    };
    if old.healthy != new.healthy {
        parts.extend(believes.map(str::to_owned));
    }
    Some(if parts.is_empty() { head.to_owned() } else { format!("{head}: {}", parts.join("; ")) })
}

fn pods(count: usize) -> String {
    format!("{count} pod{}", if count == 1 { "" } else { "s" })
}

impl State {
    const fn fate_word(self) -> &'static str {
        match self.fate {
            Fate::Served { here: 0, .. } => "forwarded",
            Fate::Served { .. } => "served",
            Fate::Dropped => "dropped",
            Fate::Refused => "refused",
        }
    }
}
