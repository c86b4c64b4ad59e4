//! Ports of the pool that this node itself uses towards an endpoint: a process has bound one, or a
//! network plugin's masquerade has given one to a pod's connection (`--random-fully`). A new flow
//! towards that endpoint gets another port, so that the node keeps its own answers.
//!
//! conntrack knows these ports, but on most kernels its functions for programs belong to a module:
//! without that module's BTF no program that calls them loads. So outgoing packets are noted, in
//! the map of [`super::own_datagrams`] and by the same tuple: that of the answer.

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

/// The seconds for which a port is held after the last datagram, FIN or RST. A connection holds its
/// port until it ends, or until the kernel evicts the note.
const LASTS: u32 = 30;
/// The time that marks a connection that has not ended.
const OPEN: u32 = 0;

/// Notes an outgoing datagram, or the beginning or end of a connection or association, from a port
/// of the pool to an endpoint's port, if the node itself sends it.
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
    // A flow's packet that TC forwards came by an attached device. That look-up is too expensive
    // for each datagram, so datagrams of pods behind a masquerade are left out.
    let came_by = packet.came_by();
    if came_by != 0
        && (parsed.is_udp::<P>()
            || Table::of(&raw const DEVICES).lookup::<u32, DeviceInfo>(&came_by).is_some())
    {
        return;
    }
    // A port of a pod without a masquerade is one of another address.
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

/// Whether answers with this tuple belong to the node itself, so that no reply entry may have it.
#[inline(always)]
pub fn holds<F: Family>(answer: &Tuple<F::Address>, now: u32) -> bool {
    let Some(usage) = TABLE_USAGE.get_ptr(0) else { return false };
    // On most nodes nothing was ever noted.
    if get!(usage.own_sent_at) == 0 {
        return false;
    }
    let Some(last) = F::own_sent().lookup::<_, u32>(answer) else { return false };
    let last = load(last);
    last == OPEN && answer.protocol != PROTOCOL_UDP || now.wrapping_sub(last) <= LASTS * clock::hz()
}
