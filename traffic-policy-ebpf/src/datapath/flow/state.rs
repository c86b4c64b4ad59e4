//! State transitions of a flow's two entries.
//!
//! Each entry leads to its counterpart: its translated tuple, reversed, is the counterpart's key.

use core::ptr;

use traffic_policy_ebpf::{
    abi::{Address, Flow, Tuple, Usage, kind},
    outcome::Outcome,
    tcp::{
        self, ANSWERED, ASSURED, GONE, MARKED, RST, flag,
        numbers::{self, After, Segment},
    },
};

use crate::datapath::{
    barrier::{fetch_add, full_fence},
    clock, counters,
    family::Family,
    flow::{
        recycle,
        table::{self, FlowTable},
    },
    maps::{NOEXIST, TABLE_USAGE},
    parse::Parsed,
    words::load64,
};

/// What is to be done with a packet whose entry was found.
pub enum Transition<A: Address> {
    /// Translate it as this entry says.
    Keep(*mut Flow<A>),
    /// It opens a new conversation: choose again, in place of this entry (of the main table).
    Restart(*mut Flow<A>),
    /// As if no entry had been found.
    Forget,
    Leave(Outcome),
}

/// A SYN with another number is a new attempt if nothing has come for so long, in jiffies: a quarter of a second or more. Before, it
/// may be a stranger's, and the answer to the first one is on its way.
const NEW_ATTEMPT: u32 = 250;

/// Whether the flow is established: assured, open, endpoint not removed. Its packets need nothing but their translation, if they
/// [continue][advance] it.
#[inline(always)]
pub fn is_established(state: u8, tcp_flags: u8) -> bool {
    state & !ANSWERED == ASSURED && tcp_flags & (flag::SYN | flag::FIN | flag::RST) == 0
}

/// Sequence and acknowledgement number of a TCP segment; 0 for UDP.
#[inline(always)]
pub fn numbers_of<F: Family>(parsed: &Parsed<F>) -> u64 {
    if parsed.is_tcp() { u64::from_be(load64::<4>(parsed.l4)) } else { 0 }
}

/// Notes the numbers of an established flow's packet, those of [`numbers_of`]; false: they do not simply continue it. (A datagram's
/// are those that its entry has.)
#[inline(always)]
pub fn advance<A: Address>(entry: *mut Flow<A>, numbers: u64) -> bool {
    // SAFETY: a field of a map value, aligned: one load and one store.
    unsafe {
        let continues = numbers::continues(numbers, (*entry).numbers);
        if continues {
            (*entry).numbers = numbers;
        }
        continues
    }
}

/// The key of an entry's other entry, in `Scratch`: the stack has no room for all the keys that are looked up.
#[inline(always)]
pub fn counterpart_key<F: Family>(
    entry: *const Flow<F::Address>,
    protocol: u32,
) -> Option<&'static Tuple<F::Address>> {
    let scratch = F::scratch()?;
    unsafe {
        (*scratch).other = (*entry).translated(protocol).reversed();
        Some(&(*scratch).other)
    }
}

/// Whether `other` is an entry whose packets come back as packets of `tuple`.
#[inline(always)]
fn is_counterpart<F: Family>(other: *const Flow<F::Address>, tuple: &Tuple<F::Address>) -> bool {
    (unsafe { (*other).translated(tuple.protocol) }) == tuple.reversed()
}

/// Whether the other entry of a packet's entry is there, and names it.
#[inline(always)]
pub fn is_paired<F: Family>(
    entry: *const Flow<F::Address>,
    tuple: &Tuple<F::Address>,
    pending: bool,
) -> bool {
    let Some(key) = counterpart_key::<F>(entry, tuple.protocol) else { return false };
    let other = FlowTable::<F>::of(pending).find(key);
    !other.is_null() && is_counterpart::<F>(other, tuple)
}

