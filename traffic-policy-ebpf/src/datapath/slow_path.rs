//! The slow path: everything that an established packet does not need. The flow of a packet is
//! found and its state advanced, or it is created; then the packet is forwarded.

use traffic_policy_ebpf::{
    abi::{Address, BY_FLOW, Flow, RouteKind, Slot, frontend, kind, step, way},
    hash,
    outcome::Outcome,
};

use core::ptr;

use crate::datapath::{
    clock, counters,
    ctx::Packet,
    events::{self, NewEvent},
    family::Family,
    flow::{
        delivered, inserted,
        new_flow::{self, NewFlow},
        pair::{self, Transition},
        recycle, state,
        table::FlowTable,
        unassured, way_back,
    },
    forward::{
        self, Forwarding, Rewrite, direct, fragment, hairpin,
        nexthop::{self, Route},
        outer::Outer,
        sctp,
    },
    lb::{Client, List, Target, owners, select},
    maps::{CONFIG, TABLE_USAGE},
    node_silence, open, own,
    parse::{self, Parsed, fixed, variable::ParseVariable},
    pod_client, prefilter, reject, trace,
    value::borrow,
    verdict::{self, Decision},
};

/// The program for everything that an established packet does not need: new flows, conversations
/// that change their state, and hops to be resolved.
#[inline(always)]
pub fn run<P: Packet, F: ParseVariable + Outer>(packet: P) -> i32 {
    verdict::finish(packet, P::HOOK, incoming::<P, F>(packet))
}

#[inline(always)]
fn incoming<P: Packet, F: ParseVariable + Outer>(packet: P) -> Decision {
    let read = F::parse_again(packet)
        .and_then(|(parsed, fragmented)| fixed::finish(packet, &parsed).map(|()| (parsed, fragmented)));
    let (parsed, fragmented) = match read {
        Ok(read) => read,
        Err(outcome) => return open::conclude::<P, F>(verdict::forget::<F>(outcome.into())),
    };
    let now = clock::jiffies();
    let decision = match prepare(packet, &parsed, now) {
        Ok((forwarding, last)) => {
            if fragmented != 0 {
                if last != now {
                    fragment::ignore::<F>();
                }
                fragment::record(&parsed);
            }
            let decision = if forward::is_too_scattered(packet, &parsed, &forwarding) {
                Outcome::PassedToTc.into()
            } else {
                forward::send(packet, &parsed, &forwarding, last)
            };
            let decision = verdict::forget::<F>(decision);
            counters::settle::<F>(forwarding.entry);
            Decision { service: get!((forwarding.entry).service), ..decision }
        }
        Err(decision) => {
            let decision = verdict::forget::<F>(decision);
            // The next fragment may be here before the first reaches TC.
            if !P::TC && fragmented != 0 && matches!(decision.outcome, Outcome::PassedToTc) {
                fragment::record(&parsed);
            }
            decision
        }
    };
    // An endpoint's address may share the prefilter's bits with that of a Service.
    if matches!(decision.outcome, Outcome::PassedNotService)
        && open::may_be_outer::<P, _>(&parsed.tuple)
        && parsed.l4_offset == F::OUTER
        && fragmented == 0
        && !open::was_opened::<P, F>()
    {
        parse::to_open::<P, F>(packet);
    }
    reject::if_refused::<P, F>(packet, &parsed, open::conclude::<P, F>(decision))
}

/// Finds or creates the entry of a packet, updates its state, and resolves the hop. Also returns
/// the time to note for the flow's last packet: now, except for a packet that does not belong to
/// the flow. The caller must call [`counters::settle`] afterwards.
#[inline(always)]
pub fn prepare<P: Packet, F: Rewrite>(
    packet: P,
    parsed: &Parsed<F>,
    now: u32,
) -> Result<(Forwarding<F::Address>, u32), Decision> {
    let entry = FlowTable::<F>::new().find(&parsed.tuple);
    let known = if entry.is_null() { 0 } else { BY_FLOW };
    // Null pointers rather than `Option`s, as in `find`.
    let mut restart = ptr::null_mut();
    let mut kept = ptr::null_mut();
    let mut last = now;
    if !entry.is_null() {
        if get!(entry.kind) == kind::REPLY_LOCAL {
            return Err(Outcome::PassedStaleFlow.into());
        }
        if open::was_opened::<P, F>() {
            open::end_flow_through_here(packet, parsed, entry);
        }
        match state::track(packet, parsed, entry) {
            Transition::Keep(entry) => {
                kept = entry;
                if open::changes_way::<P, F>(entry) {
                    way_back::change::<F>(packet.ingress());
                }
            }
            Transition::Ignore(entry) => {
                kept = entry;
                last = get!(entry.last);
            }
            Transition::Restart(entry) => restart = entry,
            Transition::Forget => {}
            Transition::Leave(outcome) => {
                return Err(Decision::refused(outcome, get!(entry.service)));
            }
        }
    }
    let mut entry = kept;
    if entry.is_null() {
        let created = match create(packet, parsed, restart, known, now) {
            Ok(created) => created,
            Err(decision) => {
                if !restart.is_null() {
                    pair::unclaim::<F>(restart);
                }
                return Err(decision);
            }
        };
        entry = created.request;
        events::emit::<F>(|| new_flow(packet, parsed, entry));
        if created.unresolved != 0 {
            return Ok((Forwarding { entry, hop: ptr::null(), unresolved: created.unresolved }, last));
        }
    }
    match forward::resolve_egress::<P, F>(packet, entry, now) {
        Ok(forwarding) => Ok((forwarding, last)),
        Err(decision) => {
            counters::settle::<F>(entry);
            Err(decision)
        }
    }
}

