//! Datagrams that this node itself sends from a port that is also a Service's: their answers belong
//! to the node.
//!
//! A process may have bound that port, and a network plugin's masquerade takes any port
//! (`--random-fully`) for a pod's query to a DNS server. conntrack knows where the answer belongs;
//! the packet path, which runs before it, notes the query at egress. No TCP connection and no SCTP
//! association begins with an answer, so this concerns UDP alone.

use traffic_policy_ebpf::{
    abi::{DeviceInfo, Tuple, scope},
    tcp::GONE,
};

use crate::datapath::{
    clock,
    ctx::Packet,
    family::Family,
    flow::table::FlowTable,
    lb::{Target, select},
    maps::{ANY, DEVICES, TABLE_USAGE, Table},
    parse::Parsed,
    prefilter,
    value::{borrow, load, store},
};

/// The seconds after which an answer counts as a request: `nf_conntrack_udp_timeout`.
const LASTS: u32 = 30;

/// Notes an outgoing datagram, if the node itself sends it from a frontend's address and port.
#[inline(always)]
pub fn note<P: Packet, F: Family>(packet: P, parsed: &Parsed<F>) {
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
                set!(diverted.state |= GONE);
            }
            set!(scratch.directory_look = now);
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
