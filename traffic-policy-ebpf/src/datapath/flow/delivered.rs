//! Packets that XDP has delivered. TC sees them again, with the translated tuple, and hands them to
//! the stack.
//!
//! The endpoint's address and port may also be another Service's frontend (a process in the host's
//! network, an external IP that is a node's). Then one client port may have a flow to each, and the
//! packets of one, once delivered, have the tuple of the other's requests. conntrack examines a
//! packet once, before NAT, and never confuses them; TC would. The flow to that endpoint is marked
//! [`BY_TC`] where the two meet: XDP leaves it to TC, which sees its packets once, as they came.
//! The mark is a state that the fast path does not know, so no other flow pays for it.

use traffic_policy_ebpf::{
    abi::{Address, DEVICE_XDP, DeviceInfo, Flow, Scratch, kind},
    tcp::BY_TC,
};

use crate::datapath::{
    ctx::Packet,
    family::Family,
    flow::{recycle, table::FlowTable},
    maps::{DEVICES, Table},
    parse::Parsed,
    prefilter,
    value::{borrow, store},
};

/// Whether XDP has delivered a packet for which TC finds no entry: then its tuple is that of a
/// reply, reversed.
#[inline(always)]
pub fn by_xdp<P: Packet, F: Family>(packet: P, parsed: &Parsed<F>) -> bool {
    let Some(scratch) = F::scratch() else { return false };
    set!(scratch.other = parsed.tuple.reversed());
    let reply = FlowTable::<F>::new().find(borrow(place!(const scratch.other)));
    !reply.is_null() && get!(reply.state) & BY_TC == 0 && comes_by_xdp(packet.ingress())
}

/// Whether an XDP program sees the packets of a device. True for an unknown device.
#[inline(always)]
fn comes_by_xdp(ifindex: u32) -> bool {
    let device = Table::of(&raw const DEVICES).lookup::<u32, DeviceInfo>(&ifindex);
    device.is_none_or(|device| get!(device.flags) & DEVICE_XDP != 0)
}

/// Marks the flow to the endpoint, if a flow that was just inserted meets another. Both insert
/// their entries before they look, so if two begin at once, at least one sees the other.
#[inline(always)]
pub fn tell_apart<F: Family>(scratch: *mut Scratch<F::Address>) {
    let (opening, key) = (borrow(place!(const scratch.opening)), borrow(place!(const scratch.key)));
    let (other, room) = (place!(mut scratch.other), place!(mut scratch.flow_key));
    if key.source == opening.destination
        && key.destination == opening.source
        && key.ports == opening.ports.reversed()
    {
        // The endpoint is its own frontend: nothing is translated.
        return;
    }
    let table = FlowTable::<F>::new();
    if get!(scratch.reply.kind) == kind::REPLY_LOCAL
        && prefilter::may_be_service::<F>(key.source, key.ports.source())
    {
        store(other, key.reversed());
        if !table.find_in(borrow(other), room).is_null() {
            set!(scratch.request.state |= BY_TC);
            leave_to_tc(table.find_in(opening, room));
            leave_to_tc(table.find_in(key, room));
        }
    }
    if prefilter::is_local_endpoint::<F>(opening.destination, opening.ports.destination()) {
        store(other, opening.reversed());
        let reply = table.find_in(borrow(other), room);
        if !reply.is_null() && get!(reply.kind) == kind::REPLY_LOCAL {
            recycle::name_counterpart(reply, opening.protocol, other);
            leave_to_tc(reply);
            leave_to_tc(table.find_in(borrow(other), room));
        }
    }
}

/// Marks an entry; does nothing for null.
#[inline(always)]
fn leave_to_tc<A: Address>(entry: *mut Flow<A>) {
    if !entry.is_null() && get!(entry.kind) != 0 {
        set!(entry.state |= BY_TC);
    }
}
