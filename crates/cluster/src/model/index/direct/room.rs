//! Nodes that take part in direct forwarding, and for whose addresses the maps have no room.

use std::{
    collections::{BTreeSet, HashSet},
    net::IpAddr,
};

use crate::model::{Limits, direct_nodes::DirectNodes, object::DirectNode};

/// Returns the names of the nodes without room. Those whose addresses are already known come first:
/// their flows go on. A node has room for all of its addresses, or for none.
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
    let is_known = |other: &&DirectNode| {
        other.addresses.iter().all(|address| known.addresses.contains(address))
            && other.macs.iter().all(|mac| known.macs.contains_key(mac))
    };
    let (former, new): (Vec<_>, Vec<_>) = others().partition(is_known);
    let (mut addresses, mut macs) = (HashSet::<IpAddr>::new(), HashSet::<[u8; 6]>::new());
    let mut taken = [0; 3];
    let mut without = BTreeSet::new();
    for other in former.into_iter().chain(new) {
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
