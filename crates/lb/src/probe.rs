//! Probes of nodes, and the conclusions from answers that do not follow from the objects. Pure: the
//! probes are sent elsewhere.

mod cause;
mod compare;
mod findings;
mod heard;
#[cfg(test)]
mod tests;

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, SocketAddr},
    time::Duration,
};

use traffic_policy_cluster::model::{
    FrontendKind, Protocol, ServiceName, ServicePortKey,
    object::{Node, Readiness},
};

pub(super) use self::findings::question_text;
pub use self::{
    cause::Cause,
    compare::Difference,
    findings::{expected_text, heard_text},
    heard::{Heard, Http, Spoken},
};
use super::{
    finding::Finding,
    judge::{Behind, Judge, proxy_answer},
    nodes::{Kind, Who},
    verdict::{Answer, Judgement, Question},
};

/// The port of `/healthz` of kube-proxy and the agent.
pub const PROXY_HEALTH: u16 = 10256;

/// The maximum number of probes in one round.
pub const MOST: usize = 100_000;

/// The address of a Node that is probed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum NodeAddress {
    /// The first InternalIP.
    #[default]
    Internal,
    /// The first ExternalIP.
    External,
}

impl NodeAddress {
    fn of(self, node: &Node) -> &[IpAddr] {
        match self {
            Self::Internal => &node.standing.internal_ips,
            Self::External => &node.standing.external_ips,
        }
    }

    /// Returns the type in `status.addresses`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Internal => "InternalIP",
            Self::External => "ExternalIP",
        }
    }
}

/// The scope of the probes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Scope {
    pub address: NodeAddress,
    /// Whether node ports are probed, too.
    pub traffic: bool,
}

/// A probe of a node, and the answer that follows from the objects.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Asking {
    pub node: String,
    /// The Service; `None`: the probe is about the proxy of the node, for all Services.
    pub service: Option<ServiceName>,
    pub question: Question,
    /// The address; `None`: the Node has no such address.
    pub to: Option<SocketAddr>,
    pub expected: Answer,
    /// Whether the Node's condition Ready is Unknown.
    pub kubelet_silent: bool,
    /// Whether the balancer sends there only if this probe succeeds.
    pub decides: bool,
}

/// All probes of a round.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Questions {
    pub askings: Vec<Asking>,
    /// Ports of UDP and SCTP, to which nothing is sent: an unanswered datagram shows nothing, and
    /// an association would remain.
    pub not_asked: Vec<ServicePortKey>,
}

/// There are more probes than [`MOST`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{0} questions would have to be asked, and {MOST} is the most: name a Service, or leave out --traffic"
)]
pub struct TooMany(pub usize);

/// A probe with its answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Answered {
    pub asking: Asking,
    pub heard: Heard,
    pub took: Duration,
    pub difference: Option<Difference>,
}

/// All probes with their answers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Probed {
    pub answered: Vec<Answered>,
}

/// The answers of a first round that are final.
#[derive(Clone, Debug)]
pub struct Known {
    same: Vec<(Asking, Heard, Duration)>,
    /// Addresses that a router reported as unreachable.
    unreachable: BTreeSet<IpAddr>,
}

/// Returns the addresses for which at least one probe was answered by an ICMP error. Silence of the
/// same address means the same: a router limits its errors ([RFC 1812, section
/// 4.3.2.8](https://www.rfc-editor.org/rfc/rfc1812#section-4.3.2.8)), Linux to a few in a row for
/// each host.
fn unreachable<'a>(heard: impl Iterator<Item = (&'a Asking, &'a Heard)>) -> BTreeSet<IpAddr> {
    let told = heard.filter(|(_, heard)| **heard == Heard::Unreachable);
    told.filter_map(|(asking, _)| asking.to.map(|to| to.ip())).collect()
}

