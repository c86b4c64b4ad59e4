//! The program that opens packets which other nodes have sent directly to endpoints of this one. It
//! runs in TC: the stack gets the packet in any case.
//!
//! ```text
//! outer: node → endpoint     inner: client → frontend
//! ```
//!
//! A packet is opened only if its outer source is an address of a node, and its outer destination
//! an endpoint of this node; every other one is left alone. What was inside takes the path of all
//! packets, except that the endpoint is given: it is the one that the other node has chosen. It is
//! never handed to the stack as it is, which would send it back to that node.

use aya_ebpf::bindings::__sk_buff;
use traffic_policy_ebpf::{
    abi::{
        Address4, DirectEndpoint, DirectEndpointKey, Frontend, NO_SERVICE, PROTOCOL_TCP, PROTOCOL_UDP, Port,
        SLOT_LOCAL, Scratch, Slot, Tuple, hook, jump, kind, scope,
    },
    checksum,
    outcome::{Outcome, Verdict},
    tcp::{ANSWERED, ASSURED, REMOVED, RST, flag},
};

use core::ptr;

use crate::datapath::{
    clock,
    ctx::{LINEAR, Packet, Skb as _, tc::Tc},
    family::{Family, V4},
    flow::{established, table::FlowTable},
    forward::{
        self, Forwarding,
        direct::{self, OUTER},
    },
    lb::{owners, select},
    maps::{DIRECT_ENDPOINTS4, DIRECT_FROM4, Table},
    parse::{self, ETHERNET, Parse, Parsed, fixed},
    value::{borrow, load},
    verdict::{self, Decision},
    words::{load8, load16, store8, store16},
};

/// Bits of the type of service: RFC 3168 section 5. Congestion experienced, and both bits.
const CE: u8 = 3;
const ECN: u8 = 3;
/// The bits for more fragments, or for an offset, memory order.
const FRAGMENT: u16 = 0x3fffu16.to_be();

/// The value of `Opened::pending` for a packet that may be sent on to a former owner.
const SENT_ON: u32 = 2;

/// The program.
#[inline(always)]
pub fn run(packet: Tc) -> i32 {
    verdict::finish(packet, hook::INGRESS, incoming(packet))
}

