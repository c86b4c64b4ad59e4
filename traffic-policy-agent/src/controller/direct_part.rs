//! The part that this node takes in direct forwarding: what its Lease tells the other nodes, and
//! when its own flows begin to be direct.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    time::{Duration, Instant},
};

use traffic_policy_cluster::{
    model::{DispatchChoice, Forwarding, Index},
    source::{DirectNews, DirectPart, DirectTold, Opening},
};
use traffic_policy_dataplane::PacketPath;

use super::{Origin, Settings, direct_ways::DirectWays, network::NodeNetwork, service_sync::ServiceSync};
use crate::health::{DirectForwarding, ProxyHealth};

/// The time from when this node's Lease is written until its flows may be direct: the others have
/// to hear of it, and to write its addresses into their maps.
const HEARD: Duration = Duration::from_secs(10);
/// The word in the Lease, behind the settings by which this node finds an endpoint, that makes them
/// those of no other node.
const WITHOUT_TABLES: &str = "not-all-tables";
/// The number of nodes whose Leases this one looks at.
const NEIGHBOURS: usize = 2;

/// The part, and what has been reported of it.
pub(super) struct Part {
    node_name: String,
    forwarding: Forwarding,
    dispatch: DispatchChoice,
    choice: String,
    health: ProxyHealth,
    news: News,
    /// The facts from which the last report was made.
    reported: Option<Basis>,
    /// Whether the maps had no room for the addresses of all nodes, which has been logged.
    is_full: bool,
}

/// The news that this node tells and is told.
struct News {
    opening: Option<Opening>,
    /// The time since which the other nodes have been told the addresses of this one; `None`: they
    /// are not.
    told: Option<Instant>,
    /// Whether flows may be direct: once they may, they may for ever.
    sends: bool,
}

/// Everything that this node reports of its part follows from this. A report grows with the nodes
/// (0.6 ms with 50), and writes come many times a second.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Basis {
    own: DirectPart,
    /// [`Index::direct_revision`].
    nodes: u64,
    told: DirectTold,
    sends: bool,
    lacking: BTreeMap<String, String>,
}

impl News {
    fn new(settings: &Settings) -> Self {
        let opening = settings.opening.clone();
        if opening.is_none()
            && settings.forwarding.is_direct()
            && matches!(settings.origin, Origin::Kubernetes(_))
        {
            tracing::warn!(
                "--forwarding {} has no effect without --announce-opening NAMESPACE: no other node is known to open packets",
                settings.forwarding.name()
            );
        }
        Self { sends: opening.is_none(), opening, told: None }
    }

    /// Notes whether the other nodes know these addresses, by an earlier agent's Lease or by this
    /// one's, for long enough. Returns whether flows may be direct from now on.
    fn may_send(&mut self, own: &DirectPart, earlier: bool, now: Instant) -> bool {
        let Some(opening) = self.opening.as_ref().filter(|_| !self.sends) else { return false };
        let is_told = opening.told.borrow().held.as_ref().is_some_and(|held| {
            held.addresses == own.addresses && (!sends_by_mac(own) || held.macs == own.macs)
        });
        if is_told || earlier {
            let since = *self.told.get_or_insert(now);
            self.sends = earlier || now.duration_since(since) >= HEARD;
        } else {
            self.told = None;
        }
        self.sends
    }
}

impl Part {
    pub(super) fn new(settings: &Settings, health: ProxyHealth) -> Self {
        Self {
            node_name: settings.node_name.clone(),
            forwarding: settings.forwarding,
            dispatch: settings.dispatch,
            choice: settings.choice.clone(),
            health,
            news: News::new(settings),
            reported: None,
            is_full: false,
        }
    }

    /// Lets flows go on being direct, before the first write, if the Lease that an earlier agent
    /// has written names all addresses.
    pub(super) fn resume(
        &mut self,
        path: &impl PacketPath,
        network: &NodeNetwork,
        services: &mut ServiceSync,
    ) {
        if services.synced_once() || !services.has_objects() {
            return;
        }
        let own = self.own(path, network, services);
        let seen = seen(services.index(), &self.node_name);
        let is_known = seen.is_some_and(|seen| {
            own.addresses.iter().all(|ip| seen.addresses.contains(ip))
                && (!sends_by_mac(&own) || own.macs.iter().all(|mac| seen.macs.contains(mac)))
        });
        let sends = self.news.sends || is_known && self.news.may_send(&own, true, Instant::now());
        services.hold_direct(!sends);
    }