/// Notes what the packet says of its conversation.
#[inline(always)]
pub fn track<F: Family>(
    parsed: &Parsed<F>,
    entry: *mut Flow<F::Address>,
    pending: bool,
) -> Transition<F::Address> {
    let (kind, state) = unsafe { ((*entry).kind, (*entry).state) };
    if state & MARKED != 0 {
        unsafe { (*entry).state &= !MARKED };
    }
    if matches!(kind, kind::REPLY | kind::REPLY_LOCAL) && !pending && state & GONE == 0 && !parsed.is_tcp() {
        // Not marked stale, so its request entry exists: that look-up, a cache miss, is spared.
        return reply(parsed, entry, ptr::null(), true);
    }
    let Some(key) = counterpart_key::<F>(entry, parsed.tuple.protocol) else {
        return Transition::Leave(Outcome::DroppedInternalError);
    };
    let mut other = FlowTable::<F>::of(pending).find(key);
    // In `tp_pending` the kernel may have evicted the other entry, and another flow may have taken its key. In the main
    // table an entry left behind by a restart is marked as gone.
    if !other.is_null() && !is_counterpart::<F>(other, &parsed.tuple) {
        other = ptr::null_mut();
    }
    match kind {
        kind::FORWARD | kind::DELIVER => request(parsed, entry, key, other, pending),
        kind::REPLY | kind::REPLY_LOCAL => {
            // A datagram that was on its way when the client's next one chose another endpoint is still an answer; a segment of
            // the old connection would be taken for one of the new.
            let believed = !other.is_null() || !pending && !(state & GONE != 0 && parsed.is_tcp());
            reply(parsed, entry, other.cast_const(), believed)
        }
        // An entry that is just being written.
        _ => Transition::Leave(Outcome::PassedStaleFlow),
    }
}

#[inline(always)]
fn request<F: Family>(
    parsed: &Parsed<F>,
    entry: *mut Flow<F::Address>,
    key: &Tuple<F::Address>,
    reply: *mut Flow<F::Address>,
    pending: bool,
) -> Transition<F::Address> {
    let again = if pending { Transition::Forget } else { Transition::Restart(entry) };
    if reply.is_null() {
        // Its reply entry is gone: nothing that this flow sends could come back.
        return if !parsed.is_tcp() || parsed.opens() { again } else { Transition::Forget };
    }
    let (mut state, reply_state) = unsafe { ((*entry).state, (*reply).state) };
    let assured = reply_state & ANSWERED != 0;
    if parsed.is_tcp() {
        let segment = parsed.segment();
        if parsed.opens() {
            // A connection that lives goes on: its endpoint answers, by a challenge if need be (RFC 5961 section 4).
            if tcp::closing(state, reply_state) || state & (GONE | ASSURED) == GONE {
                return again;
            }
            if reply_state & ANSWERED == 0 {
                unsafe { attempt(entry, &segment) };
            }
            return Transition::Keep(entry);
        }
        let (own, other) = unsafe { ((*entry).numbers, (*reply).numbers) };
        if state & ASSURED == 0 {
            if segment.flags & flag::RST != 0 && numbers::resets_opening(&segment, own) {
                unsafe { (*entry).state = state | RST };
            }
            if !assured || !numbers::assures(&segment, own, other) {
                return Transition::Keep(entry);
            }
            unsafe {
                (*entry).numbers = segment.numbers;
                (*reply).numbers = numbers::assured_reply(&segment, other);
            }
        }
        let (own, other) = unsafe { ((*entry).numbers, (*reply).numbers) };
        let after = numbers::assured(state, own, other, &segment);
        unsafe { take(entry, &after) };
        state = after.state;
    } else if state & GONE != 0 {
        return again;
    }
    // What found no room in the main table tries again.
    if state & ASSURED == 0 && assured || state & ASSURED != 0 && pending {
        return assure(parsed, entry, key, reply, pending);
    }
    Transition::Keep(entry)
}

#[inline(always)]
fn assure<F: Family>(
    parsed: &Parsed<F>,
    entry: *mut Flow<F::Address>,
    key: &Tuple<F::Address>,
    reply: *mut Flow<F::Address>,
    pending: bool,
) -> Transition<F::Address> {
    unsafe {
        (*entry).state |= ASSURED;
        (*reply).state |= ASSURED;
    }
    if !pending {
        if let Some(usage) = TABLE_USAGE.get_ptr_mut(0) {
            fetch_add(table::unassured::<F>(usage, parsed.tuple.protocol), u64::MAX);
        }
        return Transition::Keep(entry);
    }
    // It has earned a place that is never evicted. Reply entry first, as for a new flow.
    if FlowTable::<F>::main().insert(key, reply.cast_const(), NOEXIST) != 0 {
        return Transition::Keep(entry);
    }
    unsafe { (*entry).ifindex = recycle::place::<F>(parsed.tuple.ports.wire()) };
    if FlowTable::<F>::main().insert(&parsed.tuple, entry.cast_const(), NOEXIST) != 0 {
        FlowTable::<F>::main().remove(key);
        return Transition::Keep(entry);
    }
    recycle::enter::<F>(unsafe { (*entry).ifindex }, &parsed.tuple);
    FlowTable::<F>::pending().remove(&parsed.tuple);
    FlowTable::<F>::pending().remove(key);
    let entry = FlowTable::<F>::main().find(&parsed.tuple);
    if entry.is_null() { Transition::Leave(Outcome::DroppedTableFull) } else { Transition::Keep(entry) }
}

