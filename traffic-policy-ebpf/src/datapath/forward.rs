//! The next hop of a flow's packets, their translation and sending as the flow specifies. After the
//! first write, a failure means drop.
//!
//! A whole packet is translated here, a later fragment and an ICMP error in files of their own.

pub mod client_hop;
pub mod device;
pub mod direct;
pub mod enclose;
pub mod fragment;
pub mod hairpin;
pub mod icmp;
pub mod local;
pub mod nexthop;
pub mod outer;
pub mod outer_error;
pub mod reply_way;
pub mod sctp;
pub mod through_front;

use core::ptr;

use traffic_policy_ebpf::{
    abi::{
        Address, Address4, Address6, DeviceInfo, Flow, HOP_NO_ETHERNET, HOP_POD, HOP_ROUTED, HOP_XDP, Hop,
        Prefilter, kind,
    },
    checksum::{self, TTL_STEP},
    outcome::Outcome,
    tcp::{BY_TC, TUNNELLED},
};

use crate::datapath::{
    ctx::{Packet, Skb as _},
    family::{Family, V4, V6},
    flow::table,
    forward::nexthop::Route,
    maps::{DEVICES, NEXTHOPS, PREFILTER, Table},
    parse::{self, Parse, Parsed, fixed},
    pod_client,
    value::load,
    verdict::Decision,
    words::{load16, load64, store8, store16, store32, store64},
};

/// The epoch and age that stored hops are compared with.
pub struct Current {
    /// The route epoch.
    pub route: u16,
    hop_epoch: u32,
    max_age: u32,
}

impl Current {
    #[inline(always)]
    pub fn load() -> Option<Self> {
        PREFILTER.get_ptr(0).map(Self::of)
    }

    #[inline(always)]
    pub fn of(filter: *const Prefilter) -> Self {
        let (route, hop_epoch, max_age) = (
            get!(filter.routes.route) as u16,
            get!(filter.routes.hop_epoch),
            get!(filter.routes.hop_max_age),
        );
        Self { route, hop_epoch, max_age }
    }

    /// Returns a stored hop, if it may be used without a FIB look-up.
    #[inline(always)]
    pub fn hop(&self, epoch: u16, hop: u16, now: u32) -> Option<*const Hop> {
        if epoch != self.route {
            return None;
        }
        let hop = NEXTHOPS.get_ptr(hop as u32)?;
        let (epoch, resolved) = (get!(hop.epoch), get!(hop.resolved));
        let fresh = epoch == self.hop_epoch && self.is_young(resolved, now);
        if fresh { Some(hop) } else { None }
    }

    /// Whether an answer that the FIB gave at `then` may still be used. Both times: low half of
    /// jiffies.
    #[inline(always)]
    pub fn is_young(&self, then: u32, now: u32) -> bool {
        now.wrapping_sub(then) < self.max_age
    }
}

/// A flow entry by which a packet can be forwarded, and its next hop.
pub struct Forwarding<A: Address> {
    pub entry: *mut Flow<A>,
    /// The next hop; null where the stack delivers the packet, and where the neighbour is not
    /// resolved.
    pub hop: *const Hop,
    /// The device towards a neighbour that is not resolved; TC lets the kernel resolve it. 0: none.
    /// A number, because an empty `Option` leaves a register that the verifier has never seen
    /// written.
    pub unresolved: u32,
}

/// Returns the next hop of an entry's packets, resolved anew if it is stale.
#[inline(always)]
pub fn resolve_egress<P: Packet, F: Family>(
    packet: P,
    entry: *mut Flow<F::Address>,
    now: u32,
) -> Result<Forwarding<F::Address>, Decision> {
    let kind = get!(entry.kind);
    let (index, epoch) = table::next_hop(entry);
    if kind == kind::DELIVER {
        if !P::TC && get!(entry.state) & (BY_TC | TUNNELLED) != 0 {
            return Err(Outcome::PassedToTc.into());
        }
        return Ok(Forwarding { entry, hop: ptr::null(), unresolved: 0 });
    }
    if let Some(hop) = Current::load().and_then(|current| current.hop(epoch, index, now)) {
        return Ok(Forwarding { entry, hop, unresolved: 0 });
    }
    if kind == kind::REPLY
        && let Some((hop, index, epoch)) =
            client_hop::find::<P, F>(packet, get!(entry.source), get!(entry.destination), now)
    {
        table::set_next_hop(entry, index, epoch);
        return Ok(Forwarding { entry, hop, unresolved: 0 });
    }
    let (source, destination) = (get!(entry.source), get!(entry.destination));
    let ingress = pod_client::routed_by(packet);
    match nexthop::resolve::<P, F>(packet, ingress, 0, source, destination, now) {
        Route::Via(via) if via.hop != 0 => {
            let Some(hop) = NEXTHOPS.get_ptr(via.hop as u32) else {
                return Err(Outcome::DroppedNoRoute.into());
            };
            if kind == kind::REPLY {
                client_hop::note::<P, F>(packet, source, destination, (via.hop, via.epoch), now);
            }
            table::set_next_hop(entry, via.hop, via.epoch);
            Ok(Forwarding { entry, hop, unresolved: 0 })
        }
        Route::Via(_) if !P::TC => Err(Outcome::PassedToTc.into()),
        Route::Via(via) => Ok(Forwarding { entry, hop: ptr::null(), unresolved: via.ifindex }),
        Route::Failed(Outcome::DroppedNoRoute) | Route::Local if kind == kind::REPLY => {
            reply_via_ingress_device::<F>(entry).map(|hop| Forwarding { entry, hop, unresolved: 0 })
        }
        Route::Failed(outcome) => Err(Decision::refused(outcome, get!(entry.service))),
        Route::Local => Err(Decision::refused(Outcome::DroppedNoRoute, get!(entry.service))),
    }
}

