//! Nodes that take part in direct forwarding, and for whose addresses the maps have no room.

use std::{
    collections::{BTreeSet, HashSet},
    net::IpAddr,
};

use crate::model::{Limits, direct_nodes::DirectNodes, object::DirectNode};

/// The order in which nodes are given room.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Rank {
    /// All addresses are known already: flows go on.
    Known,
    /// Some are: there is a further one.
    Partly,
    New,
}

impl Rank {
    fn of(node: &DirectNode, known: &DirectNodes) -> Self {
        let addresses = node.addresses.iter().map(|address| known.addresses.contains(address));
        let all: Vec<_> = addresses.chain(node.macs.iter().map(|mac| known.macs.contains_key(mac))).collect();
        match all.iter().filter(|known| **known).count() {
            0 => Self::New,
            count if count == all.len() => Self::Known,
            _ => Self::Partly,
        }
    }
}

/// Returns the names of the nodes without room. Those whose addresses are already known come first.
/// A node has room for all of its addresses, or for none.
pub(super) fn without_room<'a, I>(
    others: impl Fn() -> I,
    known: &DirectNodes,
    limits: &Limits,
) -> BTreeSet<String>
where
    I: Iterator<Item = &'a DirectNode>,
{
    let room = [limits.direct_nodes, limits.direct_nodes, limits.direct_macs].map(|room| room as usize);
    let mut needed = [0; 3];
    for other in others() {
        for address in &other.addresses {
            needed[usize::from(address.is_ipv6())] += 1;
        }
        needed[2] += other.macs.len();
    }
    // An address that two Leases name is counted twice here.
    if needed.iter().zip(room).all(|(needed, room)| *needed <= room) {
        return BTreeSet::new();
    }
    let mut ranked: Vec<_> = others().collect();
    ranked.sort_by_key(|other| Rank::of(other, known));
    let (mut addresses, mut macs) = (HashSet::<IpAddr>::new(), HashSet::<[u8; 6]>::new());
    let mut taken = [0; 3];
    let mut without = BTreeSet::new();
    for other in ranked {
        let own: HashSet<_> =
            other.addresses.iter().copied().filter(|address| !addresses.contains(address)).collect();
        let own_macs: HashSet<_> = other.macs.iter().copied().filter(|mac| !macs.contains(mac)).collect();
        let of_ipv6 = own.iter().filter(|address| address.is_ipv6()).count();
        let mut then = taken;
        for (then, more) in then.iter_mut().zip([own.len() - of_ipv6, of_ipv6, own_macs.len()]) {
            *then += more;
        }
        if then.iter().zip(room).any(|(then, room)| *then > room) {
            without.insert(other.node.clone());
            continue;
        }
        taken = then;
        addresses.extend(own);
        macs.extend(own_macs);
    }
    without
}
