//! Judgements as text.

use std::{
    collections::BTreeMap,
    io::{self, Write},
};

use crate::{
    ALLOCATED, Answer, Ask, Balancer, Check, Fact, Fate, Finding, Judge, Judgement, Level, Membership,
    PortJudgement, Question, Row, Weights, Who,
};
use traffic_policy_cluster::{
    command::view,
    model::{FrontendKind, Policy, ServicePortKey, object::Readiness, object::ServiceType},
};

/// The number of Services up to which each is shown in detail; with more, each gets one line.
const DETAILS: usize = 5;
/// The number of nodes that are alike up to which each gets a line; more share one.
const ALIKE: usize = 8;
/// The number of findings in an overview.
const MOST_FINDINGS: usize = 40;
/// The width of a sentence, in columns.
const WIDTH: usize = 110;

pub(super) struct View<'v, 'a> {
    pub(super) judge: &'v Judge<'a>,
    pub(super) why: bool,
    pub(super) all_nodes: bool,
}

impl<'a> View<'_, 'a> {
    pub(super) fn print(
        &self,
        out: &mut dyn Write,
        judgements: &[Judgement<'a>],
        named: bool,
    ) -> io::Result<()> {
        if judgements.is_empty() {
            return writeln!(out, "no Service is reached from outside");
        }
        if !named && judgements.len() > DETAILS {
            return overview(out, judgements);
        }
        for (at, judgement) in judgements.iter().enumerate() {
            if at > 0 {
                writeln!(out)?;
            }
            self.details(out, judgement)?;
        }
        Ok(())
    }

    fn details(&self, out: &mut dyn Write, judgement: &Judgement<'a>) -> io::Result<()> {
        let service = judgement.service;
        writeln!(
            out,
            "{}  {}, externalTrafficPolicy {}",
            service.name,
            service_type(service.service_type),
            view::policy(judgement.policy)
        )?;
        writeln!(out, "balancer  {} ({})", judgement.balancer.name, judgement.why_balancer)?;
        if let Some(port) = judgement.ports.first() {
            let check = judgement.balancer.check(judgement.policy);
            writeln!(out, "asks      {}", asks(port.question, check))?;
        }
        if self.why {
            for line in facts(&judgement.balancer) {
                writeln!(out, "          {line}")?;
            }
        }
        for port in &judgement.ports {
            writeln!(out, "\nport      {}", reached(port))?;
            self.nodes(out, port, judgement.is_direct())?;
            writeln!(out)?;
            pods(out, port)?;
            if self.why {
                writeln!(out)?;
                for row in &port.rows {
                    let text = format!("{}: {}", self.label(port, row), evidence(judgement, port, row));
                    paragraph(out, "why     ", &text)?;
                }
            }
        }
        if !judgement.findings.is_empty() {
            writeln!(out)?;
        }
        for finding in &judgement.findings {
            print_finding(out, finding)?;
        }
        Ok(())
    }

    /// Returns the names of all nodes of a row.
    fn label(&self, port: &PortJudgement<'a>, row: &Row<'a>) -> String {
        match (row.who, self.judge.names(port, row, 1).first()) {
            (Who::Node(name), _) => name.to_owned(),
            (_, Some(first)) if row.count > 1 => format!("{first} and {} like it", row.count - 1),
            (_, first) => first.copied().unwrap_or_default().to_owned(),
        }
    }

    fn nodes(&self, out: &mut dyn Write, port: &PortJudgement<'a>, is_direct: bool) -> io::Result<()> {
        let mut lines: Vec<[String; 7]> = Vec::new();
        for row in &port.rows {
            let apart = self.all_nodes || row.count <= ALIKE;
            let (names, share) = if apart {
                let names = self.judge.names(port, row, row.count);
                let each = row.share / row.count.max(1) as f64;
                (names.into_iter().map(str::to_owned).collect(), each)
            } else {
                (vec![self.label(port, row)], row.share)
            };
            for name in names {
                lines.push([
                    name,
                    row.pods.to_string(),
                    question(port.question),
                    answer(row.answer).to_owned() + &weight(row.answer),
                    traffic(port, row),
                    fate(row.fate, is_direct),
                    percent(share),
                ]);
            }
        }
        // Natural order: node-2 before node-10.
        lines.sort_by_cached_key(|line| natural(&line[0]));
        let header = ["NODE", "PODS", "ASKED", "TOLD", "TRAFFIC", "A REQUEST THERE", "SHARE"];
        view::table(out, header, &lines, Clone::clone)
    }
}