/// Builds the hop for a reply without a route to the client: back to where the request came from.
#[inline(always)]
fn reply_via_ingress_device<F: Family>(entry: *mut Flow<F::Address>) -> Result<*const Hop, Decision> {
    let (ifindex, head, tail) =
        (get!(entry.device_or_place).device(), get!(entry.head).mac(), get!(entry.tail).mac());
    let Some(device) = Table::of(&raw const DEVICES).lookup::<u32, DeviceInfo>(&ifindex) else {
        return Err(Outcome::DroppedNoRoute.into());
    };
    let Some(scratch) = F::scratch() else { return Err(Outcome::DroppedInternalError.into()) };
    let (own, spare) = (get!(device.mac), place!(mut scratch.ingress_device_hop));
    let macs = u64::from_ne_bytes([head[0], head[1], tail[0], tail[1], tail[2], tail[3], own[0], own[1]]);
    set!(spare.macs = macs);
    set!(spare.source_mac_tail = u32::from_ne_bytes([own[2], own[3], own[4], own[5]]));
    set!(spare.ifindex = ifindex);
    let mtu = get!(device.mtu);
    set!(spare.mtu = if mtu == 0 { 0xffff } else { mtu });
    set!(spare.flags = get!(device.flags));
    Ok(spare.cast_const())
}

/// A packet that a flow's entry translates: a whole packet, a later fragment, an ICMP error.
pub trait Translatable<P: Packet, F: Rewrite> {
    /// The outcome of a packet that was translated by an entry of this kind.
    fn outcome(kind: u8) -> Outcome;
    /// The outcome of a packet that was sent directly.
    #[inline(always)]
    fn outcome_of_direct() -> Outcome {
        Outcome::ForwardedDirect
    }
    /// The first byte of the IP header.
    fn ip(&self) -> usize;
    /// TTL or hop limit.
    fn ttl(&self) -> u8;
    /// The length in bytes of the longest IP packet that it becomes on the wire.
    fn wire_length(&self, packet: P) -> u32;
    /// Whether it is an aggregate of datagrams of UDP.
    #[inline(always)]
    fn is_datagrams(&self, _: P) -> bool {
        false
    }
    /// Whether it is an IPv6 aggregate of more than 65,535 bytes that says so in a header of its
    /// own.
    #[inline(always)]
    fn is_jumbo(&self) -> bool {
        false
    }
    /// The outcome if its TTL expires here.
    fn ttl_exceeded(&self) -> Outcome;
    /// The outcome if only `mtu` bytes fit the route.
    fn mtu_exceeded(&self, mtu: u32) -> Decision;
    /// The same for a reply that goes back through the node in front. An endpoint whose packets may
    /// be fragmented is told, too: it makes the next ones shorter, or cuts them itself.
    #[inline(always)]
    fn mtu_exceeded_to_front(&self, mtu: u32) -> Decision {
        self.mtu_exceeded(mtu)
    }
    /// Counts the packet in the entry.
    fn account(&self, entry: *mut Flow<F::Address>, now: u32);
    /// Rewrites the packet, decrementing the TTL if `step`. False: the kernel refused, and the
    /// packet is corrupted.
    #[must_use]
    fn translate(&self, packet: P, entry: *const Flow<F::Address>, step: bool) -> bool;
}