/// Notes a SYN that is sent before the endpoint has answered another one.
#[inline(always)]
unsafe fn attempt<A: Address>(entry: *mut Flow<A>, syn: &Segment) {
    unsafe {
        if clock::jiffies().wrapping_sub((*entry).last) >= NEW_ATTEMPT {
            (*entry).numbers = syn.opening();
        }
    }
}

/// Notes what a segment has made of its entry.
#[inline(always)]
unsafe fn take<A: Address>(entry: *mut Flow<A>, after: &After) {
    unsafe {
        if after.numbers != (*entry).numbers {
            (*entry).numbers = after.numbers;
        }
        if after.state != (*entry).state {
            (*entry).state = after.state;
        }
    }
}

/// `request`: the other entry, null if it is not known.
#[inline(always)]
fn reply<F: Family>(
    parsed: &Parsed<F>,
    entry: *mut Flow<F::Address>,
    request: *const Flow<F::Address>,
    believed: bool,
) -> Transition<F::Address> {
    if !believed {
        return Transition::Leave(Outcome::PassedStaleFlow);
    }
    let state = unsafe { (*entry).state };
    if !parsed.is_tcp() {
        if state & ANSWERED == 0 {
            unsafe { (*entry).state = state | ANSWERED };
        }
        return Transition::Keep(entry);
    }
    if request.is_null() {
        return Transition::Leave(Outcome::PassedStaleFlow);
    }
    let segment = parsed.segment();
    let (own, other, request_state) = unsafe { ((*entry).numbers, (*request).numbers, (*request).state) };
    let after = if state & ASSURED == 0 {
        numbers::unassured(state & ANSWERED != 0, state, own, other, &segment)
    } else {
        numbers::assured(state, own, other, &segment)
    };
    // Of a connection that lives everything is sent on, for the client to judge. Otherwise the tuple may be that of another one,
    // to the endpoint itself.
    if !after.fits && (state & ASSURED == 0 || tcp::closing(request_state, state)) {
        return Transition::Leave(Outcome::PassedOutOfWindow);
    }
    unsafe { take(entry, &after) };
    Transition::Keep(entry)
}

/// Writes a new conversation over the request entry of one that has ended. Packets of the old one may be reading: the entry
/// has no kind while it is being written, for every CPU, and one that has seen the old kind just before carries a wrong
/// checksum if it gets a mixture of both.
#[inline(always)]
pub unsafe fn reuse_entry<F: Family>(
    entry: *mut Flow<F::Address>,
    request: *mut Flow<F::Address>,
    protocol: u32,
    reply_key: &Tuple<F::Address>,
    usage: *mut Usage,
) {
    unsafe {
        let was_assured = (*entry).state & ASSURED != 0;
        mark_stale::<F>(entry, protocol, reply_key);
        counters::end(entry.cast_const());
        let kind = (*request).kind;
        (*request).kind = 0;
        // It is this CPU's own.
        let own = &raw mut (*request).bytes;
        ptr::write_volatile(&raw mut (*entry).kind, 0);
        full_fence(own);
        *entry = *request;
        full_fence(own);
        ptr::write_volatile(&raw mut (*entry).kind, kind);
        if was_assured {
            fetch_add(table::unassured::<F>(usage, protocol), 1);
        }
    }
}

/// Marks the reply entry of a request entry that is about to be written over as stale.
#[inline(always)]
unsafe fn mark_stale<F: Family>(
    request: *mut Flow<F::Address>,
    protocol: u32,
    successor: &Tuple<F::Address>,
) {
    let Some(key) = counterpart_key::<F>(request, protocol) else { return };
    if *key == *successor {
        return;
    }
    let old = FlowTable::<F>::main().find(key);
    if !old.is_null() {
        unsafe { (*old).state |= GONE };
    }
}
