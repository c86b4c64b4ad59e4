//! State transitions of a flow's two entries.
//!
//! Each entry leads to its counterpart, whose key is the reverse of the entry's translated tuple.

use core::ptr;

use traffic_policy_ebpf::{
    abi::{Address, Flow, PROTOCOL_UDP, Tuple, Window, kind},
    outcome::Outcome,
    tcp::{
        ANSWERED, ASSURED, GONE, MARKED, RST, flag,
        numbers::{self, After, Windows},
    },
};

use crate::datapath::{
    barrier::full_fence,
    counters,
    ctx::Packet,
    family::Family,
    flow::{
        associations, datagrams,
        recycle::{self, CLAIMED},
        silence,
        table::{self, FlowTable},
        unassured,
    },
    parse::Parsed,
    value::{borrow, load, store, store_once},
    words::{load16, load64},
};

/// The treatment of a packet whose entry was found.
pub enum Transition<A: Address> {
    /// The packet is translated as this entry specifies.
    Keep(*mut Flow<A>),
    /// The packet is translated, although its numbers do not show that it belongs to the flow; the
    /// receiver decides. It does not keep the flow alive.
    Ignore(*mut Flow<A>),
    /// The packet opens a new conversation on this entry (of the main table), which is overwritten.
    Restart(*mut Flow<A>),
    /// The packet is treated as if no entry had been found.
    Forget,
    Leave(Outcome),
}

/// Whether the flow is established: assured, open, endpoint not removed. Its packets need nothing
/// but their translation, if they [continue][advance] it.
#[inline(always)]
pub fn is_established(state: u8, tcp_flags: u8) -> bool {
    state & !ANSWERED == ASSURED && tcp_flags & (flag::SYN | flag::FIN | flag::RST) == 0
}

/// Returns sequence and acknowledgement number of a TCP segment; 0 for other protocols.
#[inline(always)]
pub fn numbers_of<F: Family>(parsed: &Parsed<F>) -> u64 {
    if parsed.is_tcp() { u64::from_be(load64::<4>(parsed.l4)) } else { 0 }
}

/// Returns the window that a TCP segment offers; none for UDP. It must not be used for a SYN, whose
/// window is never scaled (RFC 7323 section 2.2).
#[inline(always)]
pub fn window_of<F: Family>(parsed: &Parsed<F>) -> Window {
    if parsed.is_tcp() { Window::of(u16::from_be(load16::<14>(parsed.l4))) } else { Window::NONE }
}

/// Notes numbers and window of an established flow's packet, those of [`numbers_of`] and
/// [`window_of`]. False: they do not simply continue it. For UDP all are 0.
///
/// The window is read only from the first packet of each jiffy: the largest one decides, and hosts
/// that move much data offer theirs again and again.
#[inline(always)]
pub fn advance<F: Family>(entry: *mut Flow<F::Address>, parsed: &Parsed<F>, numbers: u64, now: u32) -> bool {
    let continues = numbers::continues(numbers, get!(entry.numbers));
    if continues {
        set!(entry.numbers = numbers);
        if get!(entry.last) != now {
            note_window(entry, window_of(parsed));
        }
    }
    continues
}

/// Notes the window of a segment that belongs to the flow.
#[inline(always)]
fn note_window<A: Address>(entry: *mut Flow<A>, window: Window) {
    let packets = get!(entry.packets);
    if packets.is_below(window) {
        set!(entry.packets = packets.with_window(window));
    }
}

/// Notes the window scale of a SYN or SYN-ACK.
#[inline(always)]
fn note_scale<P: Packet, F: Family>(packet: P, parsed: &Parsed<F>, entry: *mut Flow<F::Address>) {
    set!(entry.packets = get!(entry.packets).with_scale(parsed.window_scale(packet)));
}

