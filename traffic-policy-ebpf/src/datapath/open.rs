//! The program that opens packets which other nodes have sent directly to endpoints of this one. It
//! runs in TC: the stack gets the packet in any case.
//!
//! ```text
//! outer: node → endpoint     inner: client → frontend
//! ```
//!
//! A packet is opened only if its outer source is an address of a node, and its outer destination
//! an endpoint of this node; every other one is left alone. So is a datagram to the port of packets
//! within UDP which the endpoint's pod is to get: one that another source port shows not to be a
//! node's, or that holds no packet for a Service with this endpoint. What was inside takes the path
//! of all packets, except that the endpoint is given: it is the one that the other node has chosen.
//! It is never handed to the stack as it is, which would send it back to that node.

use traffic_policy_ebpf::{
    abi::{
        Address, BY_POD, DirectEndpoint, DirectEndpointKey, Flow, GUE_PORT, NO_SERVICE, PROTOCOL_UDP, Port,
        Ports, REPLY_THROUGH_FRONT, SLOT_LOCAL, Scratch, Slot, Tuple, WayBack, hook, jump, kind, way,
    },
    outcome::{Outcome, Verdict},
    tcp::{ANSWERED, ASSURED, REMOVED, RST, TUNNELLED, flag, numbers},
};

use core::ptr;

use crate::datapath::{
    clock,
    ctx::{Packet, tc::Tc},
    family::{Family, V4, V6},
    flow::{datagrams, established, pair::counterpart_key, table::FlowTable, way_back},
    forward::{
        self, Forwarding, direct,
        outer::{self, FromNode, Outer},
    },
    lb::{
        owners,
        pod_stack::{self, Answer},
        select,
    },
    parse::{self, ETHERNET, Parsed, fixed},
    reject,
    value::{borrow, load},
    verdict::{self, Decision},
    words::load32,
};

/// The value of `Opened::pending` for a packet that may be sent on to a former owner.
const SENT_ON: u32 = 2;

/// The program.
#[inline(always)]
pub fn run<F: Outer>(packet: Tc) -> i32 {
    verdict::finish(packet, hook::INGRESS, incoming::<F>(packet))
}

#[inline(always)]
fn incoming<F: Outer>(packet: Tc) -> Decision {
    let from_node = match FromNode::<F>::read(packet) {
        Ok(from_node) => from_node,
        Err(outcome) => return outcome.into(),
    };
    let Some(scratch) = F::scratch() else { return Outcome::DroppedInternalError.into() };
    let FromNode { ip, end, destination, is_udp, .. } = from_node;
    if port_of::<F>(destination, NO_SERVICE).is_none() {
        packet.jump::<F, { jump::OPEN_REPLY }>();
        return from_node.left_alone().into();
    }
    set!(scratch.opened.endpoint.address = destination);
    if is_udp && !is_of_node::<F>(scratch, ip, end) {
        return from_node.left_alone().into();
    }
    let marked = F::is_marked(ip);
    let number = F::number(ip);
    let asked = owners::asked(number);
    let way = if number & REPLY_THROUGH_FRONT != 0 {
        WayBack::through(from_node.node, is_udp)
    } else {
        WayBack::TO_CLIENT
    };
    set!(scratch.opened.way_back = way.word() as u32);
    if !packet.remove_room(from_node.outer()) {
        return Outcome::DroppedInternalError.into();
    }
    let ip = packet.data() + ETHERNET;
    // Others continue in programs that do not conclude an opened packet.
    if ip + F::OUTER as usize > packet.end() || !F::is_inner(ip) {
        return Outcome::DroppedUnknownEndpoint.into();
    }
    if marked {
        F::mark(packet, ip);
    }
    set!(scratch.opened.pending = 1);
    let parsed = match F::parse_fixed(packet) {
        Ok(parsed) => parsed,
        Err(outcome) => {
            // An ICMP error is about a connection that another owner may have.
            if matches!(outcome, Outcome::PassedUnsupportedProtocol) && owners::may_be_asked(asked) {
                owners::note_opened(scratch, asked);
                set!(scratch.opened.pending = SENT_ON);
            }
            let decision = parse::hand_over::<Tc, F, false>(packet, outcome);
            let _ = direct::take_number(scratch);
            set!(scratch.opened.pending = 0);
            return ends_here(decision);
        }
    };
    let flags = parsed.tcp_flags();
    let now = clock::jiffies();
    let entry = FlowTable::<F>::new().find(&parsed.tuple);
    if !entry.is_null() {
        let (kind, entry_state) = (get!(entry.kind), get!(entry.state) & !TUNNELLED);
        if kind == kind::DELIVER
            && way_back::differs(entry, get!(scratch.opened.way_back))
            && (!parsed.is_tcp() || numbers::is_near(&parsed.segment(), get!(entry.numbers)))
            && counterpart_key::<F>(entry, parsed.tuple.protocol).is_some()
        {
            way_back::change::<F>(packet.ingress());
        }
        let assured = entry_state & !ANSWERED == ASSURED;
        if matches!(kind, kind::FORWARD | kind::DIRECT) {
            // A connection that this node sends on, or was in front of, goes on.
            if parsed.is_tcp()
                && !parsed.opens(packet)
                && (kind != kind::DIRECT || !owners::may_be_asked(asked))
            {
                set!(scratch.opened.pending = 0);
                return refuse(packet, scratch, &parsed, entry);
            }
        } else if kind == kind::DELIVER
            && (assured || !parsed.is_tcp() && datagrams::is_looked_at(entry, entry_state, now))
            && flags & (flag::SYN | flag::FIN | flag::RST) == 0
            && fixed::is_whole(packet, &parsed)
            && (!assured || established::advance(entry, &parsed, established::numbers_of(&parsed), now))
        {
            set!(scratch.opened.pending = 0);
            let forwarding = Forwarding { entry, hop: ptr::null(), unresolved: 0 };
            return forward::forward(packet, &parsed, &forwarding, now);
        }
    }
    if parsed.is_tcp() && !parsed.opens(packet) && owners::may_be_asked(asked) {
        owners::note_opened(scratch, asked);
        set!(scratch.opened.pending = SENT_ON);
    }
    packet.jump::<F, { jump::SLOW_PATH }>();
    let _ = direct::take_number(scratch);
    set!(scratch.opened.pending = 0);
    Outcome::DroppedInternalError.into()
}

