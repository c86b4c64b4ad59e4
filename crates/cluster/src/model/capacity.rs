//! The capacity of the maps, and the part of it that a Service asks for.

/// Sizes of the maps, in entries; pairs are IPv4, IPv6.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    pub frontends: [u32; 2],
    pub source_ranges: [u32; 2],
    /// The number of endpoints in each family.
    pub endpoints: u32,
    /// The addresses of each family, and the MAC addresses, from which other nodes may forward
    /// packets directly.
    pub direct_nodes: u32,
    pub direct_macs: u32,
}

impl Default for Limits {
    /// Returns the sizes with which the maps are declared.
    fn default() -> Self {
        Self {
            frontends: [65_536; 2],
            source_ranges: [65_536; 2],
            endpoints: 262_144,
            direct_nodes: 16_383,
            direct_macs: 16_384,
        }
    }
}

/// The total demand of all Services may be this many times what the maps take, and so may the
/// endpoints of one Service that keep flows.
pub(super) const TIMES: u64 = 2;

/// A kind of entry that a Service asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Frontends,
    SourceRanges,
    Endpoints,
    /// Endpoints that its slices name, before any is chosen.
    Listed,
    /// Endpoints that may keep flows, whether or not they get new ones.
    Serving,
}

/// The entries that a Service asks for, over all of its ports, by kind and family.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Demand([u64; 6]);

impl Demand {
    /// Sets the number of entries of one kind and family. Frontends include the ClusterIPs; of the
    /// endpoints it is the entries in the map or in memory, whichever are more.
    pub(super) fn set(&mut self, kind: Kind, ipv6: bool, entries: u64) {
        let at = match kind {
            Kind::Frontends => 0,
            Kind::SourceRanges => 2,
            Kind::Endpoints | Kind::Listed | Kind::Serving => 4,
        };
        self.0[at + usize::from(ipv6)] = entries;
    }

    /// Returns the capacity of the maps, multiplied by `times`.
    pub(super) fn room(limits: &Limits, times: u64) -> Self {
        let Limits { frontends, source_ranges, endpoints, .. } = *limits;
        let [f4, f6] = frontends;
        let [r4, r6] = source_ranges;
        Self([f4, f6, r4, r6, endpoints, endpoints].map(|entries| u64::from(entries) * times))
    }

    pub(super) fn fits(&self, room: &Self) -> bool {
        self.0.iter().zip(room.0).all(|(needed, room)| *needed <= room)
    }

    pub(super) fn plus(&self, other: &Self) -> Self {
        self.with(other, u64::saturating_add)
    }

    pub(super) fn minus(&self, other: &Self) -> Self {
        self.with(other, u64::saturating_sub)
    }

    fn with(&self, other: &Self, operation: impl Fn(u64, u64) -> u64) -> Self {
        let mut result = *self;
        for (one, other) in result.0.iter_mut().zip(other.0) {
            *one = operation(*one, other);
        }
        result
    }
}
