//! State transitions of a flow's two entries, by the packets of TCP and UDP. Those of SCTP are in
//! [`associations`].

use core::ptr;

use traffic_policy_ebpf::{
    abi::{Address, Flow, kind},
    outcome::Outcome,
    tcp::{
        ANSWERED, ASSURED, MARKED, REMOVED, RST, flag,
        numbers::{self, After, Numbers, Segment, Windows},
    },
};

use crate::datapath::{
    clock,
    ctx::Packet,
    family::Family,
    flow::{
        associations,
        claim::CLAIMED,
        datagrams,
        established::{note_window, window_of},
        one_way,
        pair::{Transition, again, assure, begin_count, counterpart, counterpart_key},
        silence,
    },
    node_silence,
    parse::Parsed,
};

/// Notes the window scale of a SYN or SYN-ACK.
#[inline(always)]
fn note_scale<P: Packet, F: Family>(packet: P, parsed: &Parsed<F>, entry: *mut Flow<F::Address>) {
    set!(entry.packets = get!(entry.packets).with_scale(parsed.window_scale(packet)));
}

/// Updates the flow's state from one of its packets.
#[inline(always)]
pub fn track<P: Packet, F: Family>(
    packet: P,
    parsed: &Parsed<F>,
    entry: *mut Flow<F::Address>,
) -> Transition<F::Address> {
    match get!(entry.kind) {
        kind::FORWARD | kind::DELIVER => {
            unmark(entry);
            let Some(key) = counterpart_key::<F>(entry, parsed.tuple.protocol) else {
                return Transition::Leave(Outcome::DroppedInternalError);
            };
            request(packet, parsed, entry, counterpart(parsed, key))
        }
        kind::REPLY | kind::REPLY_LOCAL => track_reply(packet, parsed, entry),
        kind::DIRECT => {
            unmark(entry);
            one_way::track(packet, parsed, entry)
        }
        kind::LEFT | kind::LEFT_REPLY => Transition::Leave(Outcome::PassedToConntrack),
        // An entry that is being written.
        _ => Transition::Leave(Outcome::PassedStaleFlow),
    }
}

/// Updates the state as [`track`] does, for a reply entry.
#[inline(always)]
pub fn track_reply<P: Packet, F: Family>(
    packet: P,
    parsed: &Parsed<F>,
    entry: *mut Flow<F::Address>,
) -> Transition<F::Address> {
    unmark(entry);
    if parsed.is_sctp::<P>() {
        return associations::reply(packet, parsed, entry);
    }
    let removed = get!(entry.state) & REMOVED != 0;
    if !removed && !parsed.is_tcp() && !datagrams::may_be_stream(entry) {
        // Not marked stale, so its request entry exists: that look-up, a cache miss, is saved.
        return reply(packet, parsed, entry, ptr::null(), true);
    }
    if is_first_answer(packet, parsed, entry) {
        return Transition::Keep(entry);
    }
    let Some(key) = counterpart_key::<F>(entry, parsed.tuple.protocol) else {
        return Transition::Leave(Outcome::DroppedInternalError);
    };
    let other = counterpart(parsed, key);
    if !removed && !parsed.is_tcp() && !other.is_null() {
        // An endpoint that keeps answering one question is a stream as well.
        assure::<F>(key, other, entry);
    }
    // A datagram that was in flight when the client's next one chose another endpoint is still an
    // answer; a segment of the old connection would be mistaken for one of the new.
    let believed = !other.is_null() || !(removed && parsed.is_tcp());
    reply(packet, parsed, entry, other.cast_const(), believed)
}

/// Notes the first answer to a SYN, by the SYN's numbers that the reply entry keeps until then:
/// that saves the look-up of the request entry. False: no such answer, or that entry is needed to
/// tell.
#[inline(always)]
fn is_first_answer<P: Packet, F: Family>(
    packet: P,
    parsed: &Parsed<F>,
    entry: *mut Flow<F::Address>,
) -> bool {
    let opening = get!(entry.bytes);
    if get!(entry.state) != 0 || get!(entry.packets).count() != 0 || opening == 0 || !parsed.is_tcp() {
        return false;
    }
    let after = numbers::unassured(false, 0, get!(entry.numbers), opening, &parsed.segment());
    // A late segment of an earlier connection fits as well, but changes no state.
    let answers = after.fits && after.state != 0;
    if answers {
        node_silence::note_answer(get!(entry.packets).node(), clock::jiffies());
        begin_count(entry);
        take(entry, get!(entry.numbers), 0, &after);
        note_scale(packet, parsed, entry);
    }
    answers
}

/// Clears the mark of the last sweep.
#[inline(always)]
fn unmark<A: Address>(entry: *mut Flow<A>) {
    if get!(entry.state) & MARKED != 0 {
        set!(entry.state &= !MARKED);
    }
}

/// Whether a segment is the SYN that the endpoint has not answered yet.
#[inline(always)]
fn is_retransmission<A: Address>(syn: &Segment, entry: *const Flow<A>, reply: *const Flow<A>) -> bool {
    get!(entry.numbers) == syn.opening()
        && get!(reply.state) & ANSWERED == 0
        && get!(reply.packets).count() == 0
}