/// Returns a sort key in which numbers within a name count by their value.
pub(super) fn natural(name: &str) -> Vec<(String, u64)> {
    let mut parts = Vec::new();
    let mut rest = name;
    while !rest.is_empty() {
        let digits = rest.find(|c: char| c.is_ascii_digit()).unwrap_or(rest.len());
        let (text, tail) = rest.split_at(digits);
        let end = tail.find(|c: char| !c.is_ascii_digit()).unwrap_or(tail.len());
        let (number, tail) = tail.split_at(end);
        parts.push((text.to_owned(), number.parse().unwrap_or(u64::MAX)));
        rest = tail;
    }
    parts
}

fn overview(out: &mut dyn Write, judgements: &[Judgement<'_>]) -> io::Result<()> {
    let rows: Vec<_> = judgements
        .iter()
        .flat_map(|judgement| {
            judgement.ports.iter().enumerate().map(move |(at, port)| (judgement, port, at == 0))
        })
        .collect();
    let header =
        ["SERVICE", "POLICY", "BALANCER", "NODES", "HEALTHY", "TRAFFIC", "PODS", "SKEW", "LOST", "FINDINGS"];
    view::table(out, header, &rows, |(judgement, port, first)| {
        let named: Vec<_> =
            port.keys.iter().map(|key| key.port.as_str()).filter(|name| !name.is_empty()).collect();
        let colon = if named.is_empty() || *first { String::new() } else { format!(":{}", named.join(",")) };
        [
            format!("{}{colon}", judgement.service.name),
            view::policy(judgement.policy).to_owned(),
            judgement.balancer.name.to_owned(),
            port.nodes().to_string(),
            port.healthy().to_string(),
            port.taking().to_string(),
            port.ready().to_string(),
            port.skew().map_or_else(|| "–".to_owned(), |skew| format!("{skew:.2}")),
            percent(port.lost),
            if *first { tally(&judgement.findings) } else { String::new() },
        ]
    })?;
    let mut findings: Vec<&Finding> = judgements
        .iter()
        .flat_map(|judgement| &judgement.findings)
        .filter(|finding| finding.level < Level::Note)
        .collect();
    findings.sort_by_key(|finding| finding.level);
    if !findings.is_empty() {
        writeln!(out)?;
    }
    for finding in findings.iter().take(MOST_FINDINGS) {
        print_finding(out, finding)?;
    }
    if findings.len() > MOST_FINDINGS {
        writeln!(out, "and {} more: name a Service, or see --output json", findings.len() - MOST_FINDINGS)?;
    }
    Ok(())
}

/// Formats counts such as `1 error, 2 warnings`.
fn tally(findings: &[Finding]) -> String {
    let mut counts: BTreeMap<Level, usize> = BTreeMap::new();
    for finding in findings {
        *counts.entry(finding.level).or_default() += 1;
    }
    let parts: Vec<_> = counts
        .iter()
        .map(|(level, count)| format!("{count} {}{}", level.name(), if *count == 1 { "" } else { "s" }))
        .collect();
    if parts.is_empty() { "–".to_owned() } else { parts.join(", ") }
}

pub(super) fn print_finding(out: &mut dyn Write, finding: &Finding) -> io::Result<()> {
    paragraph(out, &format!("{:<8}", finding.level.name().to_uppercase()), &finding.what)?;
    if !finding.fix.is_empty() {
        paragraph(out, "  fix   ", &finding.fix)?;
    }
    for line in finding.yaml.iter().flat_map(|yaml| yaml.lines()) {
        writeln!(out, "        {line}")?;
    }
    Ok(())
}

pub(super) fn paragraph(out: &mut dyn Write, title: &str, text: &str) -> io::Result<()> {
    let indent = title.chars().count();
    for (at, line) in view::wrap(text, WIDTH - indent).iter().enumerate() {
        match at {
            0 => writeln!(out, "{title}{line}")?,
            _ => writeln!(out, "{:indent$}{line}", "")?,
        }
    }
    Ok(())
}

fn pods(out: &mut dyn Write, port: &PortJudgement<'_>) -> io::Result<()> {
    if port.pods.is_empty() {
        return writeln!(out, "no pod takes connections");
    }
    let mut pods: Vec<_> = port.pods.iter().collect();
    pods.sort_by(|a, b| {
        b.share.total_cmp(&a.share).then_with(|| natural(&a.label()).cmp(&natural(&b.label())))
    });
    view::table(out, ["POD", "NODE", "SHARE", ""], &pods, |pod| {
        let label = if pod.ready { pod.label() } else { format!("{} (terminating)", pod.label()) };
        [label, pod.node.unwrap_or("–").to_owned(), percent(pod.share), bar(pod.share)]
    })?;
    if let Some(skew) = port.skew() {
        writeln!(out, "skew {skew:.2} (largest share ÷ mean)")?;
    }
    if port.lost > 0.0 {
        writeln!(out, "lost {} of all requests", percent(port.lost))?;
    }
    Ok(())
}

/// Draws a bar with one block for every two percent.
fn bar(share: f64) -> String {
    let blocks = (share.clamp(0.0, 1.0) * 50.0).round() as usize;
    "█".repeat(blocks)
}

pub(super) fn percent(share: f64) -> String {
    format!("{:.1} %", share * 100.0)
}

pub(super) const fn service_type(service_type: ServiceType) -> &'static str {
    match service_type {
        ServiceType::ClusterIp => "ClusterIP",
        ServiceType::NodePort => "NodePort",
        ServiceType::LoadBalancer => "LoadBalancer",
    }
}