impl<'a> Judge<'a> {
    /// Returns the probes of each Node: about its proxy, and about each of these Services.
    pub fn questions(&self, judgements: &[Judgement<'a>], scope: Scope) -> Result<Questions, TooMany> {
        let nodes: Vec<_> =
            self.cluster.index().nodes().map(|node| (node, self.nodes.kind(&node.name))).collect();
        let plans: Vec<_> = judgements.iter().map(|judgement| Plan::new(self, judgement, scope)).collect();
        let count = nodes.len() * (1 + plans.iter().map(Plan::len).sum::<usize>());
        if count > MOST {
            return Err(TooMany(count));
        }
        let asked = |wanted: &Question| {
            let ports = judgements.iter().flat_map(|judgement| &judgement.ports);
            ports.into_iter().any(|port| port.question == *wanted)
        };
        let proxy_decides = asked(&Question::ProxyHealth);
        let mut questions = Questions::default();
        for (node, kind) in &nodes {
            let to = scope.address.of(node).first().map(|ip| SocketAddr::new(*ip, PROXY_HEALTH));
            questions.askings.push(Asking {
                node: node.name.clone(),
                service: None,
                question: Question::ProxyHealth,
                to,
                expected: proxy_answer(kind),
                kubelet_silent: kind.readiness == Readiness::Unknown,
                decides: proxy_decides,
            });
        }
        for plan in plans {
            plan.ask(self, &nodes, scope, &mut questions);
        }
        Ok(questions)
    }
}

/// The probes for one Service.
struct Plan<'j, 'a> {
    judgement: &'j Judgement<'a>,
    health: Option<u16>,
    /// The node ports of TCP, with their numbers.
    node_ports: Vec<(ServicePortKey, u16)>,
    not_asked: Vec<ServicePortKey>,
}

impl<'j, 'a> Plan<'j, 'a> {
    fn new(judge: &Judge<'a>, judgement: &'j Judgement<'a>, scope: Scope) -> Self {
        let index = judge.cluster.index();
        let reach = index.reach(&judgement.service.name);
        let health = reach.as_ref().and_then(|reach| reach.health.as_ref()).map(|health| health.port);
        let (mut node_ports, mut not_asked) = (Vec::new(), Vec::new());
        for (key, _) in reach.iter().filter(|_| scope.traffic).flat_map(|reach| &reach.ports) {
            let mut frontends = index.desired().ports.get(key).into_iter().flat_map(|port| &port.frontends);
            let Some(frontend) = frontends.find(|frontend| frontend.kind == FrontendKind::NodePort) else {
                continue;
            };
            match key.protocol {
                Protocol::Tcp => node_ports.push((key.clone(), frontend.address.port())),
                Protocol::Udp | Protocol::Sctp => not_asked.push(key.clone()),
            }
        }
        Self { judgement, health, node_ports, not_asked }
    }

    fn len(&self) -> usize {
        usize::from(self.health.is_some()) + self.node_ports.len()
    }

    fn ask(self, judge: &Judge<'a>, nodes: &[(&'a Node, Kind<'a>)], scope: Scope, all: &mut Questions) {
        let index = judge.cluster.index();
        let Some(reach) = index.reach(&self.judgement.service.name) else { return };
        all.not_asked.extend(self.not_asked);
        let health = self.health.iter().filter_map(|port| {
            let (key, _) = reach.ports.iter().find(|(key, _)| index.desired().ports.contains_key(key))?;
            Some((key, Question::ServiceHealth(*port)))
        });
        let traffic = self.node_ports.iter().map(|(key, port)| (key, Question::TrafficPort(*port)));
        for (key, question) in health.chain(traffic) {
            let (Some(port), Some((_, everywhere))) =
                (index.desired().ports.get(key), reach.ports.iter().find(|(other, _)| other == key))
            else {
                continue;
            };
            let Judgement { balancer, treatment, .. } = self.judgement;
            let behind = Behind { port, everywhere, reach: &reach, balancer, treatment: *treatment };
            let decides = self.judgement.ports.iter().any(|port| port.question == question);
            for (node, kind) in nodes {
                let addresses = scope.address.of(node);
                let (number, ip) = match question {
                    Question::TrafficPort(port) => {
                        let of_family = addresses.iter().find(|ip| ip.is_ipv6() == key.ipv6);
                        // The Service has no frontend of this family.
                        if of_family.is_none() && !addresses.is_empty() {
                            continue;
                        }
                        (port, of_family)
                    }
                    Question::ServiceHealth(port) => (port, addresses.first()),
                    Question::ProxyHealth | Question::Nothing => continue,
                };
                let (row, _) = behind.row(Who::Node(&node.name), kind.clone(), 1, question);
                all.askings.push(Asking {
                    node: node.name.clone(),
                    service: Some(key.service.clone()),
                    question,
                    to: ip.map(|ip| SocketAddr::new(*ip, number)),
                    expected: row.answer,
                    kubelet_silent: kind.readiness == Readiness::Unknown,
                    decides,
                });
            }
        }
    }
}

impl Probed {
    /// Compares answers with what follows from the objects.
    #[must_use]
    pub fn new(heard: Vec<(Asking, Heard, Duration)>) -> Self {
        Self::judged(heard, BTreeSet::new())
    }

