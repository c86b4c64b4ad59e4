//! State transitions of a flow's two entries.
//!
//! Each entry leads to its counterpart: its translated tuple, reversed, is the counterpart's key.

use core::ptr;

use traffic_policy_ebpf::{
    abi::{Address, Flow, Tuple, Usage, kind},
    outcome::Outcome,
    tcp::{self, ANSWERED, CONFIRMED, GONE, MARKED, flag},
};

use crate::datapath::{
    barrier::{fetch_add, full_fence},
    counters,
    family::Family,
    flow::table::{self, FlowTable},
    maps::{NOEXIST, USAGE},
    parse::Parsed,
    words::load32,
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

/// Whether the flow is established: confirmed, open, endpoint not removed. It then needs nothing but its translation.
#[inline(always)]
pub fn is_established(state: u8, tcp_flags: u8) -> bool {
    state & !ANSWERED == CONFIRMED && tcp_flags & (flag::SYN | flag::FIN | flag::RST) == 0
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
    if matches!(kind, kind::REPLY | kind::REPLY_LOCAL) && !pending && state & GONE == 0 {
        // Not marked stale, so its request entry exists: that look-up, a cache miss, is spared.
        return reply(parsed, entry, true, false);
    }
    let Some(key) = counterpart_key::<F>(entry, parsed.tuple.protocol) else {
        return Transition::Leave(Outcome::DroppedInternalError);
    };
    let mut other = FlowTable::<F>::of(pending).find(key);
    // In `PENDING` the kernel may have evicted the other entry, and another flow may have taken its key. In the main
    // table an entry left behind by a restart is marked as gone.
    if !other.is_null() && !is_counterpart::<F>(other, &parsed.tuple) {
        other = ptr::null_mut();
    }
    match kind {
        kind::FORWARD | kind::DELIVER => request(parsed, entry, key, other, pending),
        kind::REPLY | kind::REPLY_LOCAL => reply(parsed, entry, !other.is_null(), pending),
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
    let (state, reply_state) = unsafe { ((*entry).state, (*reply).state) };
    let mut confirmed = reply_state & ANSWERED != 0;
    if parsed.is_tcp() {
        let flags = parsed.tcp_flags();
        if tcp::opens(flags) {
            let over = state & GONE != 0 || tcp::closing(state, reply_state);
            return if over { again } else { Transition::Keep(entry) };
        }
        let after = tcp::after(state, flags, parsed.payload());
        if after != state {
            unsafe { (*entry).state = after };
        }
        // RFC 9293 section 3.10.7.4: the ACK of the SYN-ACK proves that the client is where it says.
        confirmed = confirmed
            && flags & (flag::ACK | flag::RST) == flag::ACK
            && unsafe { load32::<8>(parsed.l4) == (*reply).confirming_ack };
    } else if state & GONE != 0 {
        return again;
    }
    // What found no room in the main table tries again.
    if state & CONFIRMED == 0 && confirmed || state & CONFIRMED != 0 && pending {
        return confirm(parsed, entry, key, reply, pending);
    }
    Transition::Keep(entry)
}

#[inline(always)]
fn confirm<F: Family>(
    parsed: &Parsed<F>,
    entry: *mut Flow<F::Address>,
    key: &Tuple<F::Address>,
    reply: *mut Flow<F::Address>,
    pending: bool,
) -> Transition<F::Address> {
    unsafe {
        (*entry).state |= CONFIRMED;
        (*reply).state |= CONFIRMED;
    }
    if !pending {
        if let Some(usage) = USAGE.get_ptr_mut(0) {
            unsafe { fetch_add(table::unconfirmed::<F>(usage), u64::MAX) };
        }
        return Transition::Keep(entry);
    }
    // It has earned a place that is never evicted. Reply entry first, as for a new flow.
    if FlowTable::<F>::main().insert(key, reply.cast_const(), NOEXIST) != 0 {
        return Transition::Keep(entry);
    }
    if FlowTable::<F>::main().insert(&parsed.tuple, entry.cast_const(), NOEXIST) != 0 {
        FlowTable::<F>::main().remove(key);
        return Transition::Keep(entry);
    }
    FlowTable::<F>::pending().remove(&parsed.tuple);
    FlowTable::<F>::pending().remove(key);
    let entry = FlowTable::<F>::main().find(&parsed.tuple);
    if entry.is_null() { Transition::Leave(Outcome::DroppedTableFull) } else { Transition::Keep(entry) }
}

#[inline(always)]
fn reply<F: Family>(
    parsed: &Parsed<F>,
    entry: *mut Flow<F::Address>,
    believed: bool,
    pending: bool,
) -> Transition<F::Address> {
    let state = unsafe { (*entry).state };
    // A datagram that was on its way when the client's next one chose another endpoint is still an answer; a segment of the
    // old connection would be taken for one of the new.
    if !believed && (pending || state & GONE != 0 && parsed.is_tcp()) {
        return Transition::Leave(Outcome::PassedStaleFlow);
    }
    let mut after = state;
    if parsed.is_tcp() {
        let flags = parsed.tcp_flags();
        if flags & (flag::SYN | flag::ACK | flag::RST) == flag::SYN | flag::ACK {
            let sequence = u32::from_be(unsafe { load32::<4>(parsed.l4) });
            unsafe { (*entry).confirming_ack = sequence.wrapping_add(1).to_be() };
            after |= ANSWERED;
        } else {
            after = tcp::after(state, flags, parsed.payload());
        }
    } else {
        after |= ANSWERED;
    }
    if after != state {
        unsafe { (*entry).state = after };
    }
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
        let was_confirmed = (*entry).state & CONFIRMED != 0;
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
        if was_confirmed {
            fetch_add(table::unconfirmed::<F>(usage), 1);
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