/// Describes the ports of a table, and where they are reached.
fn reached(port: &PortJudgement<'_>) -> String {
    let keys: Vec<_> = port.keys.iter().map(port_name).collect();
    let frontends: Vec<_> = port
        .frontends
        .iter()
        .map(|frontend| match frontend.kind {
            FrontendKind::NodePort => format!("node port {}", frontend.address.port()),
            _ => frontend.address.to_string(),
        })
        .collect();
    let mut seen = Vec::new();
    for text in frontends {
        if !seen.contains(&text) {
            seen.push(text);
        }
    }
    format!("{}: {}", keys.join(", "), seen.join(", "))
}

fn port_name(key: &ServicePortKey) -> String {
    let family = if key.ipv6 { "IPv6" } else { "IPv4" };
    let dash = if key.port.is_empty() { "" } else { " " };
    format!("{}{dash}{} {family}", key.port, key.protocol)
}

pub(super) fn question(question: Question) -> String {
    match question {
        Question::ProxyHealth => "GET :10256/healthz".to_owned(),
        Question::ServiceHealth(ALLOCATED) => "GET the health port".to_owned(),
        Question::ServiceHealth(port) => format!("GET :{port}"),
        Question::TrafficPort(port) => format!("connect :{port}"),
        Question::Nothing => "–".to_owned(),
    }
}

pub(super) const fn answer(answer: Answer) -> &'static str {
    match answer {
        Answer::Ok(_) => "200",
        Answer::Unavailable => "503",
        Answer::Open => "connects",
        Answer::Refused => "refused",
        Answer::Silence => "silence",
        Answer::Announced => "announces",
        Answer::NotAnnounced => "does not announce",
    }
}

fn weight(answer: Answer) -> String {
    match answer {
        Answer::Ok(Some(weight)) => format!(", weight {weight}"),
        _ => String::new(),
    }
}

fn traffic(port: &PortJudgement<'_>, row: &Row<'_>) -> String {
    match row.membership {
        Membership::Excluded => "no: excluded".to_owned(),
        Membership::NoNode => "no: no such Node".to_owned(),
        Membership::Member if row.takes && port.failed_open => "yes: all are unhealthy".to_owned(),
        Membership::Member if row.takes => "yes".to_owned(),
        Membership::Member => "no".to_owned(),
    }
}

pub(super) fn fate(fate: Fate, is_direct: bool) -> String {
    let way = if is_direct { "forwarded, direct" } else { "forwarded, SNAT" };
    match fate {
        Fate::Served { here, of } if here == of => "delivered".to_owned(),
        Fate::Served { here: 0, .. } => way.to_owned(),
        Fate::Served { here, of } => format!("delivered {here} of {of}, else {way}"),
        Fate::Dropped => "dropped in silence".to_owned(),
        Fate::Refused => "refused".to_owned(),
    }
}

