//! Judgements as JSON.

use anyhow::Result;
use serde::Serialize;
use traffic_policy_cluster::command::view;

use super::{print, print::View};
use crate::{
    Answer, Balancer, Check, Fact, Fate, Finding, Judgement, Level, Membership, PortJudgement, Row, Weights,
    page::{Page, Part},
};

/// The number of node names in a row, unless all are requested.
const NAMES: usize = 10;

/// The output of `lb --output json`.
#[derive(Serialize)]
pub(super) struct Document<'j> {
    nodes: usize,
    errors: usize,
    warnings: usize,
    services: Vec<Service<'j>>,
}

#[derive(Serialize)]
struct Service<'j> {
    namespace: &'j str,
    name: &'j str,
    r#type: &'static str,
    external_policy: &'static str,
    balancer: BalancerDocument<'j>,
    ports: Vec<Port>,
    findings: &'j [Finding],
}

/// A value with its certainty: `sure: false` is an assumption.
#[derive(Serialize)]
struct Told<T> {
    value: T,
    sure: bool,
}

#[derive(Serialize)]
struct BalancerDocument<'j> {
    name: &'static str,
    why: &'j str,
    check: CheckDocument,
    fail_open: Told<bool>,
    weighted: Told<bool>,
    controller_delay_seconds: Told<f64>,
    ends_connections: Told<bool>,
    cuts_connections: Told<bool>,
    rehashes_connections: Told<bool>,
}

#[derive(Serialize)]
struct CheckDocument {
    asks: Told<&'static str>,
    interval_seconds: Told<f64>,
    timeout_seconds: Told<f64>,
    failures: Told<u32>,
    successes: Told<u32>,
}

#[derive(Serialize)]
struct Port {
    /// The ports as `name/protocol/family`.
    ports: Vec<String>,
    frontends: Vec<String>,
    asked: String,
    nodes: usize,
    healthy: usize,
    rows: Vec<RowDocument>,
    pods: Vec<Pod>,
    /// The largest share of a pod over the mean.
    skew: Option<f64>,
    /// The share of requests that are not answered.
    lost: f64,
    failed_open: bool,
}

#[derive(Serialize)]
struct RowDocument {
    /// The number of nodes to which the same applies.
    nodes: usize,
    /// The names of all of them, or of the first ten.
    names: Vec<String>,
    zone: Option<String>,
    /// The number of ready endpoints on each.
    pods: usize,
    told: &'static str,
    weight: Option<usize>,
    /// `member`, `excluded`, `no-node`.
    membership: &'static str,
    healthy: bool,
    traffic: bool,
    /// `delivered`, `forwarded`, `mixed`, `dropped`, `refused`.
    fate: &'static str,
    /// Whether what is forwarded travels unchanged, so that pods see the client's address.
    direct: bool,
    /// The number of endpoints on the node itself, among those that a request there may get.
    here: usize,
    endpoints: usize,
    /// The share of all requests that these nodes get together.
    share: f64,
}

#[derive(Serialize)]
struct Pod {
    pod: Option<String>,
    /// Its address for each of the ports.
    addresses: Vec<String>,
    node: Option<String>,
    ready: bool,
    share: f64,
}

/// Returns the page of `lb --html`.
pub(super) fn page<'a>(view: &View<'_, 'a>, judgements: &[Judgement<'a>]) -> Result<Page> {
    let title = match judgements {
        [one] => one.service.name.to_string(),
        more => format!("{} Services behind load balancers", more.len()),
    };
    Page::new(title).with(Part::Judged, &Document::new(view, judgements))
}

impl<'j> Document<'j> {
    pub(super) fn new<'a>(view: &View<'_, 'a>, judgements: &'j [Judgement<'a>]) -> Self {
        let count = |level| {
            let findings = judgements.iter().flat_map(|judgement| &judgement.findings);
            findings.filter(|finding| finding.level == level).count()
        };
        Self {
            nodes: view.judge.node_count(),
            errors: count(Level::Error),
            warnings: count(Level::Warning),
            services: judgements
                .iter()
                .map(|judgement| Service {
                    namespace: &judgement.service.name.namespace,
                    name: &judgement.service.name.name,
                    r#type: print::service_type(judgement.service.service_type),
                    external_policy: view::policy(judgement.policy),
                    balancer: BalancerDocument::new(judgement),
                    ports: judgement
                        .ports
                        .iter()
                        .map(|port| Port::new(view, port, judgement.is_direct()))
                        .collect(),
                    findings: &judgement.findings,
                })
                .collect(),
        }
    }
}

