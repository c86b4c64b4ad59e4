//! `/status`: whether the maps are in sync with the cluster, and the obstacles by name.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, SocketAddr},
    sync::Arc,
    time::{Duration, Instant},
};

use serde::{Deserialize, Serialize};
use traffic_policy_cluster::{
    model::{Protocol, ServiceName, ServicePortKey},
    source::{Leaving, Status},
};

/// Status of the agent.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Report {
    /// Whether the maps hold the whole desired state, as far as is known.
    pub in_sync: bool,
    /// Time at which the maps were last made equal to the desired state (RFC 3339); `None` before
    /// the first time.
    pub last_sync: Option<String>,
    /// Seconds for which the oldest change has been waiting.
    pub waiting_seconds: Option<f64>,
    /// Reasons why the maps are not in sync; empty if they are.
    pub waiting_for: Vec<String>,
    /// Service ports for which the maps have no room, each with the reason: they are missing from
    /// the maps, wholly or in part.
    #[serde(default)]
    pub left_out: Vec<String>,
    /// Whether no other node answers this one: it says 503 to load balancers.
    #[serde(default)]
    pub cut_off: bool,
    /// Dead nodes whose endpoints are left out, by name.
    #[serde(default)]
    pub nodes_left_out: BTreeMap<String, NodeLeftOut>,
    /// The endpoints of dead nodes that are left out, by Service port: the last ones of a port
    /// never are.
    #[serde(default)]
    pub endpoints_left_out: Vec<EndpointLeftOut>,
    /// Whether load balancers may send here, as far as the Node object decides that.
    pub node_eligible: bool,
    /// The news that this node is about to go, and when, if there are any.
    #[serde(default)]
    pub leaving: Option<String>,
    /// Errors that do not keep the maps out of sync, by subject.
    pub errors: BTreeMap<String, String>,
    /// Kinds of objects that wait to be listed anew: the maps may lack changes of them.
    #[serde(default)]
    pub stale: BTreeMap<String, StaleKind>,
    /// The part that this node takes in direct forwarding; `None`: it takes none.
    #[serde(default)]
    pub direct: Option<Arc<DirectForwarding>>,
}

/// The part that a node takes in direct forwarding.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DirectForwarding {
    /// Whether it opens packets, and the other nodes have been told so.
    pub opens: bool,
    /// The reason for which it opens none, if that is known.
    pub why_not: Option<String>,
    /// Whether its Lease has been written.
    pub told: bool,
    /// The reason for which its Leases are not up to date.
    pub trouble: Option<String>,
    /// Whether its own flows are not direct yet, because the others may not know it.
    pub waits: bool,
    /// The other nodes that open packets of this one.
    pub nodes: BTreeSet<String>,
    /// The dispatch of packets to each of them: a value of `--dispatch`.
    #[serde(default)]
    pub dispatch: BTreeMap<String, String>,
    /// The addresses from which the other nodes with a Lease send, by their names.
    #[serde(default)]
    pub addresses: BTreeMap<String, BTreeSet<IpAddr>>,
    /// The other nodes with a Lease to whose endpoints packets go by SNAT.
    #[serde(default)]
    pub by_snat: BTreeSet<String>,
    /// The other nodes to which not everything gets, as they have answered this one, each with what
    /// does (`--dispatch auto`).
    #[serde(default)]
    pub lacking: BTreeMap<String, String>,
}

/// A kind of objects that waits to be listed anew.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct StaleKind {
    /// The least possible age of its known state, in seconds.
    pub seconds: f64,
    /// The reason, and when the next list is due.
    pub why: String,
}

/// A dead node.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct NodeLeftOut {
    /// Seconds since it was suspected.
    pub seconds: f64,
    /// A list, in words, of all that was asked without an answer.
    pub asked: String,
}

/// An endpoint that takes no new flows because its node, or its next hop, is dead.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct EndpointLeftOut {
    pub namespace: String,
    /// The name of the Service.
    pub name: String,
    /// The name of the Service port.
    pub port: String,
    /// `TCP`, `UDP` or `SCTP`.
    pub protocol: String,
    pub address: SocketAddr,
    /// `None`: it names no node.
    pub node: Option<String>,
}

impl EndpointLeftOut {
    /// Returns the Service port; `None` if its protocol is not known.
    #[must_use]
    pub fn key(&self) -> Option<ServicePortKey> {
        let mut protocols = [Protocol::Tcp, Protocol::Udp, Protocol::Sctp].into_iter();
        Some(ServicePortKey {
            service: ServiceName { namespace: self.namespace.clone(), name: self.name.clone() },
            port: self.port.clone(),
            protocol: protocols.find(|protocol| protocol.to_string() == self.protocol)?,
            ipv6: self.address.is_ipv6(),
        })
    }
}

/// Inputs of a report.
pub(super) struct Facts {
    pub updated: Option<String>,
    pub waiting: Option<Duration>,
    pub node_eligible: bool,
    pub failure: Option<String>,
    pub detached: Option<String>,
    pub left_out: Vec<String>,
    pub refused: Option<String>,
    pub cut_off: bool,
    pub silent: Vec<(String, Instant, String)>,
    pub endpoints_left_out: Vec<EndpointLeftOut>,
    pub leaving: Option<Leaving>,
    /// Sources whose news may be missed, with the reasons.
    pub deaf: BTreeMap<String, String>,
    pub direct: Option<Arc<DirectForwarding>>,
    pub source: Option<Status>,
}

