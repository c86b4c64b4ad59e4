//! Room in the maps of frontends and source ranges: the entries in use, and the Services that may
//! have the rest. A write to a full map would fail the whole sync; therefore entries are counted
//! here, and a Service port that does not fit is left out.

use std::{collections::BTreeSet, fmt, net::SocketAddr};

use traffic_policy_cluster::model::{Endpoint, ServicePortKey};

use super::op::Held;

/// The capacity in entries; pairs are IPv4, IPv6.
#[derive(Clone, Copy, Debug)]
pub struct Capacity {
    /// The frontends, and the ClusterIPs in addition to them.
    pub frontends: [u32; 2],
    pub source_ranges: [u32; 2],
    /// The slots of each family.
    pub slots: u32,
    pub services: u32,
    /// Elements of Maglev tables, of both families together.
    pub tables: u32,
}

/// The entries of one map, of both families.
#[derive(Clone, Copy, Debug)]
pub struct Entries {
    size: [u32; 2],
    used: [u32; 2],
}

impl Entries {
    /// The divisor for the share of a map beyond which a Service's demand is large, unless it is at
    /// most [`Self::FEW`].
    const MUCH: u32 = 256;
    const FEW: u32 = 16;
    /// The divisor for the share that is reserved for Services with a small demand: no single
    /// Service can leave all others without room.
    const KEPT: u32 = 8;

    fn new(size: [u32; 2], used: impl Iterator<Item = bool>) -> Self {
        let mut entries = Self { size, used: [0; 2] };
        used.for_each(|ipv6| entries.add(ipv6));
        entries
    }

    pub fn used(&self) -> [u64; 2] {
        self.used.map(u64::from)
    }

    pub fn add(&mut self, ipv6: bool) {
        self.used[usize::from(ipv6)] += 1;
    }

    pub fn remove(&mut self, ipv6: bool) {
        let used = &mut self.used[usize::from(ipv6)];
        *used = used.saturating_sub(1);
    }

    /// Whether `more` entries fit, for a Service that needs `all` of them over all of its ports.
    pub fn fits(&self, ipv6: bool, more: usize, all: usize) -> bool {
        self.free(ipv6, all) as usize >= more
    }

    /// Returns the number of free entries for a Service that needs `all` of them over all of its
    /// ports.
    pub fn free(&self, ipv6: bool, all: usize) -> u32 {
        let family = usize::from(ipv6);
        let size = self.size[family];
        let kept = if all > (size / Self::MUCH).max(Self::FEW) as usize { size / Self::KEPT } else { 0 };
        (size - kept).saturating_sub(self.used[family])
    }
}

/// The entries of the maps that are filled one write at a time.
#[derive(Clone, Copy, Debug)]
pub struct Budget {
    pub frontends: Entries,
    pub source_ranges: Entries,
}

impl Budget {
    pub fn new(capacity: &Capacity, held: &Held) -> Self {
        let cluster_ips = held.cluster_ips.iter().map(std::net::IpAddr::is_ipv6);
        let frontends = held.frontends.keys().map(|id| id.address.is_ipv6());
        Self {
            frontends: Entries::new(capacity.frontends, frontends.chain(cluster_ips)),
            source_ranges: Entries::new(
                capacity.source_ranges,
                held.sources.iter().map(|source| source.ipv6),
            ),
        }
    }
}

/// A lack of room in the maps, or of programs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lack {
    Indices,
    Endpoints {
        needed: usize,
    },
    Frontends {
        needed: usize,
        free: u32,
    },
    SourceRanges {
        needed: usize,
        free: u32,
    },
    Tables,
    TableSlots {
        endpoints: usize,
        slots: u32,
    },
    /// The kernel has not loaded the programs of its protocol.
    Programs,
}

impl fmt::Display for Lack {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Indices => write!(f, "there are too many Service ports (--service-entries)"),
            Self::Endpoints { needed } => {
                write!(
                    f,
                    "it has {needed} endpoints, for which no slots in a row are free (--endpoint-entries)"
                )
            }
            Self::Frontends { needed, free } => {
                write!(f, "it needs {needed} more frontends, and {free} are free (--frontend-entries)")
            }
            Self::SourceRanges { needed, free } => {
                write!(
                    f,
                    "it needs {needed} more source ranges, and {free} are free (--source-range-entries)"
                )
            }
            Self::Tables => {
                write!(f, "its Maglev table finds no room: endpoints are chosen at random (--maglev-entries)")
            }
            Self::TableSlots { endpoints, slots } => {
                write!(
                    f,
                    "its {endpoints} endpoints are more than a Maglev table takes, which has {slots} slots: they are chosen at random (--maglev-size)"
                )
            }
            Self::Programs => {
                write!(f, "the kernel does not load the programs of SCTP (the agent's log has the reason)")
            }
        }
    }
}

/// A Service port that is missing from the maps, or incomplete in them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LeftOut {
    pub key: ServicePortKey,
    pub lack: Lack,
    /// The number of its endpoints on this node that the maps hold for all of its frontends.
    pub local_endpoints: usize,
}

impl LeftOut {
    /// Describes a Service port that does not fit. `held`: the endpoints that the maps hold for all
    /// of its frontends; `wanted`: the ones that they should hold.
    pub fn new(key: &ServicePortKey, lack: Lack, held: &[Endpoint], wanted: &[Endpoint]) -> Self {
        let wanted: BTreeSet<SocketAddr> = wanted.iter().map(|endpoint| endpoint.address).collect();
        let local = held.iter().filter(|endpoint| wanted.contains(&endpoint.address));
        let addresses: BTreeSet<_> = local.map(|endpoint| endpoint.address.ip()).collect();
        Self { key: key.clone(), lack, local_endpoints: addresses.len() }
    }
}
