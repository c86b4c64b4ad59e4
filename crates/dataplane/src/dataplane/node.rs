//! The description of this node in the map `tp_local_node`: its network namespace, its addresses,
//! the ranges of its pods.

use std::{
    collections::{BTreeSet, HashSet},
    hash::Hash,
    net::IpAddr,
};

use anyhow::{Context as _, Result};
use aya::{
    Pod,
    maps::{HashMap, MapData},
};
use ipnet::IpNet;
use traffic_policy_ebpf::abi::{Address4, Address6, LocalNode, WideAddress};

use super::{
    Dataplane,
    config::SourceCheck,
    kernel,
    maps::{
        Maps,
        keys::{ToWire as _, first, wide},
        prefilter,
    },
};

/// The description of the node.
pub trait NodeDescription {
    /// Writes the addresses that sockets without an address will probably use: the node's primary
    /// addresses, and for pods the first address of their ranges.
    fn describe_node(&mut self, primary: &[IpAddr], pod_ranges: &[IpNet]) -> Result<()>;
}

impl NodeDescription for Dataplane {
    fn describe_node(&mut self, primary: &[IpAddr], pod_ranges: &[IpNet]) -> Result<()> {
        let pods: Vec<IpAddr> = pod_ranges.iter().map(IpNet::network).collect();
        let pod_bits = [false, true].map(|ipv6| {
            let range = pod_ranges.iter().find(|range| range.addr().is_ipv6() == ipv6);
            range.map_or(0, |range| u32::from(range.prefix_len()))
        });
        let pod_masks = [false, true].map(|ipv6| {
            let range = pod_ranges.iter().find(|range| range.addr().is_ipv6() == ipv6);
            range.map_or(WideAddress::UNSPECIFIED, |range| wide(range.netmask()))
        });
        prefilter::set_primary(&mut self.maps.prefilter, primary);
        put(&mut self.maps, |node| LocalNode {
            primary: first(primary),
            pods: first(&pods),
            pod_bits,
            pod_masks,
            ..node
        })
    }
}

/// Writes the node's network namespace, which is that of this process, and the sources that new
/// flows may have.
pub fn name_namespace(maps: &mut Maps, check: SourceCheck) -> Result<()> {
    let netns = kernel::netns_cookie()?;
    put(maps, |node| LocalNode { netns, source_check: check.number(), ..node })
}

impl Dataplane {
    /// Writes the node's addresses. Those that find no room are left out without failing the sync.
    pub(super) fn name_addresses(&mut self, addresses: &BTreeSet<IpAddr>) -> Result<()> {
        let Self { named, maps, .. } = self;
        named.name(addresses, |addresses| name_addresses(maps, addresses))
    }
}

/// The node's addresses as the maps hold them, and the number that found no room; `None` if they
/// are unknown.
#[derive(Debug, Default)]
pub(super) struct Named(Option<(BTreeSet<IpAddr>, usize)>);

impl Named {
    /// Writes the addresses with `write`, which returns the number that found no room, unless the
    /// last call has written the same.
    fn name(
        &mut self,
        addresses: &BTreeSet<IpAddr>,
        write: impl FnOnce(&BTreeSet<IpAddr>) -> Result<usize>,
    ) -> Result<()> {
        let named = self.0.take();
        if named.as_ref().is_some_and(|(named, _)| named == addresses) {
            // Nothing else writes them, and there may be thousands.
            self.0 = named;
            return Ok(());
        }
        let left_out = write(addresses)?;
        let said = named.is_some_and(|(_, left_out)| left_out > 0);
        self.0 = Some((addresses.clone(), left_out));
        if left_out > 0 && !said {
            tracing::warn!(
                "the node has {} addresses (leftovers on kube-ipvs0?), and {left_out} find no room: packets from outside in \
                 their names are not dropped",
                addresses.len()
            );
        }
        Ok(())
    }
}