/// Refuses an opened segment of a connection that goes through this node to another one. What all
/// owners were asked about is dropped. Where the endpoint knows the connection with this node's
/// address (SNAT), the node in front cannot go on with it, and the client is told, as about a
/// connection that nobody knows; but only if the numbers are those of the connection, which may be
/// alive: a segment that a stranger has made does not end it. (The client compares the RST's number
/// with its own, too: RFC 5961 section 3.)
#[inline(always)]
fn refuse<F: Outer>(
    packet: Tc,
    scratch: *mut Scratch<F::Address>,
    parsed: &Parsed<F>,
    entry: *const Flow<F::Address>,
) -> Decision {
    let outcome = if get!(entry.kind) == kind::DIRECT || !owners::goes_on(parsed) {
        Outcome::DroppedUnknownEndpoint
    } else if numbers::is_near(&parsed.segment(), get!(entry.numbers)) {
        Outcome::ResetNoFlow
    } else {
        Outcome::DroppedOutOfWindow
    };
    let decision = verdict::forget::<F>(Decision::refused(outcome, get!(entry.service)));
    set!(scratch.opened.routed = decision.is_answered() as u32);
    reject::if_refused::<Tc, F>(packet, parsed, decision)
}

/// Whether the datagram at `ip`, for the endpoint of `Scratch::opened`, holds a packet that another
/// node has sent for a Service with this endpoint. A packet without ports where they are expected
/// is judged by its length alone: an answer that is wrong drops it.
#[inline(always)]
fn is_of_node<F: Outer>(scratch: *mut Scratch<F::Address>, ip: usize, end: usize) -> bool {
    let l4 = ip + F::OUTER as usize;
    let inner = l4 + outer::UDP as usize;
    if inner + F::OUTER as usize > end || !F::is_inner(inner) || !outer::is_udp_header(l4, F::length(inner)) {
        return false;
    }
    let ports = inner + F::OUTER as usize;
    if !F::has_ports(inner) {
        return true;
    }
    if ports + 4 > end {
        return false;
    }
    let (source, destination) = F::addresses_at(inner);
    set!(scratch.opening.source = source);
    set!(scratch.opening.destination = destination);
    set!(scratch.opening.ports = Ports::from_wire(load32::<0>(ports)));
    set!(scratch.opening.protocol = F::protocol(inner) as u32);
    (if F::V6 { complete6() } else { complete4() }) != UNKNOWN
}

