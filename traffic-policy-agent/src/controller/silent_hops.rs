//! Next hops of endpoints without a `nodeName`: each stands for the node that they do not name,
//! while one of them is in question. Which endpoints are behind it, the kernel's routes say.

use std::{
    collections::{BTreeMap, BTreeSet},
    io,
    net::IpAddr,
    sync::Arc,
    time::{Duration, Instant},
};

use tokio::task::JoinSet;
use traffic_policy_cluster::model::Index;
use traffic_policy_dataplane::node::{self, HopAddress};

/// The most endpoints whose routes are looked up: each costs some microseconds of a thread.
const ENDPOINTS: usize = 10_000;
/// The time after which routes are looked up again while a hop is in question.
const FRESH: Duration = Duration::from_secs(1);

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
    look: JoinSet<Routes>,
    looked: Option<Instant>,
}

impl SilentHops {
    pub(super) fn new() -> Self {
        Self {
            known: BTreeMap::new(),
            suspected: BTreeSet::new(),
            ways: Arc::new(node::ways),
            look: JoinSet::new(),
            looked: None,
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
    pub(super) async fn next(&mut self) -> Option<Routes> {
        let routes = self.look.join_next().await?;
        Some(routes.unwrap_or_else(|error| Err(io::Error::other(error))))
    }

    /// Takes a suspicion: [`Self::take`] returns it, once it is known what is behind the hop.
    pub(super) fn suspect(&mut self, hop: HopAddress, index: &Index, now: Instant) {
        self.suspected.insert(hop);
        self.look_up(index, now);
    }

    /// Follows changes of routes and endpoints while a hop is in question, and forgets all hops
    /// afterwards.
    pub(super) fn refresh(&mut self, in_question: impl Fn(&str) -> bool, index: &Index, now: Instant) {
        if !self.suspected.is_empty() {
            self.look_up(index, now);
        } else if !self.known.keys().any(|name| in_question(name)) {
            self.known.clear();
        } else if self.looked.is_none_or(|looked| now.saturating_duration_since(looked) >= FRESH) {
            self.look_up(index, now);
        }
    }

    /// One look-up at a time: it takes milliseconds.
    fn look_up(&mut self, index: &Index, now: Instant) {
        if !self.look.is_empty() {
            return;
        }
        self.looked = Some(now);
        let (ways, addresses) = (Arc::clone(&self.ways), index.endpoints_without_node(ENDPOINTS));
        self.look.spawn_blocking(move || ways(&addresses));
    }

    /// Takes over routes, and returns the hops that have been suspected.
    pub(super) fn take(&mut self, routes: Routes) -> BTreeSet<HopAddress> {
        let suspected = std::mem::take(&mut self.suspected);
        match routes {
            Ok(routes) => {
                // The name of one in question must still lead to its address.
                self.known.values_mut().for_each(|hop| hop.behind.clear());
                for (endpoint, address) in routes {
                    let hop = Hop { address, behind: BTreeSet::new() };
                    self.known.entry(address.to_string()).or_insert(hop).behind.insert(endpoint);
                }
            }
            Err(error) => tracing::warn!("the next hops of endpoints without a node are not known: {error}"),
        }
        suspected
    }
}