/// Writes this node's own addresses, from which no packet may arrive from outside. Returns the
/// number that found no room: packets that forge one of those are not detected.
fn name_addresses(maps: &mut Maps, addresses: &BTreeSet<IpAddr>) -> Result<usize> {
    let fitting = Fitting::of(addresses, maps.room.node_addresses);
    let mut wanted = LocalNode::default();
    fitting.v4.iter().for_each(|address| wanted.note_address(0, *address));
    fitting.v6.iter().for_each(|address| wanted.note_address(1, *address));
    let wanted = wanted.address_bits;
    // The bits cover at any time at least the addresses in the tables.
    put(maps, |node| LocalNode { address_bits: either(node.address_bits, wanted), ..node })?;
    equal(&mut maps.v4.node_addresses, &fitting.v4)?;
    equal(&mut maps.v6.node_addresses, &fitting.v6)?;
    put(maps, |node| LocalNode { address_bits: wanted, ..node })?;
    Ok(fitting.left_out)
}

fn either<const WORDS: usize>(mut one: [[u64; WORDS]; 2], other: [[u64; WORDS]; 2]) -> [[u64; WORDS]; 2] {
    for (one, other) in one.iter_mut().flatten().zip(other.iter().flatten()) {
        *one |= other;
    }
    one
}

/// The addresses that fit into the maps: the same selection for the same set of addresses.
struct Fitting {
    v4: HashSet<Address4>,
    v6: HashSet<Address6>,
    left_out: usize,
}

impl Fitting {
    /// Selects the addresses that fit. `room`: IPv4, IPv6.
    fn of(addresses: &BTreeSet<IpAddr>, room: [u32; 2]) -> Self {
        let mut fitting = Self { v4: HashSet::new(), v6: HashSet::new(), left_out: 0 };
        let [room4, room6] = room.map(|room| room as usize);
        for address in addresses {
            match address {
                IpAddr::V4(address) if fitting.v4.len() < room4 => drop(fitting.v4.insert(address.to_wire())),
                IpAddr::V6(address) if fitting.v6.len() < room6 => drop(fitting.v6.insert(address.to_wire())),
                _ => fitting.left_out += 1,
            }
        }
        fitting
    }
}

fn equal<A: Pod + Eq + Hash>(map: &mut HashMap<MapData, A, u32>, wanted: &HashSet<A>) -> Result<()> {
    let held: HashSet<A> =
        map.keys().collect::<Result<_, _>>().context("reading the addresses of the node failed")?;
    for address in held.difference(wanted) {
        map.remove(address).context("forgetting an address of the node failed")?;
    }
    for address in wanted.difference(&held) {
        map.insert(address, 1, 0).context("writing an address of the node failed")?;
    }
    Ok(())
}

fn put(maps: &mut Maps, change: impl FnOnce(LocalNode) -> LocalNode) -> Result<()> {
    let held = maps.local_node.get(&0, 0).context("reading the description of the node failed")?;
    let node = change(held);
    if node == held {
        return Ok(());
    }
    maps.local_node.set(0, node, 0).context("writing the description of the node failed")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A node may have thousands of addresses, and each change of an endpoint causes a sync.
    #[test]
    fn the_maps_are_read_only_if_addresses_changed() {
        let addresses = |count: u8| (0..count).map(|number| IpAddr::from([192, 0, 2, number])).collect();
        let mut named = Named::default();
        let mut writes = 0;
        for (count, fails, written, is_ok) in [
            (2, true, 1, false),
            // The effect of the failed write is unknown.
            (2, false, 2, true),
            (2, false, 2, true),
            (3, false, 3, true),
            (3, true, 3, true),
            (2, true, 4, false),
            (2, false, 5, true),
            (2, false, 5, true),
        ] {
            let named = named.name(&addresses(count), |_| {
                writes += 1;
                if fails { anyhow::bail!("the kernel refuses") } else { Ok(0) }
            });
            assert_eq!((writes, named.is_ok()), (written, is_ok), "{count} addresses, write {written}");
        }
    }

    #[test]
    fn addresses_beyond_the_room_are_left_out() {
        let four = (0..5).map(|number| IpAddr::from([192, 0, 2, number]));
        let six = (0..2).map(|number| IpAddr::from([0x2001, 0xdb8, 0, 0, 0, 0, 0, number]));
        let fitting = Fitting::of(&four.chain(six).collect(), [3, 3]);
        assert_eq!((fitting.v4.len(), fitting.v6.len(), fitting.left_out), (3, 2, 2));
    }
}
