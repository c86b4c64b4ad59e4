//! The judgement of a Service: which nodes get traffic, and the outcome of requests there.

mod standpoint;

use std::collections::{BTreeMap, BTreeSet};

use traffic_policy_cluster::model::{
    Algorithm, Everywhere, Frontend, HealthReach, ListId, Policy, Reach, ServiceName, ServicePort,
    ServicePortKey, object::Readiness, object::Service,
};

use super::{
    balancer::{Ask, Balancer, Weights},
    cluster::{Agents, Cluster, is_external},
    guess::guess,
    health_port,
    nodes::{Kind, Nodes, Who},
    overrides::Overrides,
    rules,
    verdict::{Answer, Fate, Judgement, Membership, PodShare, PortJudgement, Question, Row, as_f64},
};

pub(super) use standpoint::{OnNode, Standpoint};

/// Judges the Services of a cluster.
#[derive(Debug)]
pub struct Judge<'a> {
    pub(super) cluster: &'a Cluster,
    pub(super) nodes: Nodes<'a>,
    /// The nodes that open packets of direct forwarding; `None`: all are taken to.
    opening: Option<BTreeSet<&'a str>>,
    /// The balancer that the user chose.
    named: Option<&'static Balancer>,
    overrides: Overrides,
}

impl<'a> Judge<'a> {
    #[must_use]
    pub fn new(cluster: &'a Cluster, named: Option<&'static Balancer>, overrides: Overrides) -> Self {
        Self { cluster, nodes: cluster.nodes(), opening: cluster.opening(), named, overrides }
    }

    /// The number of Nodes.
    #[must_use]
    pub fn node_count(&self) -> usize {
        self.nodes.count()
    }