    /// Notes for the addresses of which nodes the maps have no room, and logs it once.
    fn note_room(&mut self, without: &BTreeSet<String>) {
        let first = without.first().filter(|_| !self.is_full);
        self.is_full = !without.is_empty();
        if let Some(first) = first {
            let who = match without.len() {
                1 => first.clone(),
                count => format!("{count} nodes ({first}, …)"),
            };
            tracing::warn!(
                "the maps have no room for the addresses of {who} in direct forwarding: packets to there go by SNAT, and so do \
                 all new flows to this node, which opens none from there; the addresses that are known stay"
            );
        }
    }

    /// Tells the other nodes what part this one takes, once the maps have been written.
    pub(super) fn take(
        &mut self,
        path: &impl PacketPath,
        network: &NodeNetwork,
        services: &mut ServiceSync,
        ways: &mut DirectWays,
    ) {
        if !services.synced_once() {
            return;
        }
        self.note_room(services.index().direct_without_room());
        let own = self.own(path, network, services);
        if self.news.may_send(&own, false, Instant::now()) {
            services.hold_direct(false);
        }
        let told = self.news.opening.as_ref().map(|opening| opening.told.borrow().clone());
        ways.follow(told.as_ref().is_some_and(|told| told.held.is_some()), Instant::now().into());
        let basis = Basis {
            own,
            nodes: services.index().direct_revision(),
            told: told.unwrap_or_default(),
            sends: self.news.sends,
            lacking: ways.lacking(),
        };
        if self.reported.as_ref() != Some(&basis) {
            self.report(services.index(), &basis);
            self.reported = Some(basis);
        }
    }

    /// Reports the part that this node takes, to its own health and to the task that writes its
    /// Leases.
    fn report(&self, index: &Index, basis: &Basis) {
        let name = self.node_name.as_str();
        let nodes = index.direct_nodes(self.forwarding);
        let others = || index.direct_leases().filter(|lease| lease.node != name);
        let by_snat = others().map(|lease| &lease.node).filter(|other| !nodes.contains_key(*other));
        let addresses = others().map(|lease| (lease.node.clone(), lease.addresses.iter().copied().collect()));
        let mut report = DirectForwarding {
            by_snat: by_snat.cloned().collect(),
            addresses: addresses.collect(),
            nodes: nodes.keys().cloned().collect(),
            dispatch: nodes.into_iter().map(|(node, used)| (node, used.name().to_owned())).collect(),
            waits: !basis.sends,
            lacking: basis.lacking.clone(),
            ..DirectForwarding::default()
        };
        if let Some(opening) = &self.news.opening {
            let (own, DirectTold { held, trouble }) = (&basis.own, &basis.told);
            report.told = held.is_some();
            report.opens = held.as_ref().is_some_and(DirectPart::opens) && own.opens();
            report.why_not.clone_from(&own.why_not);
            report.trouble.clone_from(trouble);
            let news = DirectNews {
                own: Some(own.clone()),
                seen: seen(index, name).cloned(),
                neighbours: neighbours(index, name),
                nodes: index.direct_leases().count(),
            };
            opening.news.send_if_modified(|held| {
                let differs = *held != news;
                *held = news;
                differs
            });
        }
        let takes_part = self.news.opening.is_some() || !report.nodes.is_empty();
        self.health.set_direct(takes_part.then_some(report));
    }

