//! Packets from the wire, in XDP and in TC: requests to frontends, and replies of endpoints on other nodes. Here is what they
//! all share, and what makes a flow; [`crate::datapath::established`] is what most of them need.

use core::ptr;

use traffic_policy_ebpf::{
    abi::{Address, Device, Flow, HOP_XDP, Hop, destination_port, jump, kind},
    outcome::{Outcome, Verdict},
};

use crate::datapath::{
    carried::Carried,
    clock, create,
    ctx::Packet,
    events::{self, Notice},
    flow::{
        state::{self, Tracked},
        table,
    },
    hop::{self, Route},
    maps::{DEVICES, HOPS, Table},
    parse::{self, Parsed},
    rewrite::{self, Rewrite},
    verdict::{self, Exit},
};

/// The program for everything that an established packet does not need: flows to be made, conversations that change
/// their state, hops to be resolved.
#[inline(always)]
pub fn attend<P: Packet, F: Rewrite>(packet: P) -> i32 {
    let exit = match F::headers(packet).and_then(|parsed| parse::finish(packet, &parsed).map(|()| parsed)) {
        Ok(parsed) => {
            let now = clock::jiffies();
            let exit = match prepare(packet, &parsed, now) {
                Ok(ready) => {
                    let exit = carry_out(packet, &parsed, &ready, now);
                    Exit { service: unsafe { (*ready.half).service }, ..exit }
                }
                Err(exit) => exit,
            };
            refused::<P, F>(packet, &parsed, exit)
        }
        Err(outcome) => outcome.into(),
    };
    verdict::leave(packet, P::HOOK, exit)
}

/// Hands a packet that is refused to the program that notes it, and answers the sender if it is to be told.
#[inline(always)]
pub fn refused<P: Packet, F: Rewrite>(packet: P, parsed: &Parsed<F>, exit: Exit) -> Exit {
    if matches!(exit.outcome.verdict(), Verdict::Drop) {
        let _ = answered::<P, F>(packet, parsed, exit);
        return exit;
    }
    if exit.answers() { answered::<P, F>(packet, parsed, exit) } else { exit }
}

/// Goes on with the program for what is refused; returns only if that is missing.
#[inline(always)]
pub fn answered<P: Packet, F: Rewrite>(packet: P, parsed: &Parsed<F>, exit: Exit) -> Exit {
    if let Some(scratch) = F::scratch() {
        unsafe {
            (*scratch).outcome = exit.outcome as u32;
            (*scratch).mtu = exit.mtu;
            (*scratch).service = exit.service;
            (*scratch).length = parsed.length;
            (*scratch).key = parsed.tuple;
        }
        packet.jump::<F, { jump::ANSWER }>();
    }
    Outcome::PassedMissedTailCall.into()
}

/// A half that can be carried out, and how.
pub struct Ready<A: Address> {
    pub half: *mut Flow<A>,
    /// Null for a half that the stack delivers, and where the neighbour is not resolved.
    pub hop: *const Hop,
    /// Not 0: out by this device, to a neighbour that is not resolved; TC lets the kernel do it. A number, for an empty
    /// `Option` leaves a register that the verifier has never seen written.
    pub unresolved: u32,
}

/// Finds or makes the half of a packet, notes what the packet says, and resolves the hop.
#[inline(always)]
pub fn prepare<P: Packet, F: Rewrite>(
    packet: P,
    parsed: &Parsed<F>,
    now: u32,
) -> Result<Ready<F::Address>, Exit> {
    let (half, pending) = table::find::<F>(&parsed.tuple);
    // Null pointers rather than `Option`s, as in `find`.
    let mut restart = ptr::null_mut();
    let mut kept = ptr::null_mut();
    if !half.is_null() {
        if unsafe { (*half).kind } == kind::REPLY_LOCAL {
            return Err(Outcome::PassedStaleFlow.into());
        }
        match state::track(parsed, half, pending) {
            Tracked::Keep(half) => kept = half,
            Tracked::Restart(half) => restart = half,
            Tracked::Forget => {}
            Tracked::Leave(outcome) => return Err(Exit::refused(outcome, unsafe { (*half).service })),
        }
    }
    let mut half = kept;
    if half.is_null() {
        let created = create::create(packet, parsed, restart, now)?;
        half = created.request;
        events::tell::<F>(|| new_flow(packet, parsed, half));
        if created.unresolved != 0 {
            return Ok(Ready { half, hop: ptr::null(), unresolved: created.unresolved });
        }
    }
    way_out::<P, F>(packet, half, now)
}