    /// Returns the names of the nodes of a row, at most `most`.
    #[must_use]
    pub fn names(&self, port: &PortJudgement<'a>, row: &Row<'a>, most: usize) -> Vec<&'a str> {
        port.names(&self.nodes, row, most)
    }

    /// Returns the balancer in front of a Service, and the evidence for it.
    #[must_use]
    pub fn balancer(&self, service: &Service) -> (Balancer, String) {
        let (balancer, why) = match self.named {
            Some(balancer) => (balancer, "as was said".to_owned()),
            None => {
                let guess = guess(service, self.nodes.provider());
                (guess.balancer, format!("guessed: {}", guess.why))
            }
        };
        let mut balancer = balancer.clone();
        health_port::told(self.cluster, service, &mut balancer);
        self.overrides.apply(&mut balancer);
        (balancer, why)
    }

    /// Judges a Service. `None` if it does not exist, is not served by this proxy, or is not
    /// reached from outside.
    #[must_use]
    pub fn service(&self, name: &ServiceName) -> Option<Judgement<'a>> {
        let index = self.cluster.index();
        let reach = index.reach(name)?;
        let (balancer, why_balancer) = self.balancer(reach.service);
        let treatment = self.cluster.treatment(reach.service);
        let mut ports: Vec<PortJudgement<'a>> = Vec::new();
        let mut work = 0;
        let mut policy = Policy::Cluster;
        for (key, everywhere) in &reach.ports {
            let Some(port) = index.desired().ports.get(key) else { continue };
            let frontends: Vec<_> =
                port.frontends.iter().filter(|frontend| is_external(frontend.kind)).copied().collect();
            if frontends.is_empty() {
                continue;
            }
            policy = port.external_policy;
            let behind = Behind { port, everywhere, reach: &reach, balancer: &balancer, treatment };
            let judgement = behind.judge(key, frontends, &self.nodes, &mut work);
            match ports.iter_mut().find(|other| other.is_like(&judgement)) {
                Some(same) => {
                    same.keys.extend(judgement.keys);
                    same.frontends.extend(judgement.frontends);
                    for (pod, other) in same.pods.iter_mut().zip(judgement.pods) {
                        pod.addresses.extend(other.addresses);
                    }
                }
                None => ports.push(judgement),
            }
        }
        if ports.is_empty() {
            return None;
        }
        let service = reach.service;
        let by_snat = if treatment.forwarding.is_direct() { self.closed(&ports) } else { Vec::new() };
        let findings = Vec::new();
        let mut judgement =
            Judgement { service, policy, treatment, by_snat, balancer, why_balancer, ports, findings, work };
        judgement.findings = rules::findings(self.cluster, &self.nodes, &judgement, index.warnings_of(name));
        Some(judgement)
    }

    /// Returns the nodes with pods that are known to open no packets.
    fn closed(&self, ports: &[PortJudgement<'a>]) -> Vec<&'a str> {
        let Some(opening) = &self.opening else { return Vec::new() };
        let hosts: BTreeSet<&'a str> =
            ports.iter().flat_map(|port| &port.pods).filter_map(|pod| pod.node).collect();
        hosts.into_iter().filter(|node| !opening.contains(node)).collect()
    }
}

/// One Service port, on every node, behind a balancer.
pub(super) struct Behind<'r, 'a> {
    pub(super) port: &'r ServicePort,
    pub(super) everywhere: &'r Everywhere<'a>,
    pub(super) reach: &'r Reach<'a>,
    pub(super) balancer: &'r Balancer,
    pub(super) treatment: Agents,
}

/// Returns the expected answer of `/healthz` on a node.
pub(super) const fn proxy_answer(kind: &Kind<'_>) -> Answer {
    match (kind.readiness, kind.leaving) {
        // The kubelet is silent: most likely the whole node is.
        (Readiness::Unknown, _) => Answer::Silence,
        (_, true) => Answer::Unavailable,
        (_, false) => Answer::Ok(None),
    }
}

impl<'a> Behind<'_, 'a> {
    fn judge(
        &self,
        key: &ServicePortKey,
        frontends: Vec<Frontend>,
        nodes: &Nodes<'a>,
        work: &mut usize,
    ) -> PortJudgement<'a> {
        let special = self.everywhere.special();
        let question = self.question(&frontends);
        let mut rows = Vec::new();
        let mut lists = Vec::new();
        let own = special.iter().map(|name| (Who::Node(name), nodes.kind(name), 1));
        let others =
            nodes.others(&special).into_iter().map(|(at, kind, count)| (Who::Others(at), kind, count));
        for (who, kind, count) in own.chain(others) {
            let (row, list) = self.row(who, kind, count, question);
            rows.push(row);
            lists.push(list);
        }
        *work += rows.len();
        let failed_open = self.distribute(&mut rows, question);
        let mut shares: BTreeMap<ListId, f64> = BTreeMap::new();
        for (row, list) in rows.iter().zip(lists) {
            *shares.entry(list).or_default() += row.share;
        }
        let unserved = rows.iter().filter(|row| !matches!(row.fate, Fate::Served { .. }));
        // The sum of no floats is -0.0, which would be printed as such.
        let lost = unserved.fold(0.0, |lost, row| lost + row.share);
        let pods = self.pods(&special, &shares, work);
        PortJudgement { keys: vec![key.clone()], frontends, question, rows, pods, failed_open, lost }
    }

    fn question(&self, frontends: &[Frontend]) -> Question {
        let traffic = || {
            let node_port =
                frontends.iter().find(|f| f.kind == traffic_policy_cluster::model::FrontendKind::NodePort);
            Question::TrafficPort(node_port.or(frontends.first()).map_or(0, |f| f.address.port()))
        };
        let health = self.reach.health.as_ref().map(|health: &HealthReach<'_>| health.port);
        match (self.balancer.check(self.port.external_policy).ask.value, health) {
            (Ask::ProxyHealth, _) => Question::ProxyHealth,
            (Ask::ServiceHealth, Some(port)) => Question::ServiceHealth(port),
            (Ask::ServiceHealth, None) | (Ask::TrafficPort, _) => traffic(),
            (Ask::Nothing, _) => Question::Nothing,
        }
    }

    pub(super) fn row(
        &self,
        who: Who<'a>,
        kind: Kind<'a>,
        count: usize,
        question: Question,
    ) -> (Row<'a>, ListId) {
        let name = match who {
            Who::Node(name) => name,
            // No endpoint and no hint names these nodes.
            Who::Others(_) => "",
        };
        let cluster = self.everywhere.cluster(name, kind.zone);
        let list = match self.port.external_policy {
            Policy::Cluster => cluster,
            Policy::Local => match self.everywhere.local(name) {
                ListId::EMPTY if self.port.external_fallback => cluster,
                local => local,
            },
        };
        let fate = match (list, cluster) {
            (ListId::EMPTY, ListId::EMPTY) => Fate::Refused,
            (ListId::EMPTY, _) => Fate::Dropped,
            (list, _) => {
                Fate::Served { here: self.everywhere.count(list, name), of: self.everywhere.list(list).len() }
            }
        };
        let pods = self.everywhere.ready(name);
        let answer = self.answer(name, &kind, question, fate);
        let membership = match (kind.missing, kind.excluded) {
            (true, _) => Membership::NoNode,
            (_, true) => Membership::Excluded,
            _ => Membership::Member,
        };
        (Row { who, count, kind, pods, membership, answer, fate, takes: false, share: 0.0 }, list)
    }

    fn answer(&self, name: &str, kind: &Kind<'_>, question: Question, fate: Fate) -> Answer {
        if kind.readiness == Readiness::Unknown {
            return Answer::Silence;
        }
        match question {
            Question::ProxyHealth => proxy_answer(kind),
            Question::ServiceHealth(_) => {
                let health = self.reach.health.as_ref();
                match health.map_or(0, |health| health.local_endpoints(name)) {
                    0 => Answer::Unavailable,
                    endpoints => Answer::Ok(Some(endpoints)),
                }
            }
            Question::TrafficPort(_) => match fate {
                Fate::Served { .. } => Answer::Open,
                Fate::Dropped => Answer::Silence,
                Fate::Refused => Answer::Refused,
            },
            Question::Nothing => {
                let announced = match self.port.external_policy {
                    Policy::Cluster => !matches!(fate, Fate::Refused),
                    // Ready or serving endpoints: terminating ones count, as for the node itself.
                    Policy::Local => self.everywhere.local(name) != ListId::EMPTY,
                };
                if announced { Answer::Announced } else { Answer::NotAnnounced }
            }
        }
    }

    fn weighs(&self, question: Question) -> bool {
        let annotated = |name: &str, value: &str| {
            let signs = self.reach.service.signs.as_deref();
            signs.is_some_and(|signs| signs.annotations.iter().any(|(n, v)| n == name && v == value))
        };
        matches!(question, Question::ServiceHealth(_))
            && match self.balancer.weights.value {
                Weights::Never => false,
                Weights::Always => true,
                Weights::Annotated(name, value) => annotated(name, value),
            }
    }

    /// Determines which rows get traffic, and how much. Returns whether that is because none is
    /// healthy.
    fn distribute(&self, rows: &mut [Row<'a>], question: Question) -> bool {
        let any_healthy = rows.iter().any(Row::is_healthy);
        let failed_open = !any_healthy && self.balancer.fail_open.value;
        for row in rows.iter_mut() {
            row.takes = row.is_healthy() || failed_open && row.membership == Membership::Member;
        }
        let weighs = self.weighs(question) && !failed_open;
        let weight = |row: &Row<'_>| match row.answer {
            Answer::Ok(Some(endpoints)) if weighs => as_f64(endpoints * row.count),
            _ => as_f64(row.count),
        };
        let total: f64 = rows.iter().filter(|row| row.takes).map(weight).sum();
        for row in rows.iter_mut().filter(|row| row.takes) {
            row.share = weight(row) / total;
        }
        failed_open
    }

    /// Returns the weights of a list's endpoints, which tables heed.
    pub(super) fn weights(&self, list: ListId) -> Vec<u16> {
        let places = self.everywhere.list(list);
        match self.treatment.algorithm {
            Algorithm::Random => vec![1; places.len()],
            Algorithm::Maglev => {
                let nodes = places.iter().map(|place| place.endpoint.node_name.as_deref());
                self.reach.service.weights.of(&nodes.collect::<Vec<_>>())
            }
        }
    }

    /// Returns all endpoints that a node would use, with the share of each.
    fn pods(
        &self,
        special: &BTreeSet<&'a str>,
        shares: &BTreeMap<ListId, f64>,
        work: &mut usize,
    ) -> Vec<PodShare<'a>> {
        // This includes endpoints that no request reaches.
        let local = special.iter().map(|name| self.everywhere.local(name));
        let lists: BTreeSet<ListId> =
            local.chain([self.everywhere.cluster("", None)]).chain(shares.keys().copied()).collect();
        let mut pods: BTreeMap<_, PodShare<'a>> = BTreeMap::new();
        for list in lists {
            let places = self.everywhere.list(list);
            *work += places.len();
            let weights = self.weights(list);
            let total: usize = weights.iter().map(|weight| usize::from(*weight)).sum();
            let share = shares.get(&list).copied().unwrap_or(0.0);
            for (place, weight) in places.iter().zip(weights) {
                let pod = pods.entry(place.address).or_insert_with(|| PodShare {
                    addresses: vec![place.address],
                    pod: place.endpoint.pod.as_deref(),
                    node: place.endpoint.node_name.as_deref(),
                    ready: place.endpoint.ready,
                    share: 0.0,
                });
                pod.share += share * as_f64(usize::from(weight)) / as_f64(total.max(1));
            }
        }
        pods.into_values().collect()
    }
}
