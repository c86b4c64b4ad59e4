//! The owners of the slots of a Service port's Maglev tables, present and former.

use std::{
    net::{IpAddr, SocketAddr},
    time::Duration,
};

use anyhow::{Result, ensure};
use traffic_policy_cluster::model::{Endpoint, FrontendKind};
use traffic_policy_ebpf::{
    abi::{Address, Address4, Address6, Ports, Tuple, maglev},
    hash,
};

use super::{
    pinned::Pinned,
    services::{self, Choice, ServicePort},
};
use crate::dataplane::{
    clock,
    maps::keys::{self, ToWire as _},
    sync::former::Former,
};

/// Those that are asked for connections which their present owners do not know.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FormerOwners {
    /// The slots that have one.
    pub slots: u32,
    /// The time until they are asked no more.
    pub left: Duration,
    pub owners: Vec<FormerOwner>,
}

/// An endpoint that a table named before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FormerOwner {
    pub endpoint: Endpoint,
    /// The slots that it had: of some it may be the last owner but one, or two.
    pub slots: u32,
}

impl ServicePort {
    /// Returns the number of slots that each endpoint for policy Cluster has in the Maglev table;
    /// `None` without a table.
    pub fn slots(&self, pinned: &Pinned) -> Result<Option<Vec<u32>>> {
        let Choice::Maglev(table) = self.choice else { return Ok(None) };
        let mut slots = vec![0; self.cluster.len()];
        for place in maglev::unpack(&elements(pinned, table.base, maglev::elements(table.len))?, table.len) {
            // A table that is replaced meanwhile may name places that the list lacks.
            if let Some(count) = slots.get_mut(place as usize) {
                *count += 1;
            }
        }
        Ok(Some(slots))
    }

    /// Returns the endpoint that the Maglev table names for a connection to one of the frontends;
    /// `None` without a table.
    pub fn owner(
        &self,
        pinned: &Pinned,
        client: SocketAddr,
        frontend: SocketAddr,
    ) -> Result<Option<Endpoint>> {
        let Choice::Maglev(table) = self.choice else { return Ok(None) };
        let kind = self.frontends.iter().find(|known| known.address == frontend).map(|known| known.kind);
        let slot = Connection { client, frontend, is_node_port: kind == Some(FrontendKind::NodePort) }
            .slot(keys::number(self.key.protocol), table.len);
        let Some(slot) = slot else { return Ok(None) };
        let element = table.base.saturating_add(maglev::element_of(slot));
        let places: u64 = pinned.map("tp_maglev")?.value(element)?;
        Ok(self.cluster.get(maglev::place(places, slot) as usize).copied())
    }

    /// Returns the former owners of this Service port's slots; `None` if none are asked any more.
    pub fn former_owners(&self, pinned: &Pinned) -> Result<Option<FormerOwners>> {
        let now = clock::monotonic()?;
        if !self.former.is_valid(now) {
            return Ok(None);
        }
        let Former { tables, slots, list, until } = self.former;
        let endpoints = if self.key.ipv6 {
            services::endpoints::<Address6>(&pinned.map("tp_endpoints6")?, list)?
        } else {
            services::endpoints::<Address4>(&pinned.map("tp_endpoints4")?, list)?
        };
        let length = maglev::elements(slots);
        let all = elements(pinned, tables.base, tables.len.saturating_mul(length))?;
        let tables = all.chunks_exact(length.max(1) as usize);
        let read: Vec<_> = tables.map(|table| maglev::unpack(table, slots).collect()).collect();
        Ok(Some(FormerOwners { left: Duration::from_nanos(until - now), ..count(&endpoints, &read) }))
    }
}

/// Reads this many elements of the Maglev tables, of which there have to be as many.
fn elements(pinned: &Pinned, first: u32, number: u32) -> Result<Vec<u64>> {
    let mut elements = Vec::new();
    pinned
        .map("tp_maglev")?
        .elements(first..first.saturating_add(number), |element| elements.push(element))?;
    ensure!(elements.len() == number as usize, "the Maglev table ends behind its map: it was just replaced");
    Ok(elements)
}

/// A connection to a frontend.
struct Connection {
    client: SocketAddr,
    frontend: SocketAddr,
    is_node_port: bool,
}

impl Connection {
    /// Returns the connection's slot in a table of `slots` slots, as the packet path finds it;
    /// `None` if its addresses are of two families.
    fn slot(&self, protocol: u32, slots: u32) -> Option<u32> {
        let hash = match (self.client.ip(), self.frontend.ip()) {
            (IpAddr::V4(from), IpAddr::V4(to)) => {
                self.hash::<Address4>(from.to_wire(), to.to_wire(), protocol)
            }
            (IpAddr::V6(from), IpAddr::V6(to)) => {
                self.hash::<Address6>(from.to_wire(), to.to_wire(), protocol)
            }
            _ => return None,
        };
        Some(hash::pick(hash, slots))
    }

    fn hash<A: Address>(&self, source: A, destination: A, protocol: u32) -> u64 {
        // Each node has addresses of its own.
        let destination = if self.is_node_port { A::default() } else { destination };
        let ports = Ports::from_host(self.client.port(), self.frontend.port());
        hash::tuple(&Tuple { source, destination, ports, protocol }, hash::MAGLEV_SEED)
    }
}

/// Counts the slots of each endpoint in tables of equal length.
fn count(endpoints: &[Endpoint], tables: &[Vec<u16>]) -> FormerOwners {
    let mut owners: Vec<_> =
        endpoints.iter().map(|endpoint| FormerOwner { endpoint: *endpoint, slots: 0 }).collect();
    let mut slots = 0;
    for slot in 0..tables.first().map_or(0, Vec::len) {
        let mut has_owner = false;
        for table in tables {
            // A place beyond the list is nobody's.
            if let Some(owner) = table.get(slot).and_then(|place| owners.get_mut(usize::from(*place))) {
                owner.slots += 1;
                has_owner = true;
            }
        }
        slots += u32::from(has_owner);
    }
    // A list that is replaced meanwhile has endpoints that no table names.
    owners.retain(|owner| owner.slots > 0);
    owners.sort_by_key(|owner| owner.endpoint.address);
    FormerOwners { slots, left: Duration::ZERO, owners }
}

#[cfg(test)]
mod tests {
    use traffic_policy_ebpf::abi::maglev::NOBODY;

    use super::*;

    #[test]
    fn a_slot_with_two_former_owners_counts_once() {
        let endpoint = |last: u8| Endpoint::new(([10, 0, 0, last], 80).into(), false);
        let endpoints = [endpoint(2), endpoint(1), endpoint(3)];
        let counted = count(&endpoints, &[vec![0, 1, NOBODY, 0], vec![1, NOBODY, NOBODY, NOBODY]]);
        let owners: Vec<_> = counted.owners.iter().map(|owner| (owner.endpoint, owner.slots)).collect();
        assert_eq!((counted.slots, owners), (3, vec![(endpoint(1), 2), (endpoint(2), 2)]));
        assert_eq!(count(&endpoints, &[]).slots, 0);
    }
}