/// How the packets of a half leave.
#[inline(always)]
pub fn way_out<P: Packet, F: Rewrite>(
    packet: P,
    half: *mut Flow<F::Address>,
    now: u32,
) -> Result<Ready<F::Address>, Exit> {
    let kind = unsafe { (*half).kind };
    let (index, epoch) = unsafe { table::way(half) };
    if kind == kind::DELIVER {
        return Ok(Ready { half, hop: ptr::null(), unresolved: 0 });
    }
    if let Some(hop) = hop::fresh(epoch, index, now) {
        return Ok(Ready { half, hop, unresolved: 0 });
    }
    let (source, destination) = unsafe { ((*half).source, (*half).destination) };
    match hop::resolve::<F>(packet.raw(), packet.ingress(), source, destination, now) {
        Route::Via(via) if via.hop != 0 => {
            let Some(hop) = HOPS.get_ptr(via.hop as u32) else { return Err(Outcome::DroppedNoRoute.into()) };
            unsafe { table::set_way(half, via.hop, via.epoch) };
            Ok(Ready { half, hop, unresolved: 0 })
        }
        Route::Via(_) if !P::TC => Err(Outcome::PassedToTc.into()),
        Route::Via(via) => Ok(Ready { half, hop: ptr::null(), unresolved: via.ifindex }),
        Route::Failed(Outcome::DroppedNoRoute) | Route::Local if kind == kind::REPLY => {
            way_back::<F>(half).map(|hop| Ready { half, hop, unresolved: 0 })
        }
        Route::Failed(outcome) => Err(Exit::refused(outcome, unsafe { (*half).service })),
        Route::Local => Err(Exit::refused(Outcome::DroppedNoRoute, unsafe { (*half).service })),
    }
}

/// What is told of a flow that this packet has made.
#[inline(always)]
fn new_flow<P: Packet, F: Rewrite>(
    packet: P,
    parsed: &Parsed<F>,
    half: *const Flow<F::Address>,
) -> Notice<F::Address> {
    let (kind, service, address, ports) =
        unsafe { ((*half).kind, (*half).service, (*half).destination, (*half).ports) };
    Notice {
        hook: P::HOOK,
        outcome: if kind == kind::DELIVER { Outcome::Delivered } else { Outcome::Forwarded },
        service,
        ifindex: packet.ingress(),
        netns: 0,
        tuple: parsed.tuple,
        endpoint: (address, destination_port(ports)),
    }
}

/// Without a route to the client: back where the request came from.
#[inline(always)]
fn way_back<F: Rewrite>(half: *mut Flow<F::Address>) -> Result<*const Hop, Exit> {
    let (ifindex, mac) = unsafe { ((*half).ifindex, (*half).mac) };
    let Some(device) = Table::of(&raw const DEVICES).lookup::<u32, Device>(&ifindex) else {
        return Err(Outcome::DroppedNoRoute.into());
    };
    let Some(scratch) = F::scratch() else { return Err(Outcome::DroppedInternalError.into()) };
    let (own, spare) = unsafe { ((*device).mac, &mut (*scratch).way_back) };
    spare.macs = u64::from_ne_bytes([mac[0], mac[1], mac[2], mac[3], mac[4], mac[5], own[0], own[1]]);
    spare.source_mac_tail = u32::from_ne_bytes([own[2], own[3], own[4], own[5]]);
    spare.ifindex = ifindex;
    spare.mtu = 0xffff;
    spare.flags = unsafe { (*device).flags } & HOP_XDP;
    Ok(ptr::from_ref(spare))
}

/// Translates and sends. All checks precede the first write.
#[inline(always)]
pub fn carry_out<P: Packet, F: Rewrite, C: Carried<P, F>>(
    packet: P,
    carried: &C,
    ready: &Ready<F::Address>,
    now: u32,
) -> Exit {
    let half = ready.half;
    let kind = unsafe { (*half).kind };
    let outcome = C::outcome(kind);
    if kind == kind::DELIVER {
        carried.account(half, now);
        if !carried.translate(packet, half, false) {
            return Outcome::DroppedInternalError.into();
        }
        return outcome.into();
    }
    if carried.ttl() <= 1 {
        return carried.expired().into();
    }
    if P::TC && ready.unresolved != 0 {
        let device = Table::of(&raw const DEVICES).lookup::<u32, Device>(&ready.unresolved);
        let mtu = device.map_or(0, |device| unsafe { (*device).mtu });
        if mtu != 0 && carried.wire_length(packet) > mtu {
            return carried.too_long(mtu);
        }
        let Some(scratch) = F::scratch() else { return Outcome::DroppedInternalError.into() };
        carried.account(half, now);
        if !carried.translate(packet, half, true) {
            return Outcome::DroppedInternalError.into();
        }
        return Exit::sent(
            outcome,
            packet.send_to(ready.unresolved, unsafe { &raw mut (*scratch).neighbour }),
        );
    }
    let hop = ready.hop;
    if hop.is_null() {
        return Outcome::DroppedNoRoute.into();
    }
    let (mtu, ifindex, flags) = unsafe { ((*hop).mtu, (*hop).ifindex, (*hop).flags) };
    if carried.wire_length(packet) > mtu {
        if !P::TC {
            return Outcome::PassedToTc.into();
        }
        return carried.too_long(mtu);
    }
    if !P::TC && ifindex != packet.ingress() && flags & HOP_XDP == 0 {
        return Outcome::PassedToTc.into();
    }
    carried.account(half, now);
    unsafe { rewrite::macs(carried.ip() - parse::ETHERNET, hop) };
    if !carried.translate(packet, half, true) {
        return Outcome::DroppedInternalError.into();
    }
    Exit::sent(outcome, packet.send(ifindex))
}
