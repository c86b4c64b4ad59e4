//! The two entries of a flow: how one leads to the other, how a flow is assured, and how a new
//! conversation takes the place of one that has ended.
//!
//! Each entry leads to its counterpart, whose key is the reverse of the entry's translated tuple.

use core::ptr;

use traffic_policy_ebpf::{
    abi::{Address, Flow, PROTOCOL_UDP, Tuple},
    outcome::Outcome,
    tcp::{ASSURED, REMOVED},
};

use crate::datapath::{
    barrier::full_fence,
    counters,
    ctx::Packet,
    family::Family,
    flow::{
        claim::{CLAIMED, claim, give_back},
        table::{self, FlowTable},
        unassured,
    },
    parse::Parsed,
    value::{borrow, load, store, store_once},
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

/// Returns the other entry of a packet's flow, by its key; null if there is none, as another flow
/// may have its key. An entry left behind by a restart is marked as [`REMOVED`].
#[inline(always)]
pub fn counterpart<F: Family>(parsed: &Parsed<F>, key: &Tuple<F::Address>) -> *mut Flow<F::Address> {
    let other = FlowTable::<F>::new().find(key);
    if !other.is_null() && !table::is_counterpart(other, &parsed.tuple) {
        return ptr::null_mut();
    }
    other
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
    let former = claim(entry);
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
        give_back(entry, former);
        return Transition::Forget;
    }
    set!(scratch.former_numbers = former);
    Transition::Restart(entry)
}

/// Restores the numbers of an entry that [`again`] has claimed, if no new flow could be created.
#[inline(always)]
pub fn unclaim<F: Family>(entry: *mut Flow<F::Address>) {
    if let Some(scratch) = F::scratch() {
        give_back(entry, get!(scratch.former_numbers));
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
/// its port becomes free, so that opening and resetting connections on one port does not fill the
/// table and the SNAT port range.
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
    set!(old.state |= REMOVED);
    if tuple.protocol != PROTOCOL_UDP {
        counters::end(old.cast_const());
        FlowTable::<F>::new().remove(key);
    }
}