    /// Returns the part that this node can take now.
    fn own(&self, path: &impl PacketPath, network: &NodeNetwork, services: &ServiceSync) -> DirectPart {
        let local: BTreeSet<_> = network.addresses().iter().map(|address| address.address).collect();
        let primary = services.primary().into_iter().filter(|address| local.contains(address));
        let attached = path.attached().flat_map(|(interface, _)| interface.addresses.iter().copied());
        // Addresses of a link are those of many machines.
        let is_one_machines = |address: &IpAddr| match address {
            IpAddr::V4(address) => !address.is_link_local(),
            IpAddr::V6(address) => !address.is_unicast_link_local(),
        };
        let addresses: BTreeSet<_> = attached.chain(primary).filter(is_one_machines).collect();
        let why_not = if !self.health.is_healthy() {
            let waiting = self.health.report().waiting_for.into_iter().next();
            Some(
                waiting.unwrap_or_else(|| "its maps are not in sync, or no other node answers it".to_owned()),
            )
        } else if path.attached().next().is_none() {
            Some("no device has the programs".to_owned())
        } else if addresses.is_empty() {
            Some("the devices with the programs have no address".to_owned())
        } else if !services.opens_all() {
            Some("its maps have no room for all Services and endpoints".to_owned())
        } else if let Some(lack) = path.opens_not_all() {
            Some(lack)
        } else if !services.index().direct_without_room().is_empty() {
            // They cannot know that their packets are not opened here.
            Some("its maps have no room for the addresses of all nodes that take part".to_owned())
        } else {
            self.health.leaving().map(|leaving| format!("it is about to go: {}", leaving.reason))
        };
        let macs = path.attached().filter(|(interface, _)| interface.ethernet);
        let macs = macs.map(|(interface, _)| interface.mac).collect();
        // Where a table is missing the choice is random: no other node may leave it to this one.
        let choice = if services.lacks_tables() {
            format!("{} {WITHOUT_TABLES}", self.choice)
        } else {
            self.choice.clone()
        };
        let tunnels_sctp = path.tunnels_sctp();
        DirectPart { addresses, macs, choice, dispatch: self.dispatch, why_not, tunnels_sctp }
    }
}

/// Whether the other nodes have to know this one by its MAC addresses.
fn sends_by_mac(own: &DirectPart) -> bool {
    own.dispatch.is_left_to_the_network()
}

fn seen<'a>(index: &'a Index, own: &str) -> Option<&'a traffic_policy_cluster::model::object::DirectNode> {
    index.direct_leases().find(|lease| lease.node == own)
}

/// Returns the nodes after this one in the ring of all names, as far as they open packets.
fn neighbours(index: &Index, own: &str) -> Vec<String> {
    let opening = index.direct_leases().filter(|lease| lease.opens && lease.node != own);
    next(opening.map(|lease| lease.node.as_str()).collect(), own)
}

fn next(names: BTreeSet<&str>, own: &str) -> Vec<String> {
    let (before, after): (Vec<&str>, Vec<&str>) = names.into_iter().partition(|name| *name < own);
    after.into_iter().chain(before).take(NEIGHBOURS).map(str::to_owned).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn everyone_is_looked_after_by_two() {
        let names = ["a", "b", "c", "d"];
        let of = |own: &str| next(names.into_iter().filter(|name| *name != own).collect(), own);
        assert_eq!(of("a"), ["b", "c"]);
        assert_eq!(of("c"), ["d", "a"]);
        assert_eq!(of("d"), ["a", "b"]);
        assert_eq!(next(BTreeSet::from(["z"]), "m"), ["z"], "one alone");
    }

    #[test]
    fn flows_are_direct_once_the_others_have_had_time_to_hear() {
        let opening = Opening::new("n".to_owned());
        let mut news = News { opening: Some(opening.clone()), told: None, sends: false };
        let own = DirectPart { addresses: ["192.0.2.1".parse().unwrap()].into(), ..DirectPart::default() };
        let start = Instant::now();
        assert!(!news.may_send(&own, false, start) && news.told.is_none(), "nobody is told");
        opening.told.send_modify(|told| told.held = Some(own.clone()));
        assert!(!news.may_send(&own, false, start));
        assert!(!news.may_send(&own, false, start + HEARD / 2));
        let other = DirectPart { addresses: ["192.0.2.2".parse().unwrap()].into(), ..DirectPart::default() };
        assert!(!news.may_send(&other, false, start + HEARD), "another address, which nobody knows");
        assert!(!news.may_send(&own, false, start + HEARD));
        assert!(news.may_send(&own, false, start + HEARD * 2) && news.sends);
        assert!(!news.may_send(&own, false, start + HEARD * 3), "it was said before");
        let mut again = News { opening: Some(opening), told: None, sends: false };
        assert!(again.may_send(&other, true, start), "an earlier agent has told them");
    }
}