#[inline(always)]
fn request<P: Packet, F: Family>(
    packet: P,
    parsed: &Parsed<F>,
    entry: *mut Flow<F::Address>,
    reply: *mut Flow<F::Address>,
) -> Transition<F::Address> {
    if reply.is_null() {
        // Its reply entry has been removed: no reply to this flow could come back.
        let anew = parsed.is_udp::<P>() || parsed.opens(packet);
        return if anew { again::<P, F>(parsed, entry) } else { Transition::Forget };
    }
    if parsed.is_sctp::<P>() {
        return associations::request(packet, parsed, entry, reply);
    }
    let (mut state, reply_state) = (get!(entry.state), get!(reply.state));
    let answered = reply_state & ANSWERED != 0;
    if parsed.is_tcp() {
        let segment = parsed.segment();
        let (own, other) = (get!(entry.numbers), get!(reply.numbers));
        if parsed.opens(packet) {
            if own == CLAIMED {
                return Transition::Leave(Outcome::DroppedTableFull);
            }
            if numbers::is_over((state, reply_state), own, other) || state & (REMOVED | ASSURED) == REMOVED {
                return again::<P, F>(parsed, entry);
            }
            if state & ASSURED == 0 {
                if is_retransmission(&segment, entry, reply) {
                    let (node, now) = (get!(entry.head).node(), clock::jiffies());
                    node_silence::note_syn(node, now);
                    if get!(entry.kind) == kind::FORWARD && node_silence::is_silent(node, now) {
                        return again::<P, F>(parsed, entry);
                    }
                }
                return if silence::is_attempt(entry, reply, &segment) {
                    note_scale(packet, parsed, entry);
                    Transition::Keep(entry)
                } else {
                    Transition::Ignore(entry)
                };
            }
            // A live connection goes on: its endpoint answers, or sends a challenge (RFC 5961
            // section 4).
            return if silence::after_syn(entry, reply) {
                again::<P, F>(parsed, entry)
            } else {
                Transition::Ignore(entry)
            };
        }
        let after = if state & ASSURED == 0 {
            if segment.flags & flag::RST != 0 && numbers::resets_opening(&segment, own) {
                set!(entry.state |= RST);
                return Transition::Keep(entry);
            }
            if !answered || !numbers::assures(&segment, own, other) {
                return Transition::Ignore(entry);
            }
            set!(reply.numbers = numbers::assured_reply(&segment, other));
            numbers::assuring(state, &segment)
        } else {
            let windows = Windows::of(get!(entry.packets), get!(reply.packets));
            numbers::assured(state, own, other, windows, &segment)
        };
        if !after.fits {
            if !silence::goes_on_anew(entry, entry, reply, &segment) {
                return Transition::Ignore(entry);
            }
            return Transition::Keep(entry);
        }
        take(entry, own, state, &after);
        note_window(entry, window_of(parsed));
        state = after.state;
    } else if state & REMOVED != 0 {
        return again::<P, F>(parsed, entry);
    }
    if state & ASSURED == 0 {
        if answered && (parsed.is_tcp() || datagrams::is_stream(entry)) {
            assure::<F>(&parsed.tuple, entry, reply);
        } else if !parsed.is_tcp() {
            datagrams::look_again(entry);
        }
    }
    Transition::Keep(entry)
}

/// Writes the result of a segment to its entry, which had the numbers `own` and the state `before`:
/// what the segment has changed alone. Segments of one direction come on two CPUs, of the process
/// that sends and of what it receives, and an acknowledgement must not overwrite the FIN beside it.
#[inline(always)]
fn take<A: Address>(entry: *mut Flow<A>, own: Numbers, before: u8, after: &After) {
    if after.numbers != own {
        set!(entry.numbers = after.numbers);
    }
    let changed = after.state ^ before;
    if changed != 0 {
        set!(entry.state = get!(entry.state) & !changed | after.state & changed);
    }
}

/// Updates the state from a packet of the endpoint. `request`: the other entry, null if not known.
#[inline(always)]
fn reply<P: Packet, F: Family>(
    packet: P,
    parsed: &Parsed<F>,
    entry: *mut Flow<F::Address>,
    request: *const Flow<F::Address>,
    believed: bool,
) -> Transition<F::Address> {
    if !believed {
        return Transition::Leave(Outcome::PassedStaleFlow);
    }
    let before = get!(entry.state);
    let mut state = before;
    if !parsed.is_tcp() {
        if state & ANSWERED == 0 {
            set!(entry.state = state | ANSWERED);
        }
        return Transition::Keep(entry);
    }
    if request.is_null() {
        return Transition::Leave(Outcome::PassedStaleFlow);
    }
    let segment = parsed.segment();
    let (own, other, request_state) = (get!(entry.numbers), get!(request.numbers), get!(request.state));
    // Another CPU may have overwritten it with an old state.
    state |= request_state & ASSURED;
    let after = if state & ASSURED == 0 {
        numbers::unassured(state & ANSWERED != 0, state, own, other, &segment)
    } else {
        let windows = Windows::of(get!(entry.packets), get!(request.packets));
        numbers::assured(state, own, other, windows, &segment)
    };
    if !after.fits {
        // The tuple may belong to another connection, one to the endpoint itself.
        if state & ASSURED == 0 || numbers::is_over((state, request_state), own, other) {
            return Transition::Leave(Outcome::PassedOutOfWindow);
        }
        if !silence::goes_on_anew(entry, request, entry, &segment) {
            return Transition::Ignore(entry);
        }
        return Transition::Keep(entry);
    }
    begin_count(entry);
    take(entry, own, before, &after);
    if state & ASSURED == 0 && segment.flags & flag::SYN != 0 {
        note_scale(packet, parsed, entry);
    } else {
        note_window(entry, window_of(parsed));
    }
    Transition::Keep(entry)
}