impl Report {
    pub(super) fn new(facts: &Facts) -> Self {
        let mut waiting_for = Vec::new();
        let mut errors = BTreeMap::new();
        match &facts.source {
            None => waiting_for.push("the source of Services has not started: devices are being attached to, or the API server does not answer".to_owned()),
            Some(source) if !source.synced => {
                for what in &source.waiting {
                    waiting_for.push(format!("waiting for the first look at {what}"));
                }
                for (subject, trouble) in &source.errors {
                    waiting_for.push(format!("{subject}: {trouble}"));
                }
            }
            Some(source) => errors.clone_from(&source.errors),
        }
        if let Some(failure) = &facts.failure {
            waiting_for.push(format!("writing the maps failed: {failure}"));
        } else if waiting_for.is_empty() && (facts.updated.is_none() || facts.waiting.is_some()) {
            waiting_for.push("a change is being written".to_owned());
        }
        waiting_for.extend(facts.detached.clone());
        waiting_for.extend(facts.refused.as_ref().map(|why| format!("SCTP is not served: {why}")));
        let deaf = facts.deaf.iter();
        errors.extend(deaf.map(|(source, trouble)| (format!("--notice {source}"), trouble.clone())));
        if let Some(trouble) = facts.direct.as_ref().and_then(|direct| direct.trouble.clone()) {
            errors.insert("--announce-opening".to_owned(), trouble);
        }
        let stale = facts.source.iter().flat_map(|source| &source.stale);
        let stale = stale.map(|(what, stale)| {
            let seconds = stale.since.elapsed().as_secs_f64();
            ((*what).to_owned(), StaleKind { seconds, why: stale.to_string() })
        });
        Self {
            in_sync: waiting_for.is_empty() && facts.left_out.is_empty(),
            left_out: facts.left_out.clone(),
            last_sync: facts.updated.clone(),
            waiting_seconds: facts.waiting.map(|waiting| waiting.as_secs_f64()),
            waiting_for,
            cut_off: facts.cut_off,
            nodes_left_out: facts.silent.iter().map(NodeLeftOut::of).collect(),
            endpoints_left_out: facts.endpoints_left_out.clone(),
            node_eligible: facts.node_eligible,
            leaving: facts.leaving.as_ref().map(|leaving| match leaving.gone_by {
                Some(time) => format!("{}, by {time}", leaving.reason),
                None => leaving.reason.clone(),
            }),
            errors,
            stale: stale.collect(),
            direct: facts.direct.clone(),
        }
    }
}

impl NodeLeftOut {
    fn of((node, since, asked): &(String, Instant, String)) -> (String, Self) {
        (node.clone(), Self { seconds: since.elapsed().as_secs_f64(), asked: asked.clone() })
    }
}

#[cfg(test)]
mod tests {
    use traffic_policy_cluster::source::Stale;

    use super::*;

    fn facts() -> Facts {
        Facts {
            updated: Some("2026-11-20T13:00:00Z".to_owned()),
            waiting: None,
            node_eligible: true,
            failure: None,
            detached: None,
            left_out: Vec::new(),
            refused: None,
            cut_off: false,
            silent: Vec::new(),
            endpoints_left_out: Vec::new(),
            leaving: None,
            deaf: BTreeMap::new(),
            direct: None,
            source: Some(Status { synced: true, ..Status::default() }),
        }
    }

    #[test]
    fn names_what_is_missing() {
        let starting = Report::new(&Facts { updated: None, source: None, ..facts() });
        assert!(!starting.in_sync && starting.waiting_for[0].contains("has not started"), "{starting:?}");

        let mut source = Status { waiting: ["Services", "Nodes"].into(), ..Status::default() };
        source.errors.insert("Services".to_owned(), "the API server refuses: forbidden (403)".to_owned());
        let waiting = Report::new(&Facts { updated: None, source: Some(source), ..facts() });
        assert_eq!(
            waiting.waiting_for,
            [
                "waiting for the first look at Nodes",
                "waiting for the first look at Services",
                "Services: the API server refuses: forbidden (403)"
            ]
        );

        let failing = Report::new(&Facts {
            waiting: Some(Duration::from_millis(1500)),
            failure: Some("the map is full".to_owned()),
            ..facts()
        });
        assert_eq!(failing.waiting_for, ["writing the maps failed: the map is full"]);
        assert_eq!(failing.waiting_seconds, Some(1.5));
    }

    #[test]
    fn troubles_of_a_source_that_gave_everything_block_nothing() {
        let mut good = facts();
        assert!(Report::new(&good).in_sync);
        if let Some(source) = &mut good.source {
            source.errors.insert("the API server".to_owned(), "timed out".to_owned());
        }
        let report = Report::new(&good);
        assert!(report.in_sync && report.waiting_for.is_empty());
        assert_eq!(report.errors.len(), 1);
        if let Some(source) = &mut good.source {
            let since = Instant::now().checked_sub(Duration::from_secs(40)).unwrap();
            let due = since + Duration::from_secs(60);
            source.stale.insert("Services", Stale { since, why: "the list failed".to_owned(), due });
        }
        let report = Report::new(&good);
        assert!(report.in_sync && report.stale["Services"].seconds >= 40.0, "{report:?}");
        assert!(report.stale["Services"].why.ends_with("listed anew in 20 s"), "{report:?}");
        let writing = Report::new(&Facts { waiting: Some(Duration::ZERO), ..facts() });
        assert_eq!(writing.waiting_for, ["a change is being written"]);
    }
}
