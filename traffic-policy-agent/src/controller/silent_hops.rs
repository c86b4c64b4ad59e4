//! Next hops of endpoints, by the kernel's routes. One of endpoints without a `nodeName` stands for
//! the node that they do not name, while one of them is in question. One that the kernel finds no
//! answer of (NUD_FAILED) makes the nodes behind it suspect.

use std::{
    collections::{BTreeMap, BTreeSet},
    io,
    net::IpAddr,
    sync::Arc,
    time::{Duration, Instant},
};

use tokio::task::JoinSet;
use traffic_policy_cluster::model::Index;
use traffic_policy_dataplane::{
    Suspect,
    node::{self, HopAddress},
};

/// The most endpoints whose routes are looked up: each costs some microseconds of a thread.
const ENDPOINTS: usize = 10_000;
/// The time after which routes are looked up again while a hop is in question.
const FRESH: Duration = Duration::from_secs(1);

/// The time for which the hops that lead to endpoints are kept: a scan of a network makes hundreds
/// of neighbours fail, and each look-up costs as much as the first.
const KNOWN: Duration = Duration::from_secs(10);
/// The most nodes that are suspected for one neighbour that failed: with more, it is a router, and
/// their connections show which of them are gone.
const BEHIND: usize = 4;

/// The next hops towards addresses.
pub(super) type Routes = io::Result<BTreeMap<IpAddr, HopAddress>>;
/// The way to look up routes: a test answers itself.
pub(super) type Ways = Arc<dyn Fn(&BTreeSet<IpAddr>) -> Routes + Send + Sync>;

/// A next hop, and the endpoints behind it that name no node.
#[derive(Clone, Debug)]
pub(super) struct Hop {
    pub(super) address: HopAddress,
    /// Empty once none is routed by it any more.
    pub(super) behind: BTreeSet<IpAddr>,
}

/// The next hops, by the names that the judgement knows them by; none unless one is in question.
pub(super) struct SilentHops {
    known: BTreeMap<String, Hop>,
    /// Suspected hops whose endpoints are looked up.
    suspected: BTreeSet<HopAddress>,
    ways: Ways,
    look: JoinSet<Look>,
    looked: Option<Instant>,
    /// Neighbours that failed, until it is known what is behind them.
    failed: BTreeSet<HopAddress>,
    /// The hops that lead to endpoints, and the time at which they were looked up.
    leads: Option<(Instant, Leads)>,
}

/// The nodes behind each hop that leads to endpoints: none for endpoints without a `nodeName`.
type Leads = BTreeMap<HopAddress, BTreeSet<String>>;

/// Routes that were looked up: towards the endpoints without a `nodeName`, and one of each of these
/// nodes.
#[derive(Debug)]
pub(super) struct Look {
    routes: Routes,
    /// `None`: no node was of interest.
    nodes: Option<Vec<(String, IpAddr)>>,
}

impl SilentHops {
    pub(super) fn new() -> Self {
        Self {
            known: BTreeMap::new(),
            suspected: BTreeSet::new(),
            ways: Arc::new(node::ways),
            look: JoinSet::new(),
            looked: None,
            failed: BTreeSet::new(),
            leads: None,
        }
    }

    /// Sets another way to look up routes.
    #[cfg(test)]
    pub(super) fn route_by(&mut self, ways: Ways) {
        self.ways = ways;
    }

    pub(super) fn get(&self, name: &str) -> Option<&Hop> {
        self.known.get(name)
    }

    /// The names of hops with endpoints behind them.
    pub(super) fn names(&self) -> impl Iterator<Item = &str> {
        self.known.iter().filter(|(_, hop)| !hop.behind.is_empty()).map(|(name, _)| name.as_str())
    }

    /// Waits for routes that are looked up. Cancel-safe; `None` if none are.
    pub(super) async fn next(&mut self) -> Option<Look> {
        let look = self.look.join_next().await?;
        Some(look.unwrap_or_else(|error| Look { routes: Err(io::Error::other(error)), nodes: None }))
    }

