//! Nodes whose Leases are gone: what they send is opened for some time more. A Lease may go for a
//! moment while its node goes on sending: Kubernetes removes it with the Node object that it
//! belongs to, also when that is made anew; and packets are on their way.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::{Duration, Instant},
};

/// The time for which an address counts after no Lease names it any more: that for which a Lease
/// counts without being renewed, in clusters of up to 500 nodes.
const LASTS: Duration = Duration::from_secs(80);

/// The addresses that no Lease names any more, each with the time at which that was noticed.
#[derive(Debug)]
pub(super) struct Gone<A>(BTreeMap<A, Instant>);

impl<A> Default for Gone<A> {
    fn default() -> Self {
        Self(BTreeMap::new())
    }
}

impl<A: Ord + Copy> Gone<A> {
    /// Returns the addresses of `held` that are to be removed: nobody has wanted them for some
    /// time, or they are the oldest ones without which there is no room for all that are wanted.
    pub(super) fn over(
        &mut self,
        held: impl IntoIterator<Item = A>,
        wanted: &BTreeSet<A>,
        room: usize,
        now: Instant,
    ) -> Vec<A> {
        let held: BTreeSet<A> = held.into_iter().collect();
        self.0.retain(|address, _| held.contains(address) && !wanted.contains(address));
        for address in held.difference(wanted) {
            self.0.entry(*address).or_insert(now);
        }
        let mut oldest: Vec<_> = self.0.iter().map(|(address, since)| (*since, *address)).collect();
        oldest.sort_unstable();
        let surplus = (wanted.len() + oldest.len()).saturating_sub(room);
        let count = self.expire(now).len().max(surplus);
        oldest.into_iter().take(count).map(|(_, address)| address).collect()
    }

    /// Returns the addresses that nobody has wanted for long enough, each until it is forgotten.
    pub(super) fn expire(&self, now: Instant) -> Vec<A> {
        let over = self.0.iter().filter(|(_, since)| now.duration_since(**since) >= LASTS);
        over.map(|(address, _)| *address).collect()
    }

    /// Forgets an address that has been removed.
    pub(super) fn forget(&mut self, address: A) {
        self.0.remove(&address);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);
    const NOBODY: [u8; 0] = [];

    fn over(gone: &mut Gone<u8>, held: &[u8], wanted: &[u8], room: usize, now: Instant) -> Vec<u8> {
        gone.over(held.iter().copied(), &wanted.iter().copied().collect(), room, now)
    }

    #[test]
    fn who_is_gone_is_kept_for_some_time() {
        let (mut gone, start) = (Gone::default(), Instant::now());
        assert_eq!(over(&mut gone, &[1, 2], &[1, 2], 8, start), NOBODY);
        assert_eq!(over(&mut gone, &[1, 2], &[1], 8, start), NOBODY);
        assert_eq!(over(&mut gone, &[1, 2], &[1], 8, start + LASTS - SECOND), NOBODY);
        assert_eq!(gone.expire(start + LASTS), [2]);
        assert_eq!(over(&mut gone, &[1, 2], &[1], 8, start + LASTS), [2]);
        gone.forget(2);
        assert_eq!(gone.expire(start + LASTS), NOBODY);
    }

    #[test]
    fn who_comes_back_goes_anew() {
        let (mut gone, start) = (Gone::default(), Instant::now());
        assert_eq!(over(&mut gone, &[1], &[], 8, start), NOBODY);
        assert_eq!(over(&mut gone, &[1], &[1], 8, start + SECOND), NOBODY);
        assert_eq!(over(&mut gone, &[1], &[], 8, start + LASTS), NOBODY);
        assert_eq!(over(&mut gone, &[1], &[], 8, start + LASTS + LASTS), [1]);
    }

    #[test]
    fn others_come_first_in_a_full_map() {
        let (mut gone, start) = (Gone::default(), Instant::now());
        assert_eq!(over(&mut gone, &[1, 2, 3], &[1, 2], 3, start), NOBODY);
        assert_eq!(over(&mut gone, &[1, 2, 3], &[1], 3, start + SECOND), NOBODY);
        assert_eq!(over(&mut gone, &[1, 2, 3], &[1, 4], 3, start + SECOND), [3], "it went first");
        assert_eq!(over(&mut gone, &[1, 2, 3], &[4, 5, 6], 3, start + LASTS).len(), 3);
    }
}
