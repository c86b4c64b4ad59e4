//! The open connections of a listener, or of several that share them: a small number for each peer
//! on a port, and a limited number in all. One more is always accepted: the oldest that is not
//! being answered is evicted. So a client that opens many idle connections displaces only its own,
//! and a load balancer that probes many ports at once displaces none. An evicted connection may
//! still be answered for a moment, since in a burst more connections are accepted than have a place
//! before the first request is read.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    net::IpAddr,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
};

use tokio::sync::{Semaphore, SemaphorePermit};
use tokio_util::sync::CancellationToken;

/// The unit by which connections are counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
enum Peer {
    Loopback,
    V4(u32),
    /// The /64 of a host.
    V6(u64),
}

impl Peer {
    fn of(address: IpAddr) -> Self {
        match address.to_canonical() {
            address if address.is_loopback() => Self::Loopback,
            IpAddr::V4(address) => Self::V4(address.into()),
            IpAddr::V6(address) => Self::V6((u128::from(address) >> 64) as u64),
        }
    }
}

/// All open connections.
#[derive(Debug)]
pub struct Connections {
    table: Mutex<Table>,
    leaving: Semaphore,
}

impl Default for Connections {
    fn default() -> Self {
        Self { table: Mutex::default(), leaving: Semaphore::new(Self::LEAVING) }
    }
}

#[derive(Debug, Default)]
struct Table {
    next: u64,
    /// Connections by age.
    open: BTreeMap<u64, Open>,
    of: HashMap<Peer, BTreeSet<u64>>,
}

#[derive(Debug)]
struct Open {
    port: u16,
    peer: Peer,
    answering: Arc<AtomicBool>,
    evicted: CancellationToken,
}

/// The place of a connection, until this is dropped or evicted.
#[derive(Debug)]
pub(super) struct Place {
    number: u64,
    all: Arc<Connections>,
    /// Set while a request is being answered.
    pub(super) answering: Arc<AtomicBool>,
    pub(super) evicted: CancellationToken,
}

impl Place {
    /// Returns a permit for an evicted connection to be answered; `None` if the maximum number of
    /// connections is already leaving.
    pub(super) fn leave(&self) -> Option<SemaphorePermit<'_>> {
        self.all.leaving.try_acquire().ok()
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.all.lock().remove(self.number);
    }
}

impl Connections {
    /// Maximum number of connections of one peer on one port.
    pub const PER_PEER: usize = 16;
    /// Maximum number in all; connections over loopback have the same limit of their own.
    pub const ALL: usize = 128;
    /// Maximum number of evicted connections in addition.
    pub const LEAVING: usize = 256;

    /// Returns a place for one more connection of a peer, on one of our ports.
    pub(super) fn enter(self: &Arc<Self>, port: u16, address: IpAddr) -> Place {
        let peer = Peer::of(address);
        let mut table = self.lock();
        if table.on(port, peer).count() >= Self::PER_PEER {
            table.evict_of(peer, Some(port));
        } else if peer == Peer::Loopback && table.loopback() >= Self::ALL {
            table.evict_of(peer, None);
        } else if peer != Peer::Loopback && table.open.len() - table.loopback() >= Self::ALL {
            table.evict_of_greediest();
        }
        let (answering, evicted) = (Arc::new(AtomicBool::new(false)), CancellationToken::new());
        let number = table.next;
        table.next += 1;
        table.of.entry(peer).or_default().insert(number);
        let open = Open { port, peer, answering: Arc::clone(&answering), evicted: evicted.clone() };
        table.open.insert(number, open);
        Place { number, all: Arc::clone(self), answering, evicted }
    }

    #[cfg(test)]
    pub(super) fn count(&self) -> usize {
        self.lock().open.len()
    }

