//! Traffic of this node itself on ports that Services use, too: conntrack knows where the answers
//! belong; the packet path, which runs before it, notes outgoing packets at egress, by the tuple of
//! their answers.
//!
//! *Datagrams from a Service's port.* A process may have bound that port, and a network plugin's
//! masquerade takes any port (`--random-fully`) for a pod's query to a DNS server. No TCP
//! connection and no SCTP association begins with an answer, so this concerns UDP alone.
//!
//! *Ports of the SNAT port range, towards an endpoint.* A process has bound one, or a masquerade
//! has given one to a pod's connection. A new flow towards that endpoint gets another port, so that
//! the node keeps its own answers.
//!
//! On most kernels the functions of conntrack for programs belong to a module: without that
//! module's BTF no program that calls them loads. So the packet path cannot ask conntrack.

use traffic_policy_ebpf::{
    abi::{DeviceInfo, PROTOCOL_UDP, Tuple, scope},
    tcp::REMOVED,
};

use crate::datapath::{
    clock,
    ctx::{Packet, Skb},
    family::Family,
    flow::table::FlowTable,
    lb::{Target, select},
    maps::{ANY, DEVICES, TABLE_USAGE, Table},
    parse::Parsed,
    prefilter,
    value::{borrow, load, store},
};

/// The seconds for which a note of a datagram lasts, or one of a connection after its FIN or RST:
/// `nf_conntrack_udp_timeout`. A connection holds its port until it ends, or until the kernel
/// evicts the note.
const LASTS: u32 = 30;
/// The time that marks a connection that has not ended.
const OPEN: u32 = 0;

/// Notes an outgoing packet if the node itself sends it: a datagram from a frontend's address and
/// port; a datagram, or the beginning or end of a connection or association, from a port of the
/// SNAT port range to an endpoint's port.
#[inline(always)]
pub fn note<P: Skb, F: Family>(packet: P, parsed: &Parsed<F>) {
    note_datagram(packet, parsed);
    note_port(packet, parsed);
}

/// Notes an outgoing datagram, if the node itself sends it from a frontend's address and port.
#[inline(always)]
fn note_datagram<P: Skb, F: Family>(packet: P, parsed: &Parsed<F>) {
    let port = parsed.tuple.ports.source();
    if !parsed.is_udp::<P>() || !prefilter::may_be_service::<F>(parsed.tuple.source, port) {
        return;
    }
    // A packet that came by an attached device is a reply that TC forwards: it has the same source.
    let came_by = packet.came_by();
    if came_by != 0 && Table::of(&raw const DEVICES).lookup::<u32, DeviceInfo>(&came_by).is_some() {
        return;
    }
    let frontend = select::frontend::<F>(&Target {
        address: parsed.tuple.source,
        port,
        protocol: parsed.tuple.protocol as u16,
        scope: scope::ADDRESS,
    });
    let (Some(scratch), Some(usage)) = (F::scratch(), TABLE_USAGE.get_ptr_mut(0)) else { return };
    if frontend.is_null() {
        return;
    }
    let now = clock::jiffies();
    if get!(usage.own_sent_at) != now {
        set!(usage.own_sent_at = now);
    }
    set!(scratch.other = parsed.tuple.reversed());
    let key: &Tuple<F::Address> = borrow(place!(const scratch.other));
    match F::own_sent().lookup::<_, u32>(key) {
        Some(last) => store(last, now),
        None => {
            // A flow that an earlier answer created, when the query was not known.
            let diverted = FlowTable::<F>::new().find(key);
            if !diverted.is_null() {
                set!(diverted.state |= REMOVED);
            }
            set!(scratch.directory_look = now);
            F::own_sent().insert(key, place!(const scratch.directory_look), ANY);
        }
    }
}

/// Notes an outgoing datagram, or the beginning or end of a connection or association, from a SNAT
/// port to an endpoint's port, if the node itself sends it.
#[inline(always)]
fn note_port<P: Skb, F: Family>(packet: P, parsed: &Parsed<F>) {
    let opens = parsed.opens(packet);
    if !parsed.is_udp::<P>() && !opens && !parsed.ends(packet) {
        return;
    }
    let ports = parsed.tuple.ports;
    if !prefilter::is_snat_port(ports.source()) || !prefilter::is_endpoint(ports.destination()) {
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

/// Whether a datagram answers one that was noted.
#[inline(always)]
pub fn is_answered_by<P: Packet, F: Family>(parsed: &Parsed<F>, now: u32) -> bool {
    if !parsed.is_udp::<P>() {
        return false;
    }
    let Some(usage) = TABLE_USAGE.get_ptr(0) else { return false };
    let lasts = LASTS * clock::hz();
    if now.wrapping_sub(get!(usage.own_sent_at)) > lasts {
        return false;
    }
    match F::own_sent().lookup::<_, u32>(&parsed.tuple) {
        Some(last) => now.wrapping_sub(load(last)) <= lasts,
        None => false,
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
