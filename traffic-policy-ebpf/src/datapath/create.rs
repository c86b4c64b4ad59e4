//! A new flow: from a frontend to a pair of halves in the table.

use core::ptr;

use traffic_policy_ebpf::{
    abi::{
        Address, Flow, HOP_LOCAL, SLOT_LOCAL, Slot, SlotRoute, Tuple, destination_port, frontend, scope,
        source_port, step,
    },
    hash,
    outcome::Outcome,
    tcp::flag,
};

use crate::datapath::{
    barrier::fetch_add,
    choose::{self, Client, List, Target},
    ctx::Packet,
    family::Family,
    flow::{
        snat_port::Halves,
        state,
        table::{self, FlowTable},
    },
    hop::{self, Route, Via},
    maps::{ANY, EXISTS, NOEXIST, STATE, USAGE},
    parse::Parsed,
    trace,
    verdict::Exit,
};

/// A flow that exists now.
pub struct Created<A: Address> {
    pub request: *mut Flow<A>,
    /// Not 0: the device to leave by; the FIB was asked, and its neighbour is not resolved.
    pub unresolved: u32,
}

/// What a packet is addressed to.
#[inline(always)]
pub fn target<F: Family>(tuple: &Tuple<F::Address>) -> Target<F::Address> {
    Target {
        address: tuple.destination,
        port: destination_port(tuple.ports),
        protocol: tuple.protocol as u16,
        scope: scope::ADDRESS,
    }
}

/// Endpoints for a packet that may start a flow: a list that is not empty.
#[inline(always)]
fn list<P: Packet, F: Family>(
    packet: P,
    parsed: &Parsed<F>,
    client: &Client<F::Address>,
) -> Result<List, Exit> {
    let list = match choose::list::<F>(&target::<F>(&parsed.tuple), client) {
        Err(refusal) if refusal.outcome as u32 == Outcome::PassedNotService as u32 => {
            return Err(Outcome::PassedNotService.into());
        }
        _ if !packet.for_us() => return Err(Outcome::PassedOtherHost.into()),
        // As kube-proxy, which refuses what conntrack calls new. Else anybody's stray segments would use up the answers
        // that this node may make.
        Err(refusal)
            if refusal.outcome as u32 == Outcome::RejectedUnknownPort as u32
                && parsed.is_tcp()
                && !parsed.opens() =>
        {
            return Err(Outcome::PassedNoFlow.into());
        }
        Err(refusal) => return Err(Exit::refused(refusal.outcome, refusal.service)),
        Ok(list) => list,
    };
    if parsed.is_tcp() && !parsed.opens() {
        // Nothing is known of this connection. What is the node's own stays the stack's business: it answers RST, or
        // goes on with a connection that an earlier proxy left in conntrack.
        let flags = unsafe { (*list.frontend).flags };
        let segment = parsed.tcp_flags();
        if flags & frontend::NODE_ADDRESS != 0 || segment & flag::RST != 0 || segment & flag::ACK == 0 {
            return Err(Outcome::PassedNoFlow.into());
        }
        return Err(Exit::refused(Outcome::ResetNoFlow, list.service));
    }
    if list.range.len == 0 {
        return Err(Exit::refused(Outcome::RejectedNoEndpoint, list.service));
    }
    Ok(list)
}

/// Whether XDP has delivered this packet: then its tuple is that of a reply, reversed.
#[inline(always)]
fn delivered<F: Family>(parsed: &Parsed<F>) -> bool {
    let Some(scratch) = F::scratch() else { return false };
    let key = unsafe { &mut (*scratch).other };
    *key = parsed.tuple.reversed();
    !FlowTable::<F>::main().find(key).is_null()
        || table::pending_in_use() && !FlowTable::<F>::pending().find(key).is_null()
}

/// How this slot's endpoint is reached: from the slot's last answer while that is fresh, else from the FIB.
#[inline(always)]
fn route<P: Packet, F: Family>(
    packet: P,
    index: u32,
    slot: &Slot<F::Address>,
    now: u32,
) -> Route<F::Address> {
    if slot.flags & SLOT_LOCAL != 0 {
        return Route::Local;
    }
    let stored = F::slot_routes().lookup::<u32, SlotRoute<F::Address>>(&index);
    let epoch = hop::epoch();
    if let Some(stored) = stored {
        // Each word once: another CPU may be writing.
        let stored = unsafe {
            SlotRoute {
                source: ptr::read_volatile(&raw const (*stored).source),
                word: ptr::read_volatile(&raw const (*stored).word),
                check: ptr::read_volatile(&raw const (*stored).check),
            }
        };
        if let Some((under, hop)) = stored.route()
            && under == epoch
        {
            if hop == HOP_LOCAL {
                return Route::Local;
            }
            if hop::fresh(epoch, hop, now).is_some() {
                return Route::Via(Via { hop, epoch, ifindex: 0, attached: true, source: stored.source });
            }
        }
    }
    let via =
        match hop::resolve::<F>(packet.raw(), packet.ingress(), F::Address::default(), slot.address, now) {
            // The FIB says the same of the node's own addresses and of a destination without a route; slots of the former are
            // marked.
            Route::Local => return Route::Failed(Outcome::DroppedNoRoute),
            Route::Failed(outcome) => return Route::Failed(outcome),
            Route::Via(via) => via,
        };
    if let Some(stored) = stored {
        let (hop, source) =
            if via.attached { (via.hop, via.source) } else { (HOP_LOCAL, F::Address::default()) };
        if hop != 0 {
            unsafe { *stored = SlotRoute::new(source, epoch, hop) };
        }
    }
    // Behind a device to which no program is attached is a pod.
    if via.attached { Route::Via(via) } else { Route::Local }
}