/// Ends the flow of an opened SYN, INIT or datagram that led through this node to another one: the
/// client has come by another node since. Other packets of it are dropped by [`conclude`].
#[inline(always)]
pub fn end_flow_through_here<P: Packet, F: Family>(
    packet: P,
    parsed: &Parsed<F>,
    entry: *mut Flow<F::Address>,
) {
    if matches!(get!(entry.kind), kind::FORWARD | kind::DIRECT)
        && (parsed.is_udp::<P>() || parsed.opens(packet))
    {
        set!(entry.state |= RST | REMOVED);
    }
}

/// Whether programs of a kind may see packets that were opened by [`run`], which jumps to them.
#[inline(always)]
const fn can_be_opened<P: Packet>() -> bool {
    P::TC && P::L2 != 0 && !P::POD
}

/// Whether a packet may be one within UDP that another node has sent.
#[inline(always)]
pub fn may_be_outer<P: Packet, A: Address>(tuple: &Tuple<A>) -> bool {
    !P::POD && tuple.ports.destination() == GUE_PORT && tuple.protocol == PROTOCOL_UDP
}

/// Whether the packet that this program sees was opened.
#[inline(always)]
pub fn was_opened<P: Packet, F: Family>() -> bool {
    can_be_opened::<P>() && F::scratch().is_some_and(|scratch| get!(scratch.opened.pending) != 0)
}

/// Whether the packet that this program sees was opened, and may be sent on to a former owner.
#[inline(always)]
pub fn may_be_sent_on<P: Packet, F: Family>() -> bool {
    can_be_opened::<P>() && F::scratch().is_some_and(|scratch| get!(scratch.opened.pending) == SENT_ON)
}

/// Concludes the program with a decision on a packet that may have been opened: such a packet is
/// neither handed to the stack untranslated nor sent to another node.
#[inline(always)]
pub fn conclude<P: Packet, F: Family>(decision: Decision) -> Decision {
    if P::L2 == 0 || P::POD {
        return decision;
    }
    let Some(scratch) = F::scratch() else { return decision };
    // It concerns no other packet, if this one was not sent directly.
    let _ = direct::take_number(scratch);
    if !can_be_opened::<P>() {
        return decision;
    }
    let pending = get!(scratch.opened.pending);
    if pending == 0 {
        return decision;
    }
    set!(scratch.opened.pending = 0);
    if pending == SENT_ON && matches!(decision.outcome, Outcome::ForwardedDirect) {
        return Decision { outcome: Outcome::ForwardedToOwner, ..decision };
    }
    if pending == SENT_ON && matches!(decision.outcome, Outcome::ForwardedIcmpError) {
        return decision;
    }
    set!(scratch.opened.routed = decision.is_answered() as u32);
    ends_here(decision)
}

/// Whether replies of the flow `entry`, which this packet belongs to, go by another way from now
/// on, `Opened::way_back`: the client has sent it to this node itself, and the flow is a
/// [tunnelled][TUNNELLED] one; or it was opened, and [`run`] has not seen that its numbers are the
/// connection's: a retransmission may be a whole window behind them.
#[inline(always)]
pub fn changes_way<P: Packet, F: Family>(entry: *const Flow<F::Address>) -> bool {
    if !can_be_opened::<P>() || get!(entry.kind) != kind::DELIVER {
        return false;
    }
    let Some(scratch) = F::scratch() else { return false };
    if get!(scratch.opened.pending) != 0 {
        return way_back::differs(entry, get!(scratch.opened.way_back));
    }
    if get!(entry.state) & TUNNELLED == 0 {
        return false;
    }
    set!(scratch.opened.way_back = 0);
    true
}

/// Returns the decision on an opened packet: it is delivered, answered or dropped.
#[inline(always)]
fn ends_here(decision: Decision) -> Decision {
    let drops = matches!(decision.outcome.verdict(), Verdict::Drop);
    let delivered = matches!(decision.outcome, Outcome::Delivered | Outcome::DeliveredIcmpError);
    if drops || delivered || decision.is_answered() {
        return decision;
    }
    Outcome::DroppedUnknownEndpoint.into()
}

/// Returns the given endpoint of an opened packet, and `slot` for every other one. Where a packet
/// can be opened, both lie in scratch memory: the verifier walks what follows once.
#[inline(always)]
pub fn given_or<'a, P: Packet, F: Family>(
    scratch: *mut Scratch<F::Address>,
    slot: *const Slot<F::Address>,
) -> &'a Slot<F::Address> {
    if !can_be_opened::<P>() {
        return borrow(slot);
    }
    if get!(scratch.opened.pending) == 0 {
        set!(scratch.opened.endpoint = load(slot));
    }
    borrow(place!(const scratch.opened.endpoint))
}