/// Returns the event of a flow that this packet has created.
#[inline(always)]
fn new_flow<P: Packet, F: Rewrite>(
    packet: P,
    parsed: &Parsed<F>,
    entry: *const Flow<F::Address>,
) -> NewEvent<F::Address> {
    let (kind, service, address, ports) =
        (get!(entry.kind), get!(entry.service), get!(entry.destination), get!(entry.ports));
    NewEvent {
        hook: P::HOOK,
        outcome: match kind {
            kind::DELIVER => Outcome::Delivered,
            kind::DIRECT if open::may_be_sent_on::<P, F>() => Outcome::ForwardedToOwner,
            kind::DIRECT => Outcome::ForwardedDirect,
            _ => Outcome::Forwarded,
        },
        service,
        ifindex: packet.ingress(),
        netns: 0,
        tuple: parsed.tuple,
        endpoint: (address, ports.destination()),
    }
}

/// A flow that was created, or found after another CPU had created it.
struct Created<A: Address> {
    /// The entry, or a copy of it in `Scratch`: [`counters::settle`].
    pub request: *mut Flow<A>,
    /// The outgoing device if the FIB has been queried and its neighbour is not resolved, otherwise
    /// 0.
    pub unresolved: u32,
}

/// Returns the endpoints for a packet that may start a flow: a list that is not empty.
#[inline(always)]
pub fn list<P: Packet, F: Family>(
    packet: P,
    parsed: &Parsed<F>,
    client: &Client<F::Address>,
) -> Result<List, Decision> {
    let list = match select::list::<F>(&Target::of(&parsed.tuple), client) {
        Err(refusal) if refusal.outcome as u32 == Outcome::PassedNotService as u32 => {
            return Err(Outcome::PassedNotService.into());
        }
        _ if !pod_client::is_for_node(packet) => return Err(Outcome::PassedOtherHost.into()),
        _ if select::is_martian::<P, F>(packet) => {
            return Err(Outcome::DroppedMartianSource.into());
        }
        // The same as in kube-proxy, which refuses packets that conntrack calls new. Otherwise
        // stray segments from any host would use up this node's rate of answers.
        Err(refusal)
            if refusal.outcome as u32 == Outcome::RejectedUnknownPort as u32
                && !parsed.is_udp::<P>()
                && !parsed.opens(packet) =>
        {
            return Err(Outcome::PassedNoFlow.into());
        }
        Err(refusal) => return Err(Decision::refused(refusal.outcome, refusal.service)),
        Ok(list) => list,
    };
    if (P::POD && !parsed.is_udp::<P>() || get!((list.frontend).flags) & frontend::ADOPTING != 0)
        && !parsed.opens(packet)
    {
        // It may belong to a connection that the agent is about to read from conntrack, or that a
        // pod has begun before its packets were translated here.
        return Err(Outcome::PassedNoFlow.into());
    }
    if parsed.is_sctp::<P>() && !parsed.opens(packet) {
        // The association is not known. If the address is the node's own, the stack answers with an
        // ABORT (RFC 9260 section 8.4).
        return Err(Outcome::PassedNoFlow.into());
    }
    if parsed.is_tcp() && !parsed.opens(packet) {
        // The connection is not known. A segment to the node's own address is left to the stack: it
        // answers RST, or continues a connection that an earlier proxy left in conntrack.
        if !owners::goes_on(parsed) || !owners::are_known::<P, F>(&list) {
            return Err(owners::unknown(&list, parsed.tcp_flags()));
        }
    }
    if list.range.len == 0 {
        return Err(Decision::refused(Outcome::RejectedNoEndpoint, list.service));
    }
    Ok(list)
}

