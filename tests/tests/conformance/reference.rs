//! kube-proxy's decision on a new flow, stated a second time: from its documentation and observed
//! behaviour, without the agent's model.

use std::{collections::BTreeMap, net::SocketAddr};

use super::{
    deviations::{self, Origin, Policy, To},
    explain::{Fate, NODE},
};

/// An endpoint with the fields of its slice.
#[derive(Clone, Copy, Debug)]
pub struct Endpoint {
    pub address: SocketAddr,
    pub node: Option<&'static str>,
    pub ready: bool,
    pub serving: bool,
    pub terminating: bool,
    pub for_zone: Option<&'static str>,
    pub for_node: Option<&'static str>,
}

/// The policies on which a decision depends, in addition to the endpoints.
#[derive(Clone, Copy, Debug)]
pub struct Policies {
    pub external: Policy,
    pub internal: Policy,
}

/// The zone of the node in question.
pub const ZONE: &str = "zone-a";

impl Endpoint {
    fn is_here(&self) -> bool {
        self.node == Some(NODE)
    }

    /// Whether the endpoint takes new connections while no ready endpoint is left.
    fn drains(&self) -> bool {
        self.serving && self.terminating
    }
}

/// The ready endpoints that the hints choose, otherwise those that drain.
fn cluster(endpoints: &[Endpoint]) -> Vec<&Endpoint> {
    let ready: Vec<_> = endpoints.iter().filter(|endpoint| endpoint.ready).collect();
    if ready.is_empty() {
        return endpoints.iter().filter(|endpoint| endpoint.drains()).collect();
    }
    for (hint, here) in [
        ((|endpoint| endpoint.for_node) as fn(&Endpoint) -> Option<&'static str>, NODE),
        (|endpoint| endpoint.for_zone, ZONE),
    ] {
        let all_have_one = ready.iter().all(|endpoint| hint(endpoint).is_some());
        let chosen: Vec<_> = ready.iter().copied().filter(|endpoint| hint(endpoint) == Some(here)).collect();
        if all_have_one && !chosen.is_empty() {
            return chosen;
        }
    }
    ready
}

/// The endpoints of this node, whatever their hints.
fn local(endpoints: &[Endpoint]) -> Vec<&Endpoint> {
    let here = || endpoints.iter().filter(|endpoint| endpoint.is_here());
    let ready: Vec<_> = here().filter(|endpoint| endpoint.ready).collect();
    if ready.is_empty() { here().filter(|endpoint| endpoint.drains()).collect() } else { ready }
}

/// The expected result of a flow to an address of a Service port. `allowed` states whether the load
/// balancer's source ranges admit it.
pub fn decide(
    policies: Policies,
    endpoints: &[Endpoint],
    source: std::net::IpAddr,
    origin: Origin,
    to: To,
    allowed: bool,
) -> Fate {
    if to == To::LoadBalancer && !allowed {
        return Fate::Drop;
    }
    if !endpoints.iter().any(|endpoint| endpoint.ready || endpoint.drains()) {
        return Fate::Reject;
    }
    let policy = if to == To::ClusterIp { policies.internal } else { policies.external };
    // The external policy never applies to traffic from inside: it is for clients that a load
    // balancer can send elsewhere.
    let only_local = policy == Policy::Local && (to == To::ClusterIp || origin == Origin::External);
    let chosen = if only_local { local(endpoints) } else { cluster(endpoints) };
    if chosen.is_empty() {
        return Fate::Drop;
    }
    let masquerade = match (to, policy, origin) {
        (To::ClusterIp, _, origin) => origin != Origin::Pod,
        (_, Policy::Cluster, _) | (_, Policy::Local, Origin::Node) => true,
        (_, Policy::Local, Origin::Pod | Origin::External) => false,
    };
    let seen = chosen.iter().map(|endpoint| {
        // Otherwise the endpoint would answer itself, past this node.
        let hairpin = endpoint.address.ip() == source;
        let masquerade =
            deviations::masquerade(masquerade || hairpin, origin, to, policies.external, endpoint.is_here());
        (endpoint.address, Some(masquerade))
    });
    Fate::Endpoints(BTreeMap::from_iter(seen))
}
