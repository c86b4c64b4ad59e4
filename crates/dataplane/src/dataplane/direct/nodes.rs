//! The nodes that may send, each with a number.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    time::Instant,
};

use anyhow::{Context, Result};
use aya::{
    Ebpf,
    maps::{Array, HashMap, MapData},
};
use traffic_policy_cluster::model::Desired;
use traffic_policy_ebpf::abi::{DIRECT_NODES, DirectNode, SlotRoute};

use super::{super::maps::take, Key, gone::Gone};

/// The number of addresses of a family for which there is room: number 0 is none.
pub(super) const ROOM: u32 = DIRECT_NODES - 1;

/// The maps of a family, and what they hold.
pub(super) struct Nodes<A: Key> {
    by_address: HashMap<MapData, A, u32>,
    by_number: Array<MapData, DirectNode<A>>,
    /// The elements as they are in the maps; `None`: not read yet.
    held: Option<Held>,
    /// The nodes among them that have no Lease any more.
    gone: Gone<IpAddr>,
}

#[derive(Debug, Default)]
struct Held {
    /// The addresses of nodes, with their numbers.
    nodes: BTreeMap<IpAddr, u32>,
    /// The number that was given last.
    last_number: u32,
}

impl<A: Key> Nodes<A> {
    pub(super) fn open(object: &mut Ebpf) -> Result<Self> {
        Ok(Self {
            by_address: take(object, A::NODES)?,
            by_number: take(object, A::BY_NUMBER)?,
            held: None,
            gone: Gone::default(),
        })
    }

    /// Returns the number of addresses in the maps.
    pub(super) fn len(&self) -> usize {
        self.held.as_ref().map_or(0, |held| held.nodes.len())
    }

    /// Makes the maps equal to the desired state; `all`: whatever is held was changed by others.
    pub(super) fn sync(&mut self, desired: &Desired, all: bool, now: Instant) -> Result<usize> {
        let mut held = match self.held.take() {
            Some(held) if !all => held,
            _ => self.read().context("reading the maps of direct forwarding failed")?,
        };
        let wanted: BTreeSet<IpAddr> =
            desired.direct_nodes.iter().copied().filter(|address| A::of(*address).is_some()).collect();
        let over = self.gone.over(held.nodes.keys().copied(), &wanted, ROOM as usize, now);
        let mut written = self.remove(over, &mut held)?;
        for address in wanted {
            let Some(key) = A::of(address).filter(|_| !held.nodes.contains_key(&address)) else { continue };
            let number = free_number(&held.nodes, held.last_number);
            let named = || format!("naming {address}, which forwards directly, failed (is the map full?)");
            let number = number.with_context(named)?;
            let node = DirectNode { address: key, route: SlotRoute::default() };
            self.by_number.set(number, node, 0).with_context(named)?;
            self.by_address.insert(key, number, 0).with_context(named)?;
            held.nodes.insert(address, number);
            held.last_number = number;
            written += 1;
        }
        self.held = Some(held);
        Ok(written)
    }

    fn remove(&mut self, over: Vec<IpAddr>, held: &mut Held) -> Result<usize> {
        let mut written = 0;
        for address in over {
            let Some(key) = A::of(address) else { continue };
            self.by_address.remove(&key).context("forgetting a node that forwards directly failed")?;
            // What its number leads to stays: replies of open flows may still go there.
            held.nodes.remove(&address);
            self.gone.forget(address);
            written += 1;
        }
        Ok(written)
    }

    /// Forgets nodes whose Leases have been gone for long enough.
    pub(super) fn forget(&mut self, now: Instant) -> Result<()> {
        let over = self.gone.expire(now);
        // Without `held`, the next sync reads the map, and finds them there.
        if let Some(mut held) = self.held.take_if(|_| !over.is_empty()) {
            self.remove(over, &mut held)?;
            self.held = Some(held);
        }
        Ok(())
    }

    fn read(&self) -> Result<Held> {
        let mut held = Held::default();
        for entry in &self.by_address {
            let (address, number) = entry?;
            held.nodes.insert(address.to_ip(), number);
            held.last_number = held.last_number.max(number);
        }
        Ok(held)
    }
}

/// Returns the next number after the last one that no node has; `None` if all are in use. A number
/// that was given back comes last: replies of open flows may still have it.
fn free_number(nodes: &BTreeMap<IpAddr, u32>, last: u32) -> Option<u32> {
    let used: BTreeSet<_> = nodes.values().copied().collect();
    (last + 1..DIRECT_NODES).chain(1..=last.min(DIRECT_NODES - 1)).find(|number| !used.contains(number))
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;

    #[test]
    fn numbers_of_nodes_are_not_given_again_soon() {
        let ip = |last| IpAddr::from(Ipv4Addr::new(192, 0, 2, last));
        let nodes = BTreeMap::from([(ip(1), 1), (ip(3), 3)]);
        assert_eq!(free_number(&BTreeMap::new(), 0), Some(1), "0 is none");
        assert_eq!(free_number(&nodes, 3), Some(4), "2 was given back");
        assert_eq!(free_number(&nodes, DIRECT_NODES - 1), Some(2));
        let all = (1..DIRECT_NODES).map(|number| (IpAddr::from(Ipv4Addr::from(number)), number)).collect();
        assert_eq!(free_number(&all, 7), None);
    }
}