impl<P: Packet, F: Rewrite> Translatable<P, F> for Parsed<F> {
    #[inline(always)]
    fn outcome(kind: u8) -> Outcome {
        match kind {
            kind::FORWARD => Outcome::Forwarded,
            kind::DELIVER => Outcome::Delivered,
            kind::REPLY_LOCAL => Outcome::RepliedLocal,
            _ => Outcome::Replied,
        }
    }
    #[inline(always)]
    fn ip(&self) -> usize {
        self.ip
    }
    #[inline(always)]
    fn ttl(&self) -> u8 {
        self.ttl
    }
    #[inline(always)]
    fn wire_length(&self, packet: P) -> u32 {
        Parsed::wire_length(self, packet)
    }
    #[inline(always)]
    fn is_datagrams(&self, packet: P) -> bool {
        P::TC && self.is_udp::<P>() && packet.segment() != 0
    }
    #[inline(always)]
    fn is_jumbo(&self) -> bool {
        P::TC && self.jumbo() != 0
    }
    #[inline(always)]
    fn ttl_exceeded(&self) -> Outcome {
        Outcome::RejectedTtlExceeded
    }
    #[inline(always)]
    fn mtu_exceeded(&self, mtu: u32) -> Decision {
        if !F::V6 && !unfragmentable(self) {
            return Decision { mtu, ..Outcome::DroppedMtuExceeded.into() };
        }
        Decision { mtu, ..Outcome::RejectedMtuExceeded.into() }
    }
    #[inline(always)]
    fn mtu_exceeded_to_front(&self, mtu: u32) -> Decision {
        Decision { mtu, ..Outcome::RejectedMtuExceeded.into() }
    }
    #[inline(always)]
    fn account(&self, entry: *mut Flow<F::Address>, now: u32) {
        account::<F>(entry, self.length, now);
    }
    #[inline(always)]
    fn translate(&self, packet: P, entry: *const Flow<F::Address>, step: bool) -> bool {
        translate(packet, self, entry, step)
    }
}

/// Whether the DF bit of IPv4 is set.
#[inline(always)]
fn unfragmentable<F: Rewrite>(parsed: &Parsed<F>) -> bool {
    load64::<0>(parsed.ip).to_ne_bytes()[6] & 0x40 != 0
}

/// Counts a packet of `length` bytes in its entry.
#[inline(always)]
pub fn account<F: Rewrite>(entry: *mut Flow<F::Address>, length: u32, now: u32) {
    set!(entry.packets = get!(entry.packets).and_one());
    set!(entry.bytes += length as u64);
    if get!(entry.last) != now {
        set!(entry.last = now);
    }
}

/// Sends a packet as its entry says: directly, or translated.
#[inline(always)]
pub fn send<P: Packet, F: outer::Outer, C: Translatable<P, F>>(
    packet: P,
    translatable: &C,
    forwarding: &Forwarding<F::Address>,
    now: u32,
) -> Decision {
    if direct::is_direct::<P, F>(forwarding.entry) {
        direct::forward(packet, translatable, forwarding, now)
    } else {
        forward(packet, translatable, forwarding, now)
    }
}

/// Translates and sends a packet. All checks precede the first write.
#[inline(always)]
pub fn forward<P: Packet, F: Rewrite, C: Translatable<P, F>>(
    packet: P,
    translatable: &C,
    forwarding: &Forwarding<F::Address>,
    now: u32,
) -> Decision {
    let entry = forwarding.entry;
    let kind = get!(entry.kind);
    let outcome = C::outcome(kind);
    if kind == kind::DELIVER && (!P::TC || forwarding.hop.is_null()) {
        translatable.account(entry, now);
        if !translatable.translate(packet, entry, false) {
            return Outcome::DroppedInternalError.into();
        }
        return outcome.into();
    }
    if translatable.ttl() <= 1 {
        return translatable.ttl_exceeded().into();
    }
    if let Some(skb) = packet.skb()
        && forwarding.unresolved != 0
    {
        let Some(scratch) = F::scratch() else { return Outcome::DroppedInternalError.into() };
        let (mtu, flags) = device::unresolved::<F>(forwarding.unresolved, scratch);
        if translatable.wire_length(packet) > mtu {
            return translatable.mtu_exceeded(mtu);
        }
        translatable.account(entry, now);
        if !translatable.translate(packet, entry, true) {
            return Outcome::DroppedInternalError.into();
        }
        let ifindex = forwarding.unresolved;
        if flags & HOP_NO_ETHERNET != 0 {
            return Decision::sent(outcome, skb.send_routed(ifindex));
        }
        return Decision::sent(outcome, skb.send_to(ifindex, place!(mut scratch.neighbour)));
    }
    let hop = forwarding.hop;
    if hop.is_null() {
        return Outcome::DroppedNoRoute.into();
    }
    let (mtu, ifindex, flags) = (get!(hop.mtu), get!(hop.ifindex), get!(hop.flags));
    if translatable.wire_length(packet) > mtu {
        if !P::TC {
            return Outcome::PassedToTc.into();
        }
        return translatable.mtu_exceeded(mtu);
    }
    if !P::TC && ifindex != packet.ingress() && flags & HOP_XDP == 0 {
        return Outcome::PassedToTc.into();
    }
    translatable.account(entry, now);
    macs(translatable.ip() - parse::ETHERNET, hop);
    if !translatable.translate(packet, entry, true) {
        return Outcome::DroppedInternalError.into();
    }
    if let Some(skb) = packet.skb()
        && flags & (HOP_ROUTED | HOP_POD) != 0
    {
        if flags & HOP_POD != 0 {
            return Decision::sent(Outcome::DeliveredDirect, skb.send_peer(ifindex));
        }
        return Decision::sent(outcome, skb.send_routed(ifindex));
    }
    Decision::sent(outcome, packet.send(ifindex))
}