/// Returns the key of an entry's counterpart, in `Scratch`: the stack has no room for all keys.
#[inline(always)]
pub fn counterpart_key<F: Family>(
    entry: *const Flow<F::Address>,
    protocol: u32,
) -> Option<&'static Tuple<F::Address>> {
    let scratch = F::scratch()?;
    set!(scratch.other = table::translated(entry, protocol).reversed());
    Some(borrow(place!(const scratch.other)))
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
    let gone = get!(entry.state) & GONE != 0;
    if !gone && !parsed.is_tcp() && !datagrams::may_be_stream(entry) {
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
    if !gone && !parsed.is_tcp() && !other.is_null() {
        // An endpoint that keeps answering one question is a stream as well.
        assure::<F>(key, other, entry);
    }
    // A datagram that was in flight when the client's next one chose another endpoint is still an
    // answer; a segment of the old connection would be mistaken for one of the new.
    let believed = !other.is_null() || !(gone && parsed.is_tcp());
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
        begin_count(entry);
        take(entry, &after);
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

/// Returns the other entry of a packet's flow, by its key; null if there is none, as another flow
/// may have its key. An entry left behind by a restart is marked as [`GONE`].
#[inline(always)]
pub fn counterpart<F: Family>(parsed: &Parsed<F>, key: &Tuple<F::Address>) -> *mut Flow<F::Address> {
    let other = FlowTable::<F>::new().find(key);
    if !other.is_null() && !table::is_counterpart(other, &parsed.tuple) {
        return ptr::null_mut();
    }
    other
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
            if numbers::is_over((state, reply_state), own, other) || state & (GONE | ASSURED) == GONE {
                return again::<P, F>(parsed, entry);
            }
            if state & ASSURED == 0 {
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
                set!(entry.state = state | RST);
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
        take(entry, &after);
        note_window(entry, window_of(parsed));
        state = after.state;
    } else if state & GONE != 0 {
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

/// Begins a new conversation on an entry. In the main table the CPU that has claimed it overwrites
/// it: another one may be writing it too, or removing the flow for its port, and a removed element
/// is reused at once.
#[inline(always)]
pub fn again<P: Packet, F: Family>(
    parsed: &Parsed<F>,
    entry: *mut Flow<F::Address>,
) -> Transition<F::Address> {
    let Some(scratch) = F::scratch() else { return Transition::Forget };
    let former = recycle::claim(entry);
    if former == CLAIMED {
        // The client retransmits a SYN or INIT. A datagram is translated by the entry as it is.
        return if parsed.is_udp::<P>() {
            Transition::Forget
        } else {
            Transition::Leave(Outcome::DroppedTableFull)
        };
    }
    // The entry was removed before the claim: it belongs to another flow now.
    if FlowTable::<F>::new().find(&parsed.tuple) != entry {
        recycle::give_back(entry, former);
        return Transition::Forget;
    }
    set!(scratch.former_numbers = former);
    Transition::Restart(entry)
}

/// Restores the numbers of an entry that [`again`] has claimed, if no new flow could be created.
#[inline(always)]
pub fn unclaim<F: Family>(entry: *mut Flow<F::Address>) {
    if let Some(scratch) = F::scratch() {
        recycle::give_back(entry, get!(scratch.former_numbers));
    }
}

/// Assures a flow, so that it is no longer removed to make room for others. `tuple`: its requests'.
#[inline(always)]
pub fn assure<F: Family>(
    tuple: &Tuple<F::Address>,
    request: *mut Flow<F::Address>,
    reply: *mut Flow<F::Address>,
) {
    unassured::leave::<F>(request, tuple);
    if tuple.protocol == PROTOCOL_UDP {
        // The fast path compares them with those of a datagram.
        set!(request.numbers = 0);
        set!(reply.numbers = 0);
    }
    set!(request.state |= ASSURED);
    set!(reply.state |= ASSURED);
}

/// Writes the result of a segment to its entry.
#[inline(always)]
fn take<A: Address>(entry: *mut Flow<A>, after: &After) {
    if after.numbers != get!(entry.numbers) {
        set!(entry.numbers = after.numbers);
    }
    if after.state != get!(entry.state) {
        set!(entry.state = after.state);
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
    let mut state = get!(entry.state);
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
    take(entry, &after);
    if state & ASSURED == 0 && segment.flags & flag::SYN != 0 {
        note_scale(packet, parsed, entry);
    } else {
        note_window(entry, window_of(parsed));
    }
    Transition::Keep(entry)
}

/// Starts the byte count of an entry, in whose place a reply entry first keeps the SYN's numbers.
#[inline(always)]
pub fn begin_count<A: Address>(entry: *mut Flow<A>) {
    if get!(entry.packets).count() == 0 {
        set!(entry.bytes = 0);
    }
}

/// Writes a new conversation over the request entry of one that has ended. Packets of the old one
/// may be reading it: for every CPU, the entry has kind 0 while it is being written, and a packet
/// whose CPU read the old kind just before carries a wrong checksum if it gets a mixture of both.
#[inline(always)]
pub fn reuse_entry<F: Family>(
    entry: *mut Flow<F::Address>,
    request: *mut Flow<F::Address>,
    tuple: &Tuple<F::Address>,
    reply_key: &Tuple<F::Address>,
) {
    mark_stale::<F>(entry, tuple, reply_key);
    if get!(entry.state) & ASSURED == 0 {
        unassured::leave::<F>(entry, tuple);
    }
    counters::end(entry.cast_const());
    let kind = get!(request.kind);
    set!(request.kind = 0);
    // A word that belongs to this CPU alone.
    let own = place!(mut request.bytes);
    store_once(place!(mut entry.kind), 0);
    full_fence(own);
    store(entry, load(request));
    full_fence(own);
    store_once(place!(mut entry.kind), kind);
}

/// Marks as stale the reply entry of a request entry that is about to be overwritten. For TCP and
/// SCTP it is removed at once: packets of the former connection are no answer to the new one, and
/// its port becomes free, so that opening and resetting connections on one port does not fill table
/// and pool.
#[inline(always)]
fn mark_stale<F: Family>(
    request: *mut Flow<F::Address>,
    tuple: &Tuple<F::Address>,
    successor: &Tuple<F::Address>,
) {
    let Some(key) = counterpart_key::<F>(request, tuple.protocol) else { return };
    if *key == *successor {
        return;
    }
    let old = FlowTable::<F>::new().find(key);
    if old.is_null() || !table::is_counterpart(old, tuple) {
        return;
    }
    set!(old.state |= GONE);
    if tuple.protocol != PROTOCOL_UDP {
        counters::end(old.cast_const());
        FlowTable::<F>::new().remove(key);
    }
}