    fn lock(&self) -> MutexGuard<'_, Table> {
        // Each call leaves both tables consistent.
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Table {
    fn loopback(&self) -> usize {
        self.of.get(&Peer::Loopback).map_or(0, BTreeSet::len)
    }

    /// Returns the connections of a peer on a port, the oldest first.
    fn on(&self, port: u16, peer: Peer) -> impl Iterator<Item = u64> {
        let own = self.of.get(&peer).into_iter().flatten().copied();
        own.filter(move |number| self.open.get(number).is_some_and(|open| open.port == port))
    }

    fn remove(&mut self, number: u64) {
        let Some(open) = self.open.remove(&number) else { return };
        if let Some(own) = self.of.get_mut(&open.peer) {
            own.remove(&number);
            if own.is_empty() {
                self.of.remove(&open.peer);
            }
        }
    }

    /// Evicts the oldest connection of a peer, on a port if one is named, that is not being
    /// answered, or else the oldest.
    fn evict_of(&mut self, peer: Peer, port: Option<u16>) {
        let own = || {
            let own = self.of.get(&peer).into_iter().flatten();
            let own = own.filter_map(|number| Some((*number, self.open.get(number)?)));
            own.filter(|(_, open)| port.is_none_or(|port| port == open.port))
        };
        let idle = |(_, open): &(u64, &Open)| !open.answering.load(Ordering::Relaxed);
        let Some((number, _)) = own().find(idle).or_else(|| own().next()) else { return };
        if let Some(open) = self.open.get(&number) {
            open.evicted.cancel();
        }
        self.remove(number);
    }

    /// Evicts a connection of the peer that has most of them over all ports; of several such peers,
    /// of the one whose oldest has existed for longest.
    fn evict_of_greediest(&mut self) {
        let peers = self.of.iter().filter(|(peer, _)| **peer != Peer::Loopback);
        let greediest = peers.max_by_key(|(_, own)| (own.len(), std::cmp::Reverse(own.first().copied())));
        if let Some(peer) = greediest.map(|(peer, _)| *peer) {
            self.evict_of(peer, None);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PER_PEER: usize = Connections::PER_PEER;
    const ALL: usize = Connections::ALL;
    const PORT: u16 = 10256;

    fn address(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    #[test]
    fn the_oldest_idle_one_of_the_same_peer_goes() {
        let all = Arc::new(Connections::default());
        let other = all.enter(PORT, address("192.0.2.2"));
        let own: Vec<_> = (0..PER_PEER).map(|_| all.enter(PORT, address("192.0.2.1"))).collect();
        own[0].answering.store(true, Ordering::Relaxed);
        // An IPv4-mapped address is the same host.
        let more = all.enter(PORT, address("::ffff:192.0.2.1"));
        let evicted: Vec<_> = own.iter().map(|place| place.evicted.is_cancelled()).collect();
        assert_eq!((evicted[0], evicted[1], evicted[2]), (false, true, false));
        assert!(!other.evicted.is_cancelled() && !more.evicted.is_cancelled());
        drop(own);
        drop((other, more));
        let table = all.lock();
        assert_eq!((table.open.len(), table.of.len()), (0, 0));
    }

    #[test]
    fn hosts_of_one_ipv6_network_are_one_peer() {
        let all = Arc::new(Connections::default());
        let places: Vec<_> =
            (0..=PER_PEER).map(|number| all.enter(PORT, address(&format!("2001:db8::{number:x}")))).collect();
        assert!(places[0].evicted.is_cancelled());
    }

    /// A load balancer that checks many Services at once has a connection for each, on a port of
    /// its own.
    #[test]
    fn a_peer_may_probe_many_ports_at_once() {
        let all = Arc::new(Connections::default());
        let balancer = address("192.0.2.1");
        let probes: Vec<_> = (0..50).map(|port| all.enter(32000 + port, balancer)).collect();
        // A flood on one port displaces no connection on the others.
        let flood: Vec<_> = (0..PER_PEER * 2).map(|_| all.enter(32000, address("192.0.2.2"))).collect();
        assert!(!probes.iter().any(|place| place.evicted.is_cancelled()));
        assert_eq!(flood.iter().filter(|place| place.evicted.is_cancelled()).count(), PER_PEER);
        // A peer that floods all ports makes room itself.
        let more: Vec<_> =
            (0..ALL as u16).map(|port| all.enter(33000 + port, address("192.0.2.3"))).collect();
        assert!(!probes.iter().any(|place| place.evicted.is_cancelled()));
        assert!(!more[ALL - 1].evicted.is_cancelled());
        assert_eq!(all.lock().open.len(), ALL);
    }

    #[test]
    fn loopback_has_a_bound_over_all_ports() {
        let all = Arc::new(Connections::default());
        let here: Vec<_> = (0..=ALL as u16).map(|port| all.enter(port, address("127.0.0.1"))).collect();
        let evicted: Vec<_> = here.iter().map(|place| place.evicted.is_cancelled()).collect();
        assert!(evicted[0] && !evicted[1], "{evicted:?}");
    }

    #[test]
    fn who_has_most_makes_room_and_loopback_has_its_own() {
        let all = Arc::new(Connections::default());
        let here = all.enter(PORT, address("127.0.0.1"));
        let greedy: Vec<_> = (0..PER_PEER).map(|_| all.enter(PORT, address("192.0.2.1"))).collect();
        let many: Vec<_> = (0..ALL - PER_PEER)
            .map(|number| all.enter(PORT, IpAddr::from([198, 51, 100, u8::try_from(number).unwrap()])))
            .collect();
        let probe = all.enter(PORT, address("203.0.113.1"));
        assert!(greedy[0].evicted.is_cancelled());
        assert!(!many.iter().any(|place| place.evicted.is_cancelled()));
        let local = all.enter(PORT, address("::1"));
        assert_eq!(greedy.iter().filter(|place| place.evicted.is_cancelled()).count(), 1);
        assert!([&here, &local, &probe].iter().all(|place| !place.evicted.is_cancelled()));
    }
}
