//! Ports of the pool that this node itself has in use towards an endpoint: a process has bound one,
//! or a network plugin's masquerade has given one to a pod's connection (`--random-fully`). A new
//! flow towards that endpoint gets another port, so that the node's answers stay its own.
//!
//! conntrack knows them, but its functions for programs are those of a module on most kernels:
//! without that module's BTF no program that calls them loads. So what leaves is noted, in the map
//! of [`super::own_datagrams`] and by the same tuple: that of the answer.

use traffic_policy_ebpf::abi::{DeviceInfo, PROTOCOL_UDP, Tuple};

use crate::datapath::{
    clock,
    ctx::Packet,
    family::Family,
    maps::{ANY, DEVICES, TABLE_USAGE, Table},
    parse::Parsed,
    prefilter,
    value::{borrow, load, store},
};

/// Seconds after the last datagram, FIN or RST for which a port is held. A connection holds its
/// port until then, or until the kernel evicts the note.
const LASTS: u32 = 30;
/// The time of a connection that has not ended.
const OPEN: u32 = 0;

/// Notes a datagram that leaves, or the beginning or end of a connection or association, from a
/// port of the pool to an endpoint's port, if it is the node's own.
#[inline(always)]
pub fn note<P: Packet, F: Family>(packet: P, parsed: &Parsed<F>) {
    let opens = parsed.opens(packet);
    if !parsed.is_udp::<P>() && !opens && !parsed.ends(packet) {
        return;
    }
    let ports = parsed.tuple.ports;
    if !prefilter::is_pool_port(ports.source()) || !prefilter::is_endpoint(ports.destination()) {
        return;
    }
    // A flow's packet that TC sends on came by an attached device. Its look-up is not worth it for
    // each datagram, so those of pods behind a masquerade are left out.
    let came_by = packet.came_by();
    if came_by != 0
        && (parsed.is_udp::<P>()
            || Table::of(&raw const DEVICES).lookup::<u32, DeviceInfo>(&came_by).is_some())
    {
        return;
    }
    // Of a pod without a masquerade it is another address's port.
    if F::node_addresses().lookup::<_, u32>(&parsed.tuple.source).is_none() {
        return;
    }
    let (Some(scratch), Some(usage)) = (F::scratch(), TABLE_USAGE.get_ptr_mut(0)) else { return };
    let now = clock::jiffies();
    let at = if opens { OPEN } else { now };
    if get!(usage.own_sent_at) != now {
        set!(usage.own_sent_at = now);
    }
    set!(scratch.other = parsed.tuple.reversed());
    let key: &Tuple<F::Address> = borrow(place!(const scratch.other));
    match F::own_sent().lookup::<_, u32>(key) {
        Some(last) => store(last, at),
        None if !parsed.is_udp::<P>() && !opens => {}
        None => {
            set!(scratch.directory_look = at);
            F::own_sent().insert(key, place!(const scratch.directory_look), ANY);
        }
    }
}

/// Whether answers of this tuple are the node's own, so that no reply entry may have it.
#[inline(always)]
pub fn holds<F: Family>(answer: &Tuple<F::Address>, now: u32) -> bool {
    let Some(usage) = TABLE_USAGE.get_ptr(0) else { return false };
    // Nothing was ever noted on most nodes.
    if get!(usage.own_sent_at) == 0 {
        return false;
    }
    let Some(last) = F::own_sent().lookup::<_, u32>(answer) else { return false };
    let last = load(last);
    last == OPEN && answer.protocol != PROTOCOL_UDP || now.wrapping_sub(last) <= LASTS * clock::hz()
}
