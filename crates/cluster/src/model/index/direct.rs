//! Nodes of an [`Index`] that take part in direct forwarding.

mod room;

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    net::{IpAddr, SocketAddr},
    sync::Arc,
};

use super::{Changes, Index, Indexed};
use crate::model::{
    Algorithm, Dispatch, DispatchChoice, Forwarding, Frontend, FrontendKind, Limits, NodeInput, Protocol,
    ServiceName, Way, Ways,
    direct_nodes::{DirectNodes, DirectTarget, DirectTargets, Opener},
    object::DirectNode,
};

/// Everything from which it follows which nodes take part, and how: with thousands of nodes they
/// are judged when one of these changes, not with each endpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Inputs {
    /// [`Index::direct_revision`] of the Leases.
    revision: u64,
    node_name: String,
    ways: Arc<Ways>,
    dispatch: DispatchChoice,
    choice: String,
    hold_direct: bool,
    limits: Limits,
}

impl Inputs {
    fn of(input: &NodeInput, revision: u64) -> Self {
        Self {
            revision,
            node_name: input.node_name.clone(),
            ways: Arc::clone(&input.ways),
            dispatch: input.dispatch,
            choice: input.choice.clone(),
            hold_direct: input.hold_direct,
            limits: input.limits,
        }
    }
}

impl Index {
    /// A number that is another one after each change of what [`Self::direct_leases`] and
    /// [`Self::direct_nodes`] return.
    #[must_use]
    pub fn direct_revision(&self) -> u64 {
        self.direct_revision
    }

    /// The other nodes that open packets of either family, as far as this one may send them some,
    /// and what these travel in. `forwarding`: that of most Services; by `snat`, what any Service's
    /// packets travel in.
    #[must_use]
    pub fn direct_nodes(&self, forwarding: Forwarding) -> BTreeMap<String, Dispatch> {
        let all = self.context.direct.names.iter().flatten().filter(|(_, opener)| !opener.held);
        let used = all.filter_map(|(node, opener)| {
            let dispatch = match forwarding {
                Forwarding::Direct => opener.direct,
                Forwarding::Tunnel => opener.tunnel,
                Forwarding::Snat => opener.direct.or(opener.tunnel),
            };
            Some((node.clone(), dispatch?))
        });
        used.collect()
    }

    /// Finds, for each other node that opens packets and for each family, an endpoint there and a
    /// frontend of its Service that is on no node's own address, of TCP: by a packet to that, the
    /// node can be asked what gets there. Only Services that are forwarded directly count, and
    /// addresses from outside the cluster come first: a network may let a node send from those
    /// alone. For what is sent to MAC addresses, those with Maglev tables count alone.
    #[must_use]
    pub fn direct_targets(&self) -> DirectTargets {
        let mut is_used = [false; 2];
        // By number, not by name: a cluster has far more endpoints than nodes, and this is asked
        // for again while they change.
        let mut nodes = [false, true].map(|ipv6| {
            let opening = self.direct.values().filter(|other| other.opens && other.has_family(ipv6));
            let numbers = opening.map(|other| self.context.numbers.get(&other.node));
            let unknown = numbers.filter(|number| *number != 0);
            unknown.map(|number| (number, Candidate::default())).collect::<HashMap<_, _>>()
        });
        for (key, port) in self.desired.ports.iter().filter(|(_, port)| port.forwarding.is_direct()) {
            let family = usize::from(key.ipv6);
            let is_tcp = key.protocol == Protocol::Tcp;
            let foreign = port.frontends.iter().filter(|frontend| is_tcp && !frontend.kind.is_node_port());
            let found = |frontend: &Frontend| (frontend.kind == FrontendKind::ClusterIp, frontend.address);
            let frontend = foreign.clone().map(found).min();
            let alike = foreign.filter(|frontend| {
                port.algorithm == Algorithm::Maglev && port.is_alike_everywhere(frontend.kind)
            });
            let by_table = alike.map(found).min();
            for endpoint in port.cluster.iter().filter(|endpoint| endpoint.remote) {
                let Some(held) = nodes[family].get_mut(&endpoint.node) else { continue };
                let better = frontend.filter(|frontend| is_better(*frontend, held.frontend));
                let better_table = by_table.filter(|by_table| is_better(*by_table, held.by_table));
                let address = endpoint.address.ip();
                if is_used[family] && better.is_none() && better_table.is_none()
                    || self.context.direct.addresses.contains(&address)
                {
                    continue;
                }
                is_used[family] = true;
                if better.is_some() {
                    (held.endpoint, held.frontend) = (Some(address), better);
                }
                held.by_table = better_table.or(held.by_table);
            }
        }
        let mut of = BTreeMap::new();
        for (targets, ipv6) in nodes.into_iter().zip([false, true]) {
            of.extend(targets.into_iter().filter_map(|(number, target)| {
                Some(((self.context.numbers.name(number)?.to_owned(), ipv6), target.packet()?))
            }));
        }
        DirectTargets { of, is_used }
    }

    /// The other nodes with a Lease for whose addresses the maps have no room: their packets are
    /// not opened here, and they get those of this node by SNAT.
    #[must_use]
    pub fn direct_without_room(&self) -> &BTreeSet<String> {
        &self.context.direct.without_room
    }

    /// All nodes with a Lease of direct forwarding, this one among them.
    pub fn direct_leases(&self) -> impl Iterator<Item = &DirectNode> {
        self.direct.values()
    }

    /// Takes over the nodes that take part in direct forwarding, without this one.
    pub(super) fn note_direct_nodes(&mut self, input: &NodeInput, changes: &mut Changes) {
        if self.direct_judged.as_ref() == Some(&Inputs::of(input, self.direct_revision)) {
            return;
        }
        self.judge_direct_nodes(input, changes);
        self.direct_judged = Some(Inputs::of(input, self.direct_revision));
    }

