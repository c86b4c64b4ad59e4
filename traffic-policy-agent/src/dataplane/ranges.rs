//! Hands out ranges of `SLOTS` and Service indices. What is freed rests for a second before it is handed out again: a
//! packet may still be reading it.

use std::{
    collections::{BTreeMap, VecDeque},
    time::{Duration, Instant},
};

use traffic_policy_ebpf::abi::Range;

const REST: Duration = Duration::from_secs(1);

/// An allocator of ranges of `0..size`, first fit.
#[derive(Debug)]
pub struct Ranges {
    /// Base → length.
    free: BTreeMap<u32, u32>,
    resting: VecDeque<(Instant, Range)>,
}

impl Ranges {
    /// All of `0..size` is free, except `taken`.
    pub fn new(size: u32, taken: impl IntoIterator<Item = Range>) -> Self {
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
        Self { free, resting: VecDeque::new() }
    }

    /// A range of `len`; `None` if no free range is that long. An empty range needs no place.
    pub fn take(&mut self, len: u32, now: Instant) -> Option<Range> {
        if len == 0 {
            return Some(Range::default());
        }
        while let Some((since, range)) = self.resting.front().copied() {
            if now.duration_since(since) < REST {
                break;
            }
            self.resting.pop_front();
            self.merge(range);
        }
        let (base, length) = self.free.iter().find(|(_, length)| **length >= len).map(|(b, l)| (*b, *l))?;
        self.free.remove(&base);
        if length > len {
            self.free.insert(base + len, length - len);
        }
        Some(Range { base, len })
    }

    /// Gives a range back.
    pub fn release(&mut self, range: Range, now: Instant) {
        if range.len > 0 {
            self.resting.push_back((now, range));
        }
    }

    fn merge(&mut self, mut range: Range) {
        if let Some((base, len)) = self.free.range(..range.base).next_back().map(|(b, l)| (*b, *l))
            && base + len == range.base
        {
            self.free.remove(&base);
            range = Range { base, len: len + range.len };
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
        /// Ranges that are out never overlap, never leave the array, and all come back.
        #[test]
        fn never_overlap(steps in proptest::collection::vec((0u32..9, any::<bool>(), 0u64..900), 1..200)) {
            let mut ranges = Ranges::new(64, [Range { base: 10, len: 3 }]);
            let mut out = vec![Range { base: 10, len: 3 }];
            let mut now = Instant::now();
            for (len, give_back, wait) in steps {
                now += Duration::from_millis(wait);
                if give_back && !out.is_empty() {
                    ranges.release(out.remove(0), now);
                } else if let Some(range) = ranges.take(len, now)
                    && range.len > 0 {
                        out.push(range);
                    }
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
            now += REST;
            prop_assert_eq!(ranges.take(64, now), Some(Range { base: 0, len: 64 }));
        }
    }

    #[test]
    fn freed_rests() {
        let now = Instant::now();
        let mut ranges = Ranges::new(4, []);
        let range = ranges.take(4, now).unwrap();
        ranges.release(range, now);
        assert_eq!(ranges.take(4, now + REST / 2), None);
        assert_eq!(ranges.take(4, now + REST), Some(range));
    }
}