    /// Takes a suspicion: [`Self::take`] returns it, once it is known what is behind the hop.
    pub(super) fn suspect(&mut self, hop: HopAddress, index: &Index, now: Instant) {
        self.suspected.insert(hop);
        self.look_up(index, now);
    }

    /// Takes neighbours that the kernel has asked in vain: [`Self::take`] returns who is behind
    /// them.
    pub(super) fn fail(&mut self, hops: BTreeSet<HopAddress>, index: &Index, now: Instant) {
        let known = self.leads.as_ref();
        let known = known.filter(|(at, _)| now.saturating_duration_since(*at) < KNOWN);
        let failed = hops.into_iter().filter(|hop| known.is_none_or(|(_, leads)| leads.contains_key(hop)));
        let before = self.failed.len();
        self.failed.extend(failed);
        if self.failed.len() > before {
            self.look_up(index, now);
        }
    }

    /// Follows changes of routes and endpoints while a hop is in question, and forgets all hops
    /// afterwards. Returns whether it did.
    pub(super) fn refresh(
        &mut self,
        in_question: impl Fn(&str) -> bool,
        index: &Index,
        now: Instant,
    ) -> bool {
        if self.look_again(index, now) {
            return false;
        }
        if !self.known.keys().any(|name| in_question(name)) {
            let any = !self.known.is_empty();
            self.known.clear();
            return any;
        } else if self.looked.is_none_or(|looked| now.saturating_duration_since(looked) >= FRESH) {
            self.look_up(index, now);
        }
        false
    }

    /// Looks up what is behind hops that are still to be judged. Returns whether there are any.
    pub(super) fn look_again(&mut self, index: &Index, now: Instant) -> bool {
        let any = !self.suspected.is_empty() || !self.failed.is_empty();
        if any {
            self.look_up(index, now);
        }
        any
    }

    /// One look-up at a time: it takes milliseconds.
    fn look_up(&mut self, index: &Index, now: Instant) {
        if !self.look.is_empty() {
            return;
        }
        self.looked = Some(now);
        let (ways, mut addresses) = (Arc::clone(&self.ways), index.endpoints_without_node(ENDPOINTS));
        let nodes = (!self.failed.is_empty()).then(|| index.endpoint_of_each_node());
        addresses.extend(nodes.iter().flatten().map(|(_, address)| *address));
        self.look.spawn_blocking(move || Look { routes: ways(&addresses), nodes });
    }

    /// Takes over routes, and returns who is suspected.
    pub(super) fn take(&mut self, look: Look, now: Instant) -> BTreeSet<Suspect> {
        let mut suspects: BTreeSet<_> =
            std::mem::take(&mut self.suspected).into_iter().map(Suspect::Hop).collect();
        let mut routes = match look.routes {
            Ok(routes) => routes,
            Err(error) => {
                tracing::warn!("the next hops of endpoints are not known: {error}");
                self.failed.clear();
                return suspects;
            }
        };
        let mut leads = Leads::new();
        let has_nodes = look.nodes.is_some();
        for (node, endpoint) in look.nodes.into_iter().flatten() {
            if let Some(hop) = routes.remove(&endpoint) {
                leads.entry(hop).or_default().insert(node);
            }
        }
        // The name of one in question must still lead to its address.
        self.known.values_mut().for_each(|hop| hop.behind.clear());
        for (endpoint, address) in routes {
            let hop = Hop { address, behind: BTreeSet::new() };
            self.known.entry(address.to_string()).or_insert(hop).behind.insert(endpoint);
            leads.entry(address).or_default();
        }
        // Without the nodes, it says nothing on neighbours that failed meanwhile.
        if !has_nodes {
            return suspects;
        }
        for hop in std::mem::take(&mut self.failed) {
            suspects.extend(leads.get(&hop).into_iter().flatten().take(BEHIND).cloned().map(Suspect::Node));
            if self.known.get(&hop.to_string()).is_some_and(|hop| !hop.behind.is_empty()) {
                suspects.insert(Suspect::Hop(hop));
            }
        }
        self.leads = Some((now, leads));
        suspects
    }
}

#[cfg(test)]
mod tests;
