//! Lists of endpoints in the slots: the place of each, kept or newly allocated.

use std::{
    collections::HashMap,
    time::{Duration, Instant},
};

use traffic_policy_cluster::model::Endpoint;
use traffic_policy_ebpf::abi::{Frontend, IndexRange};

use super::{
    op::Op,
    ranges::{QUARANTINE, Ranges},
};

/// The lists of both families, and the free ranges.
#[derive(Debug)]
pub struct EndpointLists {
    /// The endpoints of each range in use, by family and base.
    pub(super) held: HashMap<(bool, u32), Vec<Endpoint>>,
    /// The ranges of IPv4 and IPv6.
    ranges: [Ranges; 2],
    /// The number of slots that the current plan writes, of each family.
    written: [u32; 2],
}

impl EndpointLists {
    /// Starts from the content of the maps. `size`: the slots of each family.
    pub fn new<'a>(
        held: HashMap<(bool, u32), Vec<Endpoint>>,
        size: u32,
        frontends: impl Iterator<Item = (bool, &'a Frontend)>,
    ) -> Self {
        let mut taken = [Vec::new(), Vec::new()];
        for (ipv6, frontend) in frontends {
            taken[usize::from(ipv6)].extend([frontend.cluster, frontend.local, frontend.former_list]);
        }
        Self { held, ranges: taken.map(|taken| Ranges::new(size, taken)), written: [0; 2] }
    }

    /// Returns the endpoints in a range.
    pub fn get(&self, ipv6: bool, range: IndexRange) -> &[Endpoint] {
        self.held.get(&(ipv6, range.base)).map_or(&[], Vec::as_slice)
    }

    /// Whether a list begins where this range does.
    pub fn holds(&self, ipv6: bool, range: IndexRange) -> bool {
        self.held.contains_key(&(ipv6, range.base))
    }

    /// Returns the range that holds `endpoints`: the old one if it does, otherwise a new one, which
    /// `ops` writes.
    pub fn place(
        &mut self,
        ipv6: bool,
        old: IndexRange,
        endpoints: &[Endpoint],
        now: Instant,
        ops: &mut Vec<Op>,
    ) -> Option<IndexRange> {
        if old.len as usize == endpoints.len()
            && (endpoints.is_empty()
                || self.held.get(&(ipv6, old.base)).is_some_and(|held| held == endpoints))
        {
            return Some(old);
        }
        let range = self.ranges[usize::from(ipv6)].take(u32::try_from(endpoints.len()).ok()?, now)?;
        if range.len > 0 {
            ops.push(Op::Slots { ipv6, base: range.base, endpoints: endpoints.to_vec() });
            self.held.insert((ipv6, range.base), endpoints.to_vec());
            self.written[usize::from(ipv6)] += range.len;
        }
        Some(range)
    }

    /// Begins a plan.
    pub fn begin(&mut self) {
        self.written = [0; 2];
    }

    /// Returns the time for which the next plan should wait. The lists that were written free as
    /// many slots, which are quarantined for a second: at this pace no more of them are in
    /// quarantine than are free.
    pub fn pause(&self) -> Duration {
        let pause = |(written, ranges): (&u32, &Ranges)| match (*written, ranges.unused()) {
            (0, _) => Duration::ZERO,
            (written, unused) if written < unused => QUARANTINE * written / unused,
            _ => QUARANTINE,
        };
        self.written.iter().zip(&self.ranges).map(pause).max().unwrap_or_default()
    }

    /// Frees a range. An empty one has no place: the base that it names belongs to another.
    pub fn free(&mut self, ipv6: bool, range: IndexRange, now: Instant) {
        if range.len > 0 {
            self.held.remove(&(ipv6, range.base));
            self.ranges[usize::from(ipv6)].release(range, now);
        }
    }

    /// Returns the number of slots in use: IPv4, IPv6.
    pub fn used(&self) -> [u64; 2] {
        let mut used = [0; 2];
        for ((ipv6, _), endpoints) in &self.held {
            used[usize::from(*ipv6)] += endpoints.len() as u64;
        }
        used
    }
}