/// Creates the flow of a packet that has none. `restart`: an entry to overwrite, or null. `known`:
/// [`BY_FLOW`] if there is one that is not used.
#[inline(always)]
fn create<P: Packet, F: Family>(
    packet: P,
    parsed: &Parsed<F>,
    restart: *mut Flow<F::Address>,
    known: u32,
    now: u32,
) -> Result<Created<F::Address>, Decision> {
    if P::TC
        && !P::POD
        && restart.is_null()
        && !open::was_opened::<P, F>()
        && delivered::by_xdp(packet, parsed)
    {
        return Err(Outcome::PassedDelivered.into());
    }
    let (Some(config), Some(usage), Some(scratch)) =
        (CONFIG.get_ptr(0), TABLE_USAGE.get_ptr_mut(0), F::scratch())
    else {
        return Err(Outcome::DroppedInternalError.into());
    };
    set!(scratch.opening = parsed.tuple);
    set!(scratch.owners.known = known);
    let hash = hash::tuple(&parsed.tuple, get!(config.seed));
    let client = Client { source: parsed.tuple.source, netns: 0, of_pod: P::POD, hash };
    let (service, index);
    if open::was_opened::<P, F>() {
        (service, index) = open::given(packet, parsed, scratch)?;
    } else {
        set!(scratch.opened.way_back = 0);
        // This check comes before that of the source: a peer may answer from a port that is a
        // Service's, too.
        if !P::POD && own::is_answered_by::<P, F>(parsed, now) {
            return Err(Outcome::PassedOwnAnswer.into());
        }
        let list = list(packet, parsed, &client)?;
        // In scratch memory: the stack of the programs for IPv6 has no room for it.
        set!(scratch.direct = direct::wanted::<P, F>(&list));
        let chosen = if restart.is_null() || !node_silence::is_silent(get!(restart.head).node(), now) {
            select::slot_of_packet::<F>(&list, &client, place!(mut scratch.affinity_lookup))
        } else {
            set!(scratch.direct &= way::NAMED);
            select::slot_elsewhere::<F>(&list, &client, place!(mut scratch.affinity_lookup), now)
        };
        index = if parsed.is_tcp() && !parsed.opens(packet) {
            let owner = owners::in_front::<P, F>(packet, parsed, scratch, &list, chosen)?;
            let ways = get!(scratch.direct) & direct::to_owner(get!(scratch.owners.number));
            set!(scratch.direct = ways | way::GOES_ON);
            owner
        } else {
            chosen
        };
        service = list.service;
    }
    let Some(slot) = F::slots().lookup::<u32, Slot<F::Address>>(&index) else {
        return Err(Outcome::DroppedInternalError.into());
    };
    // The range of a slot is quarantined before it is rewritten, so it does not change while this
    // program runs.
    let slot = open::given_or::<P, F>(scratch, slot);

    let route = if P::POD {
        hairpin::to_endpoint::<P, F>(packet, slot, now)
    } else {
        nexthop::to_endpoint::<P, F>(packet, index, slot, now)
    };
    let (local, source, hop, epoch, unresolved) = match route {
        Route::Failed(outcome) => {
            trace::note(step::ROUTE, RouteKind::None as u32, [0; 2]);
            return Err(Decision::refused(outcome, service));
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
    let way = if local { RouteKind::Local as u32 } else { RouteKind::NextHop as u32 + (hop == 0) as u32 };
    trace::note(step::ROUTE, way, source.wide().wire());
    if !local && parsed.ttl <= 1 {
        return Err(Decision::refused(Outcome::RejectedTtlExceeded, service));
    }
    set!(scratch.direct = slot.taken(get!(scratch.direct)));
    if P::SCTP && slot.port != parsed.tuple.ports.destination() && sctp::needs_snat(scratch, hop, unresolved)
    {
        set!(scratch.direct = 0);
    }
    if !P::POD && get!(scratch.direct) != 0 && direct::is_refused_by_endpoint::<F>(scratch, slot.address) {
        set!(scratch.direct = 0);
    }
    // The bits are set before the entries exist.
    if local {
        prefilter::note_local_endpoint::<F>(slot.address, slot.port);
    } else {
        prefilter::note_source::<F>(source);
    }

    recycle::make_room::<F>(scratch, usage, now);
    let place = if restart.is_null() { new_flow::NEW } else { get!(restart.device_or_place).place() };
    let node = node_silence::place(slot.node, hop);
    let new_flow = NewFlow { packet, parsed, slot, source, service, hop, epoch, now, local, place, node };
    new_flow.write(scratch, hash, get!(config.snat_port_count));
    let mut inserted = new_flow::insert::<F>(scratch, usage);
    if matches!(inserted, Err(Outcome::DroppedTableFull)) {
        recycle::note_full(usage, now);
        if unassured::make_room::<F>(scratch) {
            inserted = new_flow::insert::<F>(scratch, usage);
        }
    }
    let inserted = inserted.map_err(|outcome| Decision::refused(outcome, service))?;
    inserted::conclude::<F>();
    let request = place!(mut scratch.request);
    if !restart.is_null() {
        let key = borrow(place!(const scratch.key));
        pair::reuse_entry::<F>(restart, request, &parsed.tuple, key);
        unassured::enter::<F>(scratch, &parsed.tuple);
        return Ok(Created { request: restart, unresolved });
    }
    if inserted {
        // This packet is forwarded by the copy, which saves the look-up of the entry.
        return Ok(Created { request, unresolved });
    }
    let request = FlowTable::<F>::new().find(&parsed.tuple);
    if request.is_null() {
        return Err(Decision::refused(Outcome::DroppedTableFull, service));
    }
    Ok(Created { request, unresolved })
}
