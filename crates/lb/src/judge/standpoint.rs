//! The first port of a Service on every node, for one version of the objects: the answers to health
//! checks, and the endpoints that the node chooses among.

use std::{collections::BTreeMap, net::SocketAddr, time::Duration};

use traffic_policy_cluster::model::{
    DEFAULT_DRAIN, ListId, Policy, Protocol, ServiceName, object::Readiness,
};

use super::{Behind, Judge, is_external};
use crate::{
    balancer::Balancer,
    nodes::Who,
    verdict::{Answer, Fate, Membership, Question},
};

/// The consequences of one version of the objects.
#[derive(Debug)]
pub(crate) struct Standpoint {
    /// Whether the port is one of TCP.
    pub is_tcp: bool,
    pub policy: Policy,
    /// Whether a connection goes on through another node: [`Balancer::outlives_nodes`]. Flows of
    /// UDP do, since the table alone names their endpoint; associations of SCTP do not.
    pub outlives_nodes: bool,
    /// Whether, under policy Local, a node without an endpoint behaves as under Cluster.
    pub falls_back: bool,
    pub drain: Duration,
    /// The check that the balancer makes once it knows this version.
    pub question: Question,
    /// Whether the balancer uses the number of endpoints in the health port's answer.
    pub weighs: bool,
    pub nodes: BTreeMap<String, OnNode>,
    lists: BTreeMap<ListId, Choice>,
}

/// The endpoints that a node chooses among.
#[derive(Debug, Default)]
pub(crate) struct Choice {
    pub endpoints: Vec<SocketAddr>,
    /// Their weights; `None`: all are the same.
    weights: Option<Vec<u16>>,
}

impl Choice {
    /// Returns the one of these places that a random number stands for.
    pub fn drawn(
        &self,
        number: usize,
        places: &(impl ExactSizeIterator<Item = usize> + Clone),
    ) -> Option<usize> {
        let Some(weights) = &self.weights else {
            return places.clone().nth(number.checked_rem(places.len())?);
        };
        let weight = |place: &usize| usize::from(weights.get(*place).copied().unwrap_or(0));
        let total: usize = places.clone().map(|place| weight(&place)).sum();
        // Those that are left may all have no weight: then each has the same.
        let Some(mut left) = number.checked_rem(total) else {
            return places.clone().nth(number.checked_rem(places.len())?);
        };
        places.clone().find(|place| match left.checked_sub(weight(place)) {
            Some(rest) => {
                left = rest;
                false
            }
            None => true,
        })
    }
}

/// A node that knows this version.
#[derive(Debug)]
pub(crate) struct OnNode {
    /// Whether the balancer sends to it while it is healthy.
    pub member: bool,
    /// Whether its kubelet no longer reports.
    pub silent: bool,
    /// The answer of `/healthz` on port 10256.
    pub proxy: Answer,
    /// The answer of the health port, if there is one.
    pub health: Option<Answer>,
    pub announced: bool,
    /// The outcome of a request there, without regard to a drain.
    pub fate: Fate,
    /// The number of the node's own endpoints that policy Local would use.
    pub local_endpoints: usize,
    list: ListId,
    cluster: ListId,
}

impl Standpoint {
    /// Whether policy Local is in effect on a node with this number of its own endpoints.
    pub fn is_local(&self, local_endpoints: usize) -> bool {
        self.policy == Policy::Local && !(self.falls_back && local_endpoints == 0)
    }

    /// Returns the endpoints that the node chooses among.
    pub fn list(&self, node: &OnNode) -> Option<&Choice> {
        self.lists.get(&node.list)
    }

    /// Returns the endpoints that the node chooses among while it drains.
    pub fn draining(&self, node: &OnNode) -> Option<&Choice> {
        self.lists.get(&node.cluster)
    }
}

impl Judge<'_> {
    /// Returns the standpoint of the first port that is reached from outside; `None` as for
    /// [`Self::service`].
    pub(crate) fn standpoint(&self, name: &ServiceName, balancer: &Balancer) -> Option<Standpoint> {
        let index = self.cluster.index();
        let reach = index.reach(name)?;
        let (protocol, port, everywhere, frontends) = reach.ports.iter().find_map(|(key, everywhere)| {
            let port = index.desired().ports.get(key)?;
            let frontends: Vec<_> =
                port.frontends.iter().filter(|frontend| is_external(frontend.kind)).copied().collect();
            (!frontends.is_empty()).then_some((key.protocol, port, everywhere, frontends))
        })?;
        let treatment = self.cluster.treatment(reach.service);
        let behind = Behind { port, everywhere, reach: &reach, balancer, treatment };
        let question = behind.question(&frontends);
        let mut nodes = BTreeMap::new();
        let mut lists = BTreeMap::new();
        let mut keep = |id: ListId| {
            lists.entry(id).or_insert_with(|| {
                let weights = behind.weights(id);
                let are_equal = weights.windows(2).all(|two| two[0] == two[1]);
                let endpoints = everywhere.list(id).iter().map(|place| place.address).collect();
                Choice { endpoints, weights: (!are_equal).then_some(weights) }
            });
        };
        let special = everywhere.special();
        let names = index.nodes().map(|node| node.name.as_str());
        for name in names.chain(special.iter().copied()) {
            if nodes.contains_key(name) {
                continue;
            }
            let kind = self.nodes.kind(name);
            let ask = |question| behind.row(Who::Node(name), kind.clone(), 1, question);
            let (row, list) = ask(Question::ProxyHealth);
            let cluster = everywhere.cluster(name, kind.zone);
            keep(list);
            keep(cluster);
            let health =
                reach.health.as_ref().map(|health| ask(Question::ServiceHealth(health.port)).0.answer);
            let on_node = OnNode {
                member: row.membership == Membership::Member,
                silent: kind.readiness == Readiness::Unknown,
                proxy: row.answer,
                health,
                announced: ask(Question::Nothing).0.answer.is_healthy(),
                fate: row.fate,
                local_endpoints: everywhere.list(everywhere.local(name)).len(),
                list,
                cluster,
            };
            nodes.insert(name.to_owned(), on_node);
        }
        Some(Standpoint {
            is_tcp: protocol == Protocol::Tcp,
            policy: port.external_policy,
            outlives_nodes: protocol != Protocol::Sctp
                && balancer.outlives_nodes(reach.service, treatment, port.external_policy),
            falls_back: port.external_fallback,
            drain: reach.service.drain.unwrap_or(DEFAULT_DRAIN),
            question,
            weighs: behind.weighs(question),
            nodes,
            lists,
        })
    }
}