    fn judge_direct_nodes(&mut self, input: &NodeInput, changes: &mut Changes) {
        #[cfg(test)]
        {
            self.direct_judgements += 1;
        }
        let all = || self.direct.values().filter(|other| other.node != input.node_name);
        let without_room = room::without_room(all, &self.context.direct, &input.limits);
        let others = || all().filter(|other| !without_room.contains(&other.node));
        let names = [false, true].map(|ipv6| {
            let of_this = others().filter(|other| other.has_family(ipv6));
            let not_asked = input.ways.to_others(ipv6);
            of_this
                .filter_map(|other| {
                    let known = input.ways.known(&other.node, ipv6);
                    let awaited = known.is_none() && input.ways.are_awaited(ipv6);
                    // A router sends this node connections of others as soon as it is there. What
                    // is lost until the endpoint's node knows this one is sent again; an RST would
                    // end the connection. A flow keeps its way, and UDP passes nearly everywhere.
                    let way = known.unwrap_or(if awaited { Way::WITHIN_UDP } else { not_asked });
                    let alike = other.choice.as_ref() == Some(&input.choice);
                    let within = |passing, by_mac| {
                        let dispatch = input.dispatch.towards(&other.dispatches, passing, by_mac)?;
                        Some(if alike { dispatch } else { dispatch.within() })
                    };
                    let tunnel = within(way.tunnel, false).filter(|_| other.tunnels);
                    // One that says itself that it opens nothing, because it is about to go or
                    // late, still opens what comes.
                    let held = input.hold_direct || awaited || !other.opens;
                    let direct = within(way.direct, way.by_mac);
                    let (sctp, tunnels_sctp) = (other.sctp, other.tunnels_sctp);
                    let opener = Opener { direct, tunnel, sctp, tunnels_sctp, held };
                    let is_used = opener.direct.is_some() || opener.tunnel.is_some();
                    is_used.then(|| (other.node.clone(), opener))
                })
                .collect()
        });
        let mut macs = BTreeMap::new();
        for other in others() {
            let takes = other.opens && other.dispatches.contains(&Dispatch::L2 { else_udp: false });
            for mac in &other.macs {
                // Two machines with one address are told apart by nobody.
                macs.entry(*mac).and_modify(|all| *all &= takes).or_insert(takes);
            }
        }
        let direct = DirectNodes {
            names,
            macs,
            addresses: others().flat_map(|other| other.addresses.iter().copied()).collect(),
            without_room: without_room.clone(),
        };
        if *self.context.direct == direct {
            return;
        }
        self.direct_revision += 1;
        let former = std::mem::replace(&mut self.context.direct, Arc::new(direct.clone()));
        if former.addresses != direct.addresses || former.macs != direct.macs {
            self.desired.direct_nodes.clone_from(&direct.addresses);
            self.desired.direct_macs.clone_from(&direct.macs);
            changes.direct_nodes = true;
        }
        // Endpoints may be at addresses that have become those of nodes, where nothing is opened.
        let gained: BTreeSet<String> = others()
            .filter(|other| other.addresses.iter().any(|address| !former.addresses.contains(address)))
            .map(|other| other.node.clone())
            .collect();
        if former.addresses.is_empty() || direct.addresses.is_empty() {
            // Endpoints on this node are opened for from now on, or no longer.
            self.dirty.extend(self.services.keys().cloned());
        } else {
            for (former, names) in former.names.iter().zip(&direct.names) {
                self.concern_nodes(&differing(former, names));
            }
            self.concern_nodes(&gained.iter().map(String::as_str).collect());
        }
    }
}

/// A frontend, and whether its address is from inside the cluster.
type Found = (bool, SocketAddr);

/// The packet by which a node can be asked, as far as it is known.
#[derive(Clone, Copy, Default)]
struct Candidate {
    endpoint: Option<IpAddr>,
    /// See [`DirectTarget`].
    frontend: Option<Found>,
    by_table: Option<Found>,
}

impl Candidate {
    fn packet(self) -> Option<DirectTarget> {
        let by_table = self.by_table.map(|(_, frontend)| frontend);
        Some(DirectTarget { endpoint: self.endpoint?, frontend: self.frontend?.1, by_table })
    }
}

/// Whether a frontend is from outside, and the one that is held is not, or there is none.
fn is_better((is_inside, _): Found, held: Option<Found>) -> bool {
    held.is_none_or(|(was_inside, _)| was_inside && !is_inside)
}

/// Returns the nodes that one of two maps lacks, or has with another way.
fn differing<'a>(
    former: &'a BTreeMap<String, Opener>,
    names: &'a BTreeMap<String, Opener>,
) -> BTreeSet<&'a str> {
    let in_either = former.keys().chain(names.keys());
    in_either.filter(|node| former.get(*node) != names.get(*node)).map(String::as_str).collect()
}

impl Indexed for DirectNode {
    fn apply(self, index: &mut Index) -> bool {
        if self.is_held(index) {
            return false;
        }
        index.direct.insert(self.name.clone(), self);
        index.direct_revision += 1;
        true
    }

    fn delete(name: &ServiceName, index: &mut Index) -> bool {
        let found = index.direct.remove(name).is_some();
        index.direct_revision += u64::from(found);
        found
    }

    fn name(&self) -> ServiceName {
        self.name.clone()
    }

    fn names(index: &Index) -> Vec<ServiceName> {
        index.direct.keys().cloned().collect()
    }

    fn is_held(&self, index: &Index) -> bool {
        index.direct.get(&self.name) == Some(self)
    }
}

#[cfg(test)]
mod tests;
