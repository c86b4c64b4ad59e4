//! A per-CPU cache of next hops towards clients: the first reply of a client's next flow needs no
//! FIB look-up (load balancers, proxies and clients without keep-alive open one connection after
//! the other).
//!
//! The FIB's answer for one client does not hold for another, even behind the same gateway: a route
//! may lead to one of them alone, and routing rules match the source and the ingress device. So an
//! answer is used only for exactly the same question, under the same route epoch, and no longer
//! than `hop_max_age`: the results of path MTU discovery raise no epoch.

use traffic_policy_ebpf::{
    abi::{CLIENT_HOPS, ClientHop, Hop},
    hash,
};

use crate::datapath::{ctx::Packet, family::Family, forward::Current};

/// Returns the place of a client in the cache of this CPU. Never `None`, but the verifier does not
/// know that.
#[inline(always)]
fn place<F: Family>(client: F::Address) -> Option<*mut ClientHop<F::Address>> {
    let scratch = F::scratch()?;
    let index = (hash::address(client) >> (u64::BITS - CLIENT_HOPS.trailing_zeros())) as usize;
    Some(place!(mut scratch.client_hops).cast::<ClientHop<F::Address>>().wrapping_add(index))
}

/// Returns the next hop of replies from `source` to a client, its index and its route epoch, if the
/// cache has it. `now`: low half of jiffies.
#[inline(always)]
pub fn find<P: Packet, F: Family>(
    packet: P,
    source: F::Address,
    client: F::Address,
    now: u32,
) -> Option<(*const Hop, u16, u16)> {
    let known = place::<F>(client)?;
    let current = Current::load()?;
    let (index, epoch) = (get!(known.hop), get!(known.epoch));
    if get!(known.destination) != client
        || get!(known.source) != source
        || get!(known.ingress) != packet.ingress()
        || index == 0
        || !current.is_young(get!(known.looked_up), now)
    {
        return None;
    }
    current.hop(epoch, index, now).map(|hop| (hop, index, epoch))
}

/// Notes the FIB's answer for the route from `source` to a client: index of the next hop, and route
/// epoch. `now`: low half of jiffies.
#[inline(always)]
pub fn note<P: Packet, F: Family>(
    packet: P,
    source: F::Address,
    client: F::Address,
    (hop, epoch): (u16, u16),
    now: u32,
) {
    let Some(known) = place::<F>(client) else { return };
    set!(known.source = source);
    set!(known.destination = client);
    set!(known.ingress = packet.ingress());
    set!(known.hop = hop);
    set!(known.epoch = epoch);
    set!(known.looked_up = now);
}