/// Completes the given endpoint in scratch memory, for an opened packet without a flow whose tuple
/// is `Scratch::opening`; instead of it the former owner of a connection that this node does not
/// know, to which the packet is to be sent on (`Scratch::direct`), or delivered. Returns the
/// Service port's index and the slot.
///
/// # Errors
/// The client's address is martian, this node does not have the endpoint for the Service, or nobody
/// knows the connection.
#[inline(always)]
pub fn given<P: Packet, F: Family>(
    packet: P,
    parsed: &Parsed<F>,
    scratch: *mut Scratch<F::Address>,
) -> Result<(u32, u32), Decision> {
    set!(scratch.direct = 0);
    let found = if F::V6 { complete6() } else { complete4() };
    let service = get!(scratch.opened.service);
    if found != KNOWN {
        return Err(Decision::refused(Outcome::DroppedUnknownEndpoint, service));
    }
    if select::is_martian::<P, F>(packet) {
        return Err(Decision::refused(Outcome::DroppedMartianSource, service));
    }
    if !parsed.is_udp::<P>() && !parsed.opens(packet) {
        // Connections alone are looked for and reset: what belongs to no association is dropped.
        if !owners::goes_on(parsed) {
            return Err(Decision::refused(Outcome::DroppedUnknownEndpoint, service));
        }
        pod_stack::note_segment(scratch, parsed);
        set!(scratch.owners.service = service);
        let address = get!(scratch.opened.endpoint.address);
        match pod_stack::ask::<P, F>(packet.raw().cast(), scratch, address) {
            Answer::Known => return Ok((service, 0)),
            Answer::OutOfWindow => return Err(Decision::refused(Outcome::DroppedOutOfWindow, service)),
            Answer::Unknown | Answer::ByTc => {}
        }
        let index = if get!(scratch.opened.pending) == SENT_ON {
            owners::of_segment::<P, F>(packet, scratch, owners::NONE)
        } else {
            owners::NONE
        };
        if index == owners::OUT_OF_WINDOW {
            return Err(Decision::refused(Outcome::DroppedOutOfWindow, service));
        }
        let Some(owner) = F::slots().lookup::<u32, Slot<F::Address>>(&index) else {
            return Err(Decision::refused(Outcome::ResetNoFlow, service));
        };
        set!(scratch.opened.endpoint = load(owner));
        if get!(scratch.owners.known) == BY_POD {
            return Ok((service, index));
        }
        // Replies come back to this node, if they are to go back to the one that has sent it.
        let tunnel = (get!(scratch.opened.way_back) != 0) as u64 * way::TUNNEL;
        set!(scratch.direct = way::DIRECT | way::UDP | way::OWNER | way::GOES_ON | tunnel);
        return Ok((service, index));
    }
    Ok((service, 0))
}

/// The results of [`complete`]. `BY_FLOW_ALONE`: there is no frontend any more, but an open flow of
/// one to the endpoint.
const KNOWN: i32 = 0;
const UNKNOWN: i32 = 1;
const BY_FLOW_ALONE: i32 = 2;

global_functions! {
    complete4 => complete::<V4>;
    complete6 => complete::<V6>;
}

/// Completes `Scratch::opened` with the Service port and the endpoint's own port.
#[inline(always)]
fn complete<F: Family>() -> i32 {
    let Some(scratch) = F::scratch() else { return UNKNOWN };
    set!(scratch.opened.service = NO_SERVICE);
    let slot = place!(mut scratch.opened.endpoint);
    let found = owners::frontend::<F>(borrow(place!(const scratch.opening)));
    if found.is_null() {
        let flow = FlowTable::<F>::new().find(borrow(place!(const scratch.opening)));
        let is_open = !flow.is_null()
            && get!(flow.kind) == kind::DELIVER
            && get!(flow.destination) == get!(slot.address);
        return if is_open { BY_FLOW_ALONE } else { UNKNOWN };
    }
    let service = get!(found.service);
    set!(scratch.opened.service = service);
    let Some(port) = port_of::<F>(get!(slot.address), service) else {
        return UNKNOWN;
    };
    set!(slot.port = port);
    set!(slot.flags = SLOT_LOCAL);
    set!(slot.node = 0);
    KNOWN
}

/// Returns the port of an endpoint of this node.
#[inline(always)]
fn port_of<F: Family>(address: F::Address, service: u32) -> Option<Port> {
    let key = DirectEndpointKey { address, service, zero: 0 };
    let found = F::direct_endpoints().lookup::<_, DirectEndpoint>(&key)?;
    Some(get!(found.port))
}
