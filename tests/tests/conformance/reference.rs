//! kube-proxy's decision about a new flow, stated a second time: from its documentation and observed behaviour, without
//! the agent's model.

use std::{collections::BTreeMap, net::SocketAddr};

use super::{
    deviations::{self, Origin, Policy, To},
    explain::{Fate, NODE},
};

/// An endpoint as its slice gives it.
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

/// Policies that a decision depends on beside the endpoints.
#[derive(Clone, Copy, Debug)]
pub struct Policies {
    pub external: Policy,
    pub internal: Policy,
}

/// The zone of the node that is asked.
pub const ZONE: &str = "zone-a";

impl Endpoint {
    fn is_here(&self) -> bool {
        self.node == Some(NODE)
    }

    /// Takes new connections while no ready endpoint is left.
    fn drains(&self) -> bool {
        self.serving && self.terminating
    }
}

/// Ready endpoints that the hints choose, else those that drain.
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

/// Of this node, hints or not.
fn local(endpoints: &[Endpoint]) -> Vec<&Endpoint> {
    let here = || endpoints.iter().filter(|endpoint| endpoint.is_here());
    let ready: Vec<_> = here().filter(|endpoint| endpoint.ready).collect();
    if ready.is_empty() { here().filter(|endpoint| endpoint.drains()).collect() } else { ready }
}

/// Expected result of a flow to an address of a Service port. `allowed`: the load balancer's source ranges admit it.
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
    // What comes from inside never sees the external policy: it is for those whom a load balancer can send elsewhere.
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
        // Else the endpoint would answer itself, past this node.
        let hairpin = endpoint.address.ip() == source;
        let masquerade =
            deviations::masquerade(masquerade || hairpin, origin, to, policies.external, endpoint.is_here());
        (endpoint.address, Some(masquerade))
    });
    Fate::Endpoints(BTreeMap::from_iter(seen))
}
