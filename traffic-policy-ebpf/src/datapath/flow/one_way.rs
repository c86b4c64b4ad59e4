//! State of flows of which this node sees only the requests: those that it forwards directly. The
//! endpoint's node tracks both directions; here a flow has to last as long, and to end soon after.

use traffic_policy_ebpf::{
    abi::Flow,
    outcome::Outcome,
    sctp::{self, chunk, tags},
    tcp::{
        ASSURED, FIN, REMOVED, RST, flag,
        numbers::{self, Segment},
    },
};

use crate::datapath::{
    barrier::compare_exchange,
    clock,
    ctx::Packet,
    family::Family,
    flow::{
        claim::CLAIMED,
        pair::{Transition, again},
        unassured,
    },
    parse::Parsed,
};

/// The seconds without a packet after which a SYN or INIT on a connection of a removed endpoint
/// opens another one, and a SYN on one whose client has sent its FIN: until then it may be a forged
/// one, and the client may still be receiving.
const SILENCE: u32 = 3;

/// Updates the state of a direct flow from one of its packets.
///
/// A datagram never assures its flow: an answer is not seen. A stream that is in use keeps its
/// place in the queue of unassured flows, and lasts as long as an answered one (the sweep).
#[inline(always)]
pub fn track<P: Packet, F: Family>(
    packet: P,
    parsed: &Parsed<F>,
    entry: *mut Flow<F::Address>,
) -> Transition<F::Address> {
    let state = get!(entry.state);
    if parsed.is_sctp::<P>() {
        return association(packet, parsed, entry);
    }
    if !parsed.is_tcp() {
        return if state & REMOVED != 0 { again::<P, F>(parsed, entry) } else { Transition::Keep(entry) };
    }
    let (segment, own) = (parsed.segment(), get!(entry.numbers));
    if own == CLAIMED {
        return Transition::Leave(Outcome::DroppedTableFull);
    }
    if parsed.opens(packet) {
        return opens::<P, F>(parsed, entry, &segment);
    }
    let near = numbers::is_near(&segment, own);
    if segment.flags & flag::RST != 0 {
        if !near {
            return Transition::Ignore(entry);
        }
        set!(entry.state |= RST);
        return Transition::Keep(entry);
    }
    if state & ASSURED == 0 {
        if !near || segment.flags & flag::ACK == 0 {
            return Transition::Ignore(entry);
        }
        unassured::leave::<F>(entry, &parsed.tuple);
        set!(entry.state |= ASSURED);
    } else if segment.flags & flag::FIN != 0 && near {
        set!(entry.state |= FIN);
    } else if state & FIN != 0 && !near {
        // The client has opened another connection from the same port; see `opens`.
        set!(entry.state &= !FIN);
    }
    set!(entry.numbers = segment.numbers);
    Transition::Keep(entry)
}

/// Updates the state from a SYN. A connection that goes on keeps its endpoint, whose node judges
/// the SYN.
#[inline(always)]
fn opens<P: Packet, F: Family>(
    parsed: &Parsed<F>,
    entry: *mut Flow<F::Address>,
    syn: &Segment,
) -> Transition<F::Address> {
    let state = get!(entry.state);
    if state & RST != 0 || state & (REMOVED | ASSURED) == REMOVED {
        return again::<P, F>(parsed, entry);
    }
    if state & ASSURED == 0 {
        if get!(entry.numbers) != syn.opening() {
            set!(entry.numbers = syn.opening());
        }
        return Transition::Keep(entry);
    }
    let quiet = clock::jiffies().wrapping_sub(get!(entry.last));
    if state & (REMOVED | FIN) != 0 && quiet >= SILENCE * clock::hz() {
        return again::<P, F>(parsed, entry);
    }
    Transition::Ignore(entry)
}

/// Updates the state of an association from a packet of its client.
///
/// The endpoint's tag is that of the client's COOKIE ECHO: the INIT ACK is not seen. Only a packet
/// with that tag ends the association here. Every other packet is forwarded and keeps the entry, as
/// a datagram does, so a forged one ends nothing; the endpoint's node judges it.
#[inline(always)]
fn association<P: Packet, F: Family>(
    packet: P,
    parsed: &Parsed<F>,
    entry: *mut Flow<F::Address>,
) -> Transition<F::Address> {
    let (state, known) = (get!(entry.state), get!(entry.numbers));
    if parsed.opens(packet) {
        if known == CLAIMED {
            return Transition::Leave(Outcome::DroppedTableFull);
        }
        let second = clock::hz();
        let quiet = clock::jiffies().wrapping_sub(get!(entry.last));
        let patience = if state & REMOVED != 0 { SILENCE } else { sctp::SILENCE };
        let ended = state & (RST | FIN) != 0 || state & (REMOVED | ASSURED) == REMOVED;
        // A second has no length until an agent has measured it.
        if ended || state & ASSURED != 0 && second != 0 && quiet >= patience * second {
            return again::<P, F>(parsed, entry);
        }
        if state & ASSURED != 0 {
            return Transition::Ignore(entry);
        }
        compare_exchange(place!(mut entry.numbers), known, tags(parsed.initiate_tag(packet), 0));
        return Transition::Keep(entry);
    }
    let head = parsed.head_of_any(packet);
    if state & ASSURED == 0 {
        if head.kind == chunk::COOKIE_ECHO && head.tag != 0 && known != CLAIMED {
            compare_exchange(place!(mut entry.numbers), known, tags(sctp::own(known), head.tag));
            unassured::leave::<F>(entry, &parsed.tuple);
            set!(entry.state |= ASSURED);
        }
    } else if head.fits(known) {
        let after = head.after(state);
        if after != state {
            set!(entry.state = after);
        }
    }
    Transition::Keep(entry)
}