/// Makes the flow of a packet that has none. `restart`: a half of the main table to be written over, or null.
#[inline(always)]
pub fn create<P: Packet, F: Family>(
    packet: P,
    parsed: &Parsed<F>,
    restart: *mut Flow<F::Address>,
    now: u32,
) -> Result<Created<F::Address>, Exit> {
    if P::TC && restart.is_null() && delivered(parsed) {
        return Err(Outcome::PassedDelivered.into());
    }
    let (Some(state), Some(usage), Some(scratch)) = (STATE.get_ptr(0), USAGE.get_ptr_mut(0), F::scratch())
    else {
        return Err(Outcome::DroppedInternalError.into());
    };
    let hash = hash::tuple(&parsed.tuple, unsafe { (*state).seed });
    let client = Client { source: parsed.tuple.source, netns: 0, hash };
    let list = list(packet, parsed, &client)?;
    let index = choose::slot::<F>(&list, &client, unsafe { &raw mut (*scratch).search });
    let Some(slot) = F::slots().lookup::<u32, Slot<F::Address>>(&index) else {
        return Err(Outcome::DroppedInternalError.into());
    };
    // Its range rests before it is written again, so it does not change under our hands.
    let slot = unsafe { &*slot.cast_const() };

    let route = route::<P, F>(packet, index, slot, now);
    let (local, source, hop, epoch, unresolved) = match route {
        Route::Failed(outcome) => {
            trace::note(step::ROUTE, 3, [0; 2]);
            return Err(Exit::refused(outcome, list.service));
        }
        Route::Local => (true, parsed.tuple.source, 0, 0, 0),
        Route::Via(via) if via.hop != 0 => (false, via.source, via.hop, via.epoch, 0),
        Route::Via(via) => {
            if !P::TC {
                return Err(Outcome::PassedToTc.into());
            }
            (false, via.source, 0, 0, via.ifindex)
        }
    };
    trace::note(step::ROUTE, if local { 0 } else { 1 + (hop == 0) as u32 }, source.wide());
    if !local && parsed.ttl <= 1 {
        return Err(Exit::refused(Outcome::RejectedTtlExceeded, list.service));
    }

    let pending = restart.is_null()
        // Signed: it may be a few below zero, until the sweep sets it right.
        && unsafe { (*usage).unconfirmed[F::INDEX] as i64 >= (*state).unconfirmed_limit[F::INDEX] as i64 };
    let halves = Halves { scratch, packet, parsed, slot, source, service: list.service, now, local, pending };
    halves
        .claim(hash, usage, unsafe { (*state).pool_len })
        .map_err(|exit| Exit::refused(exit.outcome, list.service))?;
    trace::note(step::PORT, u16::from_be(source_port(unsafe { (*scratch).claim.ports })) as u32, [0; 2]);
    let key = unsafe { &(*scratch).key };
    let request = halves.request(unsafe { (*scratch).claim.ports }, hop, epoch);

    if !restart.is_null() {
        unsafe { state::begin_anew::<F>(restart, request, parsed.tuple.protocol, key, usage) };
        return Ok(Created { request: restart, unresolved });
    }
    let flags = if pending { ANY } else { NOEXIST };
    match FlowTable::<F>::of(pending).insert(&parsed.tuple, request.cast_const(), flags) {
        0 if pending => {}
        0 => {
            unsafe { fetch_add(table::unconfirmed::<F>(usage), 1) };
        }
        failed => {
            // Another CPU was first, or the table is full. Our reply half is nobody else's, unless the winner made it
            // too: for an endpoint on this node both have the same.
            let winner = FlowTable::<F>::main().find(&parsed.tuple);
            let shared = !winner.is_null()
                && unsafe { (*winner).translated(parsed.tuple.protocol) }.reversed() == *key;
            if !shared {
                FlowTable::<F>::of(pending).remove(key);
            }
            if failed != EXISTS {
                return Err(Exit::refused(Outcome::DroppedTableFull, list.service));
            }
        }
    }
    // The entry as it lies in the table: ours, or that of the CPU that was first.
    let request = FlowTable::<F>::of(pending).find(&parsed.tuple);
    if request.is_null() {
        return Err(Exit::refused(Outcome::DroppedTableFull, list.service));
    }
    Ok(Created { request, unresolved })
}