    /// Returns the probes whose answer differs, to be sent once more, and what is known from the
    /// others.
    #[must_use]
    pub fn ask_again(self) -> (Vec<Asking>, Known) {
        let unreachable = unreachable(self.answered.iter().map(|one| (&one.asking, &one.heard)));
        let (same, again): (Vec<_>, Vec<_>) =
            self.answered.into_iter().partition(|answered| answered.difference.is_none());
        let again = again.into_iter().map(|answered| answered.asking).collect();
        let same =
            same.into_iter().map(|answered| (answered.asking, answered.heard, answered.took)).collect();
        (again, Known { same, unreachable })
    }

    /// Combines the first answers with the second ones. All are compared with the objects together:
    /// the other answers of a node point to the cause.
    #[must_use]
    pub fn twice(known: Known, second: Vec<(Asking, Heard, Duration)>) -> Self {
        let mut all = known.same;
        all.extend(second);
        all.sort_by(|(a, ..), (b, ..)| (&a.service, &a.node, a.to).cmp(&(&b.service, &b.node, b.to)));
        Self::judged(all, known.unreachable)
    }

    fn judged(heard: Vec<(Asking, Heard, Duration)>, mut nowhere: BTreeSet<IpAddr>) -> Self {
        let pairs = || heard.iter().map(|(asking, heard, _)| (asking, heard));
        nowhere.extend(unreachable(pairs()));
        for (asking, _) in pairs().filter(|(_, heard)| heard.is_contact()) {
            if let Some(to) = asking.to {
                nowhere.remove(&to.ip());
            }
        }
        let mut contacts: BTreeMap<String, compare::Contact> = BTreeMap::new();
        for (asking, heard) in pairs() {
            contacts.entry(asking.node.clone()).or_default().add(asking, heard);
        }
        let answered = heard.into_iter().map(|(asking, heard, took)| {
            let is_nowhere = asking.to.is_some_and(|to| nowhere.contains(&to.ip()));
            let heard = if heard == Heard::Silence && is_nowhere { Heard::Unreachable } else { heard };
            let contact = contacts.get(&asking.node).copied().unwrap_or_default();
            let difference = compare::compare(&asking, &heard, contact);
            Answered { asking, heard, took, difference }
        });
        Self { answered: answered.collect() }
    }

    /// Returns the answers about a Service, or about the proxies.
    pub fn about(&self, service: Option<&ServiceName>) -> impl Iterator<Item = &Answered> {
        self.answered.iter().filter(move |answered| answered.asking.service.as_ref() == service)
    }

    #[must_use]
    pub fn differences(&self) -> usize {
        self.answered.iter().filter(|answered| answered.difference.is_some()).count()
    }

    /// Returns the findings about a Service, or about the proxies, the worst first.
    #[must_use]
    pub fn findings(&self, service: Option<&ServiceName>) -> Vec<Finding> {
        findings::findings(self.about(service))
    }

    /// Returns the Services that were probed.
    #[must_use]
    pub fn services(&self) -> BTreeSet<&ServiceName> {
        self.answered.iter().filter_map(|answered| answered.asking.service.as_ref()).collect()
    }
}