fn told<T, U>(fact: Fact<T>, convert: impl Fn(T) -> U) -> Told<U> {
    Told { value: convert(fact.value), sure: fact.sure }
}

impl<'j> BalancerDocument<'j> {
    fn new(judgement: &'j Judgement<'_>) -> Self {
        let balancer: &Balancer = &judgement.balancer;
        Self {
            name: balancer.name,
            why: &judgement.why_balancer,
            check: CheckDocument::new(balancer.check(judgement.policy)),
            fail_open: told(balancer.fail_open, |value| value),
            weighted: told(balancer.weights, |weights| weights != Weights::Never),
            controller_delay_seconds: told(balancer.controller, |time| time.as_secs_f64()),
            ends_connections: told(balancer.proxies, |value| value),
            cuts_connections: told(balancer.cuts, |value| value),
            rehashes_connections: told(balancer.rehashes, |value| value),
        }
    }
}

impl CheckDocument {
    fn new(check: &Check) -> Self {
        Self {
            asks: told(check.ask, print::ask),
            interval_seconds: told(check.interval, |time| time.as_secs_f64()),
            timeout_seconds: told(check.timeout, |time| time.as_secs_f64()),
            failures: told(check.failures, |count| count),
            successes: told(check.successes, |count| count),
        }
    }
}

impl Port {
    fn new<'a>(view: &View<'_, 'a>, port: &PortJudgement<'a>, is_direct: bool) -> Self {
        let family = |ipv6| if ipv6 { "IPv6" } else { "IPv4" };
        Self {
            ports: port
                .keys
                .iter()
                .map(|key| format!("{}/{}/{}", key.port, key.protocol, family(key.ipv6)))
                .collect(),
            frontends: port
                .frontends
                .iter()
                .map(|frontend| format!("{} {}", view::frontend_kind(frontend.kind), frontend.address))
                .collect(),
            asked: print::question(port.question),
            nodes: port.nodes(),
            healthy: port.healthy(),
            rows: port.rows.iter().map(|row| RowDocument::new(view, port, row, is_direct)).collect(),
            pods: port
                .pods
                .iter()
                .map(|pod| Pod {
                    pod: pod.pod.map(str::to_owned),
                    addresses: pod.addresses.iter().map(ToString::to_string).collect(),
                    node: pod.node.map(str::to_owned),
                    ready: pod.ready,
                    share: pod.share,
                })
                .collect(),
            skew: port.skew(),
            lost: port.lost,
            failed_open: port.failed_open,
        }
    }
}

impl RowDocument {
    fn new<'a>(view: &View<'_, 'a>, port: &PortJudgement<'a>, row: &Row<'a>, direct: bool) -> Self {
        let most = if view.all_nodes { row.count } else { NAMES };
        let (fate, here, endpoints) = match row.fate {
            Fate::Served { here, of } if here == of => ("delivered", here, of),
            Fate::Served { here: 0, of } => ("forwarded", 0, of),
            Fate::Served { here, of } => ("mixed", here, of),
            Fate::Dropped => ("dropped", 0, 0),
            Fate::Refused => ("refused", 0, 0),
        };
        Self {
            nodes: row.count,
            names: view.judge.names(port, row, most).into_iter().map(str::to_owned).collect(),
            zone: row.kind.zone.map(str::to_owned),
            pods: row.pods,
            told: print::answer(row.answer),
            weight: match row.answer {
                Answer::Ok(weight) => weight,
                _ => None,
            },
            membership: match row.membership {
                Membership::Member => "member",
                Membership::Excluded => "excluded",
                Membership::NoNode => "no-node",
            },
            healthy: row.membership == Membership::Member && row.answer.is_healthy(),
            traffic: row.takes,
            fate,
            direct,
            here,
            endpoints,
            share: row.share,
        }
    }
}