/// Describes the health check of nodes, and its thresholds.
fn asks(asked: Question, check: &Check) -> String {
    if asked == Question::Nothing {
        return "nothing: a speaker on the node announces it".to_owned();
    }
    format!(
        "{}{} every {}, {} for an answer; unhealthy after {} failures, healthy after {}",
        question(asked),
        mark(check.ask.sure),
        fact(&check.interval, |time| view::span(*time)),
        fact(&check.timeout, |time| view::span(*time)),
        fact(&check.failures, ToString::to_string),
        fact(&check.successes, ToString::to_string),
    )
}

const fn mark(sure: bool) -> &'static str {
    if sure { "" } else { "?" }
}

fn fact<T>(fact: &Fact<T>, text: impl Fn(&T) -> String) -> String {
    format!("{}{}", text(&fact.value), mark(fact.sure))
}

/// Lists the remaining facts about a balancer.
fn facts(balancer: &Balancer) -> Vec<String> {
    let yes = |value: &bool| if *value { "yes" } else { "no" }.to_owned();
    let weights = match balancer.weights.value {
        Weights::Never => "no".to_owned(),
        Weights::Always => "by the health port's header".to_owned(),
        Weights::Annotated(name, value) => format!("with annotation {name}: {value}"),
    };
    vec![
        format!("sends to all while all are unhealthy: {}", fact(&balancer.fail_open, yes)),
        format!("weighs nodes by their pods: {weights}{}", mark(balancer.weights.sure)),
        format!(
            "its controller hands changes on within: {}",
            fact(&balancer.controller, |time| view::span(*time))
        ),
        format!("ends connections itself: {}", fact(&balancer.proxies, yes)),
        format!("cuts connections by a node that turns unhealthy: {}", fact(&balancer.cuts, yes)),
        format!(
            "a router moves connections when the number of nodes changes: {}",
            fact(&balancer.rehashes, yes)
        ),
        "? = assumed, not found in its source or documentation: docs/balancers.md".to_owned(),
    ]
}

/// Lists the facts that a row follows from.
fn evidence(judgement: &Judgement<'_>, port: &PortJudgement<'_>, row: &Row<'_>) -> String {
    let mut parts = Vec::new();
    let total = port.ready();
    parts.push(format!("{} of {total} ready endpoints have this nodeName", row.pods));
    if let Some(zone) = row.kind.zone {
        parts.push(format!("zone {zone}"));
    }
    match row.membership {
        Membership::Excluded => {
            parts.push(
                "the Node has the label node.kubernetes.io/exclude-from-external-load-balancers".to_owned(),
            );
        }
        Membership::NoNode => parts.push("there is no Node of this name".to_owned()),
        Membership::Member => {}
    }
    if row.kind.leaving {
        parts.push("the Node is being deleted, or has the taint ToBeDeletedByClusterAutoscaler".to_owned());
    }
    if row.kind.unschedulable {
        parts.push("spec.unschedulable is set, which balancers do not look at".to_owned());
    }
    if row.kind.preemptible {
        parts.push("its labels say that the cloud may take it away".to_owned());
    }
    if row.kind.readiness == Readiness::Unknown {
        parts.push("condition Ready is Unknown".to_owned());
    }
    parts.push(match (port.question, row.answer) {
        (Question::Nothing, _) => "nobody asks it".to_owned(),
        (Question::ProxyHealth, Answer::Unavailable) => {
            "/healthz says 503 for a Node that is leaving".to_owned()
        }
        (Question::ProxyHealth, _) => "/healthz does not look at endpoints".to_owned(),
        (Question::ServiceHealth(_), _) => "the health port counts ready endpoints of the node".to_owned(),
        (Question::TrafficPort(_), _) => "the check meets what a request meets".to_owned(),
    });
    parts.push(match row.fate {
        Fate::Served { of, .. } if judgement.policy == Policy::Cluster => {
            format!("policy Cluster: one of {of} endpoints")
        }
        Fate::Served { here: 0, of } => format!("policy Local, external-fallback: one of {of} endpoints"),
        Fate::Served { of, .. } => format!("policy Local: one of {of} endpoints here"),
        Fate::Dropped => "policy Local: endpoints elsewhere only".to_owned(),
        Fate::Refused => "no endpoint anywhere is ready, or terminating and serving".to_owned(),
    });
    parts.join("; ")
}

pub(super) const fn ask(ask: Ask) -> &'static str {
    match ask {
        Ask::ProxyHealth => "proxy-health",
        Ask::ServiceHealth => "service-health",
        Ask::TrafficPort => "traffic-port",
        Ask::Nothing => "nothing",
    }
}