#[inline(always)]
fn incoming(packet: Tc) -> Decision {
    packet.pull(LINEAR + OUTER);
    let ip = packet.data() + ETHERNET;
    let inner = ip + OUTER as usize;
    if inner + 20 > packet.end() || load8::<0>(ip) != 0x45 || load16::<6>(ip) & FRAGMENT != 0 {
        return Outcome::PassedUnsupportedProtocol.into();
    }
    let (source, destination) = V4::addresses_at(ip);
    let Some(scratch) = V4::scratch() else { return Outcome::DroppedInternalError.into() };
    if Table::of(&raw const DIRECT_FROM4).lookup::<_, u32>(&source).is_none()
        || port_of(&DirectEndpointKey { address: destination, service: NO_SERVICE }).is_none()
    {
        return Outcome::PassedUnsupportedProtocol.into();
    }
    let marked = load8::<1>(ip) & ECN == CE;
    let asked = owners::asked(u16::from_be(load16::<4>(ip)));
    if !packet.remove_room(OUTER) {
        return Outcome::DroppedInternalError.into();
    }
    let ip = packet.data() + ETHERNET;
    if ip + 20 > packet.end() || load8::<0>(ip) >> 4 != 4 {
        return Outcome::DroppedUnknownEndpoint.into();
    }
    // Others continue in programs that do not conclude an opened packet.
    if !matches!(load8::<9>(ip) as u32, PROTOCOL_TCP | PROTOCOL_UDP) {
        return Outcome::DroppedUnknownEndpoint.into();
    }
    if marked {
        mark_congestion(ip);
    }
    set!(scratch.opened.endpoint.address = destination);
    set!(scratch.opened.pending = 1);
    let parsed = match V4::parse_fixed(packet) {
        Ok(parsed) => parsed,
        Err(outcome) => {
            let decision = parse::hand_over::<Tc, V4, false>(packet, outcome);
            set!(scratch.opened.pending = 0);
            return ends_here(decision);
        }
    };
    let flags = parsed.tcp_flags();
    let now = clock::jiffies();
    let entry = FlowTable::<V4>::new().find(&parsed.tuple);
    if !entry.is_null() {
        let (kind, entry_state) = (get!(entry.kind), get!(entry.state));
        if matches!(kind, kind::FORWARD | kind::DIRECT) {
            if parsed.is_tcp() && !parsed.opens(packet) {
                // A connection that this node sends on, or was in front of, goes on.
                if kind != kind::DIRECT || !owners::may_be_asked(asked) {
                    set!(scratch.opened.pending = 0);
                    return Outcome::DroppedUnknownEndpoint.into();
                }
            } else {
                // The client has come by another node since: its flow through this one is over.
                set!(entry.state = entry_state | RST | REMOVED);
            }
        } else if kind == kind::DELIVER
            && entry_state & !ANSWERED == ASSURED
            && flags & (flag::SYN | flag::FIN | flag::RST) == 0
            && fixed::is_whole(packet, &parsed)
            && established::advance(entry, &parsed, established::numbers_of(&parsed), now)
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
    packet.jump::<V4, { jump::SLOW_PATH }>();
    set!(scratch.opened.pending = 0);
    Outcome::DroppedInternalError.into()
}

/// Notes in the inner packet that a router on the way was congested: RFC 6040 section 4.2.
#[inline(always)]
fn mark_congestion(ip: usize) {
    let tos = load8::<1>(ip);
    if tos & ECN == 0 || tos & ECN == CE {
        return;
    }
    let before = load16::<0>(ip);
    store8::<1>(ip, tos | CE);
    let delta = checksum::delta(before as u64, load16::<0>(ip) as u64);
    store16::<10>(ip, checksum::update(load16::<10>(ip), delta));
}

/// Whether programs of a kind may see packets that were opened by [`run`], which jumps to them.
#[inline(always)]
const fn can_be_opened<P: Packet, F: Family>() -> bool {
    P::TC && !F::V6 && !P::SCTP && P::L2 != 0
}

/// Whether the packet that this program sees was opened.
#[inline(always)]
pub fn was_opened<P: Packet, F: Family>() -> bool {
    can_be_opened::<P, F>() && F::scratch().is_some_and(|scratch| get!(scratch.opened.pending) != 0)
}

/// Concludes the program with a decision on a packet that may have been opened: such a packet is
/// neither handed to the stack untranslated nor sent to another node.
#[inline(always)]
pub fn conclude<P: Packet, F: Family>(decision: Decision) -> Decision {
    if !can_be_opened::<P, F>() {
        return decision;
    }
    let Some(scratch) = F::scratch() else { return decision };
    let pending = get!(scratch.opened.pending);
    if pending == 0 {
        return decision;
    }
    set!(scratch.opened.pending = 0);
    // It concerns no other packet, if this one was delivered.
    let _ = direct::take_number(scratch);
    if pending == SENT_ON && matches!(decision.outcome, Outcome::ForwardedDirect) {
        return decision;
    }
    set!(scratch.opened.routed = decision.is_answered() as u32);
    ends_here(decision)
}

/// Whether the refused packet that this program answers was opened.
#[inline(always)]
pub fn is_answered_by_route<P: Packet, F: Family>() -> bool {
    if !can_be_opened::<P, F>() {
        return false;
    }
    let Some(scratch) = F::scratch() else { return false };
    let routed = get!(scratch.opened.routed);
    set!(scratch.opened.routed = 0);
    routed != 0
}

/// Returns the decision on an opened packet: it is delivered, answered or dropped.
#[inline(always)]
fn ends_here(decision: Decision) -> Decision {
    let drops = matches!(decision.outcome.verdict(), Verdict::Drop);
    if drops || decision.is_answered() || matches!(decision.outcome, Outcome::Delivered) {
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
    if !can_be_opened::<P, F>() {
        return borrow(slot);
    }
    if get!(scratch.opened.pending) == 0 {
        set!(scratch.opened.endpoint = load(slot));
    }
    borrow(place!(const scratch.opened.endpoint))
}

/// Completes the given endpoint in scratch memory, for an opened packet without a flow whose tuple
/// is `Scratch::opening`; instead of it the former owner of a connection that this node does not
/// know. Returns the Service port's index, the slot, and 1 if the packet is to be sent on.
///
/// # Errors
/// The client's address is martian, this node does not have the endpoint for the Service, or nobody
/// knows the connection.
#[inline(always)]
pub fn given<P: Packet, F: Family>(
    packet: P,
    parsed: &Parsed<F>,
    scratch: *mut Scratch<F::Address>,
) -> Result<(u32, u32, u8), Decision> {
    let found = complete4(packet.raw().cast());
    let service = get!(scratch.opened.service);
    if found == UNKNOWN {
        return Err(Decision::refused(Outcome::DroppedUnknownEndpoint, service));
    }
    if found != KNOWN {
        return Err(Decision::refused(Outcome::DroppedMartianSource, service));
    }
    if parsed.is_tcp() && !parsed.opens(packet) {
        if !owners::goes_on(parsed) {
            return Err(Decision::refused(Outcome::DroppedUnknownEndpoint, service));
        }
        let index = if get!(scratch.opened.pending) == SENT_ON {
            owners::next::<F>(scratch, owners::NONE)
        } else {
            owners::NONE
        };
        let Some(owner) = F::slots().lookup::<u32, Slot<F::Address>>(&index) else {
            return Err(Decision::refused(Outcome::ResetNoFlow, service));
        };
        set!(scratch.opened.endpoint = load(owner));
        return Ok((service, index, 1));
    }
    Ok((service, 0, 0))
}

/// The results of [`complete`].
const KNOWN: i32 = 0;
const UNKNOWN: i32 = 1;
const MARTIAN: i32 = 2;

global_functions! {
    complete4 => complete, context: *mut __sk_buff;
}

/// Completes `Scratch::opened` with the Service port and the endpoint's own port.
#[inline(always)]
fn complete(context: *mut __sk_buff) -> i32 {
    let Some(scratch) = V4::scratch() else { return UNKNOWN };
    set!(scratch.opened.service = NO_SERVICE);
    let found = owners::frontend::<V4>(borrow(place!(const scratch.opening)));
    if found.is_null() {
        return UNKNOWN;
    }
    let service = get!(found.service);
    set!(scratch.opened.service = service);
    let slot = place!(mut scratch.opened.endpoint);
    let Some(port) = port_of(&DirectEndpointKey { address: get!(slot.address), service }) else {
        return UNKNOWN;
    };
    if select::is_martian::<Tc, V4>(Tc::of(context)) {
        return MARTIAN;
    }
    set!(slot.port = port);
    set!(slot.flags = SLOT_LOCAL);
    set!(slot.node = 0);
    KNOWN
}

/// Returns the port of an endpoint of this node.
#[inline(always)]
fn port_of(key: &DirectEndpointKey<Address4>) -> Option<Port> {
    let found = Table::of(&raw const DIRECT_ENDPOINTS4).lookup::<_, DirectEndpoint>(key)?;
    Some(get!(found.port))
}
