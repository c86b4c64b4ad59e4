//! An allocator of ranges of `tp_endpoints` and of Service indices. Freed ranges are quarantined
//! for a second before they are allocated again: a packet may still be reading them.

use std::{
    collections::{BTreeMap, VecDeque},
    time::{Duration, Instant},
};

use traffic_policy_ebpf::abi::IndexRange;

pub(super) const QUARANTINE: Duration = Duration::from_secs(1);

/// An allocator of ranges of `0..size`, first fit or [round robin](Self::round_robin).
#[derive(Debug)]
pub struct Ranges {
    /// The length of each free range by its base.
    free: BTreeMap<u32, u32>,
    /// The sum of the lengths of `free`.
    unused: u32,
    quarantined: VecDeque<(Instant, IndexRange)>,
    /// The first place to try, for round robin.
    next: Option<u32>,
}

impl Ranges {
    /// Creates an allocator that reuses no place before it has allocated all places after it: an
    /// index may be referenced by flows that outlive its owner. It begins after the last place in
    /// `taken`.
    pub fn round_robin(size: u32, taken: impl IntoIterator<Item = IndexRange>) -> Self {
        let mut last = 0;
        let taken = taken.into_iter().inspect(|range| last = last.max(range.base.saturating_add(range.len)));
        let ranges = Self::new(size, taken);
        Self { next: Some(last), ..ranges }
    }

    /// Creates an allocator of `0..size`, in which all is free except `taken`.
    pub fn new(size: u32, taken: impl IntoIterator<Item = IndexRange>) -> Self {
        let mut taken: Vec<_> = taken.into_iter().filter(|range| range.len > 0).collect();
        taken.sort_by_key(|range| range.base);
        let mut free = BTreeMap::new();
        let mut next = 0;
        for range in taken {
            if range.base > next {
                free.insert(next, range.base - next);
            }
            next = next.max(range.base.saturating_add(range.len));
        }
        if next < size {
            free.insert(next, size - next);
        }
        let unused = free.values().sum();
        Self { free, unused, quarantined: VecDeque::new(), next: None }
    }

    /// Allocates a range of `len`; returns `None` if no free range is that long. An empty range
    /// needs no place.
    pub fn take(&mut self, len: u32, now: Instant) -> Option<IndexRange> {
        if len == 0 {
            return Some(IndexRange::default());
        }
        while self.end_quarantine(QUARANTINE, now) {}
        let base = self.fit(self.next.unwrap_or(0), len).or_else(|| self.fit(0, len))?;
        let (start, length) =
            self.free.range(..=base).next_back().map(|(start, length)| (*start, *length))?;
        self.free.remove(&start);
        self.unused -= len;
        for (from, to) in [(start, base), (base + len, start + length)] {
            if from < to {
                self.free.insert(from, to - from);
            }
        }
        if let Some(next) = &mut self.next {
            *next = base + len;
        }
        Some(IndexRange { base, len })
    }

    /// A variant of [`Self::take`] for places whose early reuse does little harm: where nothing
    /// else is free, it takes those that were quarantined for `least`, beginning with the oldest.
    pub fn take_early(&mut self, len: u32, least: Duration, now: Instant) -> Option<IndexRange> {
        loop {
            let taken = self.take(len, now);
            if taken.is_some() || !self.end_quarantine(least, now) {
                return taken;
            }
        }
    }

    /// Frees the range that was quarantined first, if that was `least` ago.
    fn end_quarantine(&mut self, least: Duration, now: Instant) -> bool {
        let Some((since, range)) = self.quarantined.front().copied() else { return false };
        let is_over = now.duration_since(since) >= least;
        if is_over {
            self.quarantined.pop_front();
            self.merge(range);
        }
        is_over
    }

    /// Begins the quarantine of what was freed at `planned` anew: a frontend named it until now.
    pub fn written(&mut self, planned: Instant, now: Instant) {
        let of_plan = self.quarantined.iter_mut().rev().take_while(|(since, _)| *since >= planned);
        of_plan.for_each(|(since, _)| *since = now);
    }

    /// Returns the first place, starting at `from`, of `len` consecutive free ones.
    fn fit(&self, from: u32, len: u32) -> Option<u32> {
        let around = self.free.range(..from).next_back().into_iter();
        let mut places = around.chain(self.free.range(from..)).map(|(base, length)| (*base, base + length));
        places.find_map(|(base, end)| {
            let base = base.max(from);
            (base + len <= end).then_some(base)
        })
    }

    /// Frees a range.
    pub fn release(&mut self, range: IndexRange, now: Instant) {
        if range.len > 0 {
            self.quarantined.push_back((now, range));
        }
    }

    /// Returns the number of free places, excluding quarantined ones.
    pub fn unused(&self) -> u32 {
        self.unused
    }

    fn merge(&mut self, mut range: IndexRange) {
        self.unused += range.len;
        if let Some((base, len)) = self.free.range(..range.base).next_back().map(|(b, l)| (*b, *l))
            && base + len == range.base
        {
            self.free.remove(&base);
            range = IndexRange { base, len: len + range.len };
        }
        if let Some(len) = self.free.remove(&(range.base + range.len)) {
            range.len += len;
        }
        self.free.insert(range.base, range.len);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// Allocated ranges never overlap, never leave the array, and can all be freed.
        #[test]
        fn never_overlap(
            steps in proptest::collection::vec((0u32..9, any::<bool>(), 0u64..900), 1..200),
            round: bool,
        ) {
            let taken = [IndexRange { base: 10, len: 3 }];
            let mut ranges = if round { Ranges::round_robin(64, taken) } else { Ranges::new(64, taken) };
            let mut out = taken.to_vec();
            let mut now = Instant::now();
            for (len, give_back, wait) in steps {
                now += Duration::from_millis(wait);
                if give_back && !out.is_empty() {
                    ranges.release(out.remove(0), now);
                } else if let Some(range) = ranges.take(len, now)
                    && range.len > 0 {
                        out.push(range);
                    }
                let free: u32 = ranges.free.values().sum();
                prop_assert_eq!(ranges.unused(), free);
                let mut used = [false; 64];
                for range in &out {
                    for slot in range.base..range.base + range.len {
                        prop_assert!(!used[slot as usize]);
                        used[slot as usize] = true;
                    }
                }
            }
            for range in out {
                ranges.release(range, now);
            }
            now += QUARANTINE;
            prop_assert_eq!(ranges.take(64, now), Some(IndexRange { base: 0, len: 64 }));
        }
    }

    #[test]
    fn freed_is_quarantined() {
        let now = Instant::now();
        let mut ranges = Ranges::new(4, []);
        let range = ranges.take(4, now).unwrap();
        ranges.release(range, now);
        assert_eq!(ranges.take(4, now + QUARANTINE / 2), None);
        assert_eq!(ranges.take(4, now + QUARANTINE), Some(range));
    }

    #[test]
    fn round_robin_hands_out_again_last() {
        let mut now = Instant::now();
        let mut ranges = Ranges::round_robin(6, [IndexRange { base: 1, len: 1 }]);
        let mut out = Vec::new();
        for _ in 0..7 {
            let range = ranges.take(1, now).unwrap();
            out.push(range.base);
            ranges.release(range, now);
            now += QUARANTINE;
        }
        assert_eq!(out, [2, 3, 4, 5, 0, 2, 3]);
    }
}