/// Whether XDP leaves this frame to TC: it lies in several buffers, and its next hop is behind
/// another device. Not every driver transmits such frames from another device
/// (NETDEV_XDP_ACT_NDO_XMIT_SG).
#[inline(always)]
pub fn is_too_scattered<P: Packet, F: Rewrite>(
    packet: P,
    parsed: &Parsed<F>,
    forwarding: &Forwarding<F::Address>,
) -> bool {
    let hop = forwarding.hop;
    !P::TC
        && !fixed::in_first_buffer(packet, parsed.length)
        && !hop.is_null()
        && get!(hop.ifindex) != packet.ingress()
}

/// A family whose headers can be rewritten.
pub trait Rewrite: Parse {
    /// Writes the addresses, decrements the TTL if `step`, and updates the IP header's own
    /// checksum.
    fn addresses(parsed: &Parsed<Self>, flow: *const Flow<Self::Address>, step: bool);
}

impl Rewrite for V4 {
    #[inline(always)]
    fn addresses(parsed: &Parsed<Self>, flow: *const Flow<Address4>, step: bool) {
        let delta = get!(flow.address_delta);
        // Both addresses at once: the entry holds them in the order of the header.
        store64::<12>(parsed.ip, load(flow.cast::<u64>()));
        let delta = if step {
            store8::<8>(parsed.ip, parsed.ttl - 1);
            checksum::add(delta, TTL_STEP)
        } else {
            delta
        };
        store16::<10>(parsed.ip, checksum::update(load16::<10>(parsed.ip), delta));
    }
}

impl Rewrite for V6 {
    #[inline(always)]
    fn addresses(parsed: &Parsed<Self>, flow: *const Flow<Address6>, step: bool) {
        let (source, destination) = (get!(flow.source).wire(), get!(flow.destination).wire());
        store64::<8>(parsed.ip, source[0]);
        store64::<16>(parsed.ip, source[1]);
        store64::<24>(parsed.ip, destination[0]);
        store64::<32>(parsed.ip, destination[1]);
        if step {
            store8::<7>(parsed.ip, parsed.ttl - 1);
        }
    }
}

/// Writes the frame's MAC addresses.
#[inline(always)]
pub fn macs(data: usize, hop: *const Hop) {
    store64::<0>(data, get!(hop.macs));
    store32::<8>(data, get!(hop.source_mac_tail));
}

/// Translates addresses, ports and checksums as `flow` specifies. False: the kernel refused, and
/// the packet is corrupted.
#[inline(always)]
#[must_use]
fn translate<P: Packet, F: Rewrite>(
    packet: P,
    parsed: &Parsed<F>,
    flow: *const Flow<F::Address>,
    step: bool,
) -> bool {
    let (address_delta, port_delta) = (get!(flow.address_delta), get!(flow.port_delta));
    F::addresses(parsed, flow, step);
    if parsed.is_sctp::<P>() {
        return sctp::translate(packet, parsed, flow);
    }
    store32::<0>(parsed.l4, get!(flow.ports).wire());
    if let Some(skb) = packet.skb() {
        let offset = P::L2 as u32 + parsed.l4_offset + if parsed.is_tcp() { 16 } else { 6 };
        return skb.fix_checksum(offset, address_delta, port_delta, !parsed.is_tcp(), F::V6);
    }
    let delta = checksum::add(address_delta, port_delta);
    if parsed.is_tcp() {
        store16::<16>(parsed.l4, checksum::update(load16::<16>(parsed.l4), delta));
    } else {
        store16::<6>(parsed.l4, checksum::update_udp(load16::<6>(parsed.l4), delta));
    }
    true
}
