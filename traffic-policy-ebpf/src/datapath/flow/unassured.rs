//! Unassured flows, in the order in which they began, so that they hold a bounded part of the
//! table: SYNs with forged sources cannot fill it.
//!
//! Each family has two queues, for TCP and UDP, each with half of the places of an array. A new
//! flow takes the next place of its queue, and if the flow there is still unassured, that flow, the
//! oldest of its kind, is removed. A flow that is assured returns its place. So the time that a
//! flow has to become assured is the length of the queue divided by the rate of new flows. If the
//! table is full, flows at the front make room before their turn.
//!
//! One-way streams of UDP (syslog, statsd, RTP) are never assured. A stream that is in use keeps
//! its place, and the new flow takes the next one, whatever it holds: so at most every second place
//! is spared, and forged streams hold at most half of the queue.
//!
//! If a flow is removed for another reason its place may keep its tuple, which leads nowhere, until
//! its turn comes.
//!
//! TCP and UDP have a queue each: one-way protocols never assure a flow, and must not push out
//! connections that are being opened. SCTP shares the queue of TCP.

use core::ptr;

use aya_ebpf::{cty::c_void, helpers::bpf_loop};
use traffic_policy_ebpf::{
    abi::{Address, Flow, PROTOCOL_UDP, Scratch, TableUsage, Tail, Tuple, kind},
    tcp::ASSURED,
};

use crate::datapath::{
    barrier::fetch_add,
    family::{Family, V4, V6},
    flow::{
        claim::{CLAIMED, claim, give_back},
        datagrams, recycle,
        table::{self, FlowTable},
    },
    maps::TABLE_USAGE,
    value::{borrow, load, load_once, store, store_once},
};

/// The places of the longer queue, and of both, that are examined for a flow that makes room in a
/// full table.
const LONGER_LOOKS: u64 = 48;
const LOOKS: u32 = 64;

/// Takes the next place of the queue for a new flow. The flow that holds it is removed if it is
/// unassured. Overwrites `other`, `former` and `flow_key` of `Scratch`.
#[inline(always)]
pub fn take_place<F: Family>(
    scratch: *mut Scratch<F::Address>,
    usage: *mut TableUsage,
    protocol: u32,
) -> u32 {
    let queue = Queue::of::<F>(usage, protocol != PROTOCOL_UDP);
    if next_place::<F>(scratch, &queue, protocol == PROTOCOL_UDP) == SPARED {
        next_place::<F>(scratch, &queue, false);
    }
    load(place!(const scratch.unassured_look))
}

/// Names the next place of a queue in `unassured_look` of `Scratch`, and empties it: see
/// [`evict`].
#[inline(always)]
fn next_place<F: Family>(scratch: *mut Scratch<F::Address>, queue: &Queue, spares: bool) -> i32 {
    set!(scratch.unassured_look = queue.first + (fetch_add(queue.next, 1) as u32 & F::unassured_last()));
    match F::unassured().lookup::<u32, Tuple<F::Address>>(borrow(place!(const scratch.unassured_look))) {
        Some(held) if get!(held.protocol) != 0 => {
            if F::V6 {
                evict6(spares as u64)
            } else {
                evict4(spares as u64)
            }
        }
        _ => 0,
    }
}

/// The queue of one protocol.
struct Queue {
    /// The first place of the queue in the array.
    first: u32,
    /// The place for the next flow, and the place up to which the queue has been searched for flows
    /// that make room: numbers that only grow.
    next: *mut u64,
    oldest: *mut u64,
}

impl Queue {
    #[inline(always)]
    fn of<F: Family>(usage: *mut TableUsage, tcp: bool) -> Self {
        let first = if tcp { 0 } else { F::unassured_last() + 1 };
        let (next, oldest) = match (tcp, F::V6) {
            (true, false) => (place!(mut usage.unassured_next[0]), place!(mut usage.unassured_oldest[0])),
            (true, true) => (place!(mut usage.unassured_next[1]), place!(mut usage.unassured_oldest[1])),
            (false, false) => (place!(mut usage.unassured_next[2]), place!(mut usage.unassured_oldest[2])),
            (false, true) => (place!(mut usage.unassured_next[3]), place!(mut usage.unassured_oldest[3])),
        };
        Self { first, next, oldest }
    }

    /// The number of places that have not been examined since they were taken.
    #[inline(always)]
    fn length<F: Family>(&self) -> u64 {
        let length = load_once(self.next).wrapping_sub(load_once(self.oldest));
        let places = F::unassured_last() as u64 + 1;
        if length < places { length } else { places }
    }

    /// Returns the place of the oldest flow that has not been examined; `None` if there is none.
    /// Two CPUs may get the same place.
    #[inline(always)]
    fn oldest_place<F: Family>(&self) -> Option<u32> {
        let (next, mut oldest) = (load_once(self.next), load_once(self.oldest));
        let places = F::unassured_last() as u64 + 1;
        // Older places have been overwritten.
        if next.wrapping_sub(oldest) > places {
            oldest = next.wrapping_sub(places);
        }
        if oldest == next {
            return None;
        }
        store_once(self.oldest, oldest.wrapping_add(1));
        Some(self.first + (oldest as u32 & F::unassured_last()))
    }
}

/// Notes a flow that has been created at its place.
#[inline(always)]
pub fn enter<F: Family>(scratch: *mut Scratch<F::Address>, tuple: &Tuple<F::Address>) {
    set!(scratch.unassured_look = get!(scratch.request.tail).queue_place());
    if let Some(held) =
        F::unassured().lookup::<u32, Tuple<F::Address>>(borrow(place!(const scratch.unassured_look)))
    {
        store(held, *tuple);
    }
}

/// Returns the place of a flow that is being assured. Its field in the entry is free for another
/// use then.
#[inline(always)]
pub fn leave<F: Family>(request: *mut Flow<F::Address>, tuple: &Tuple<F::Address>) {
    let Some(scratch) = F::scratch() else { return };
    // The stack of a callback has no room for a key.
    set!(scratch.unassured_look = get!(request.tail).queue_place());
    set!(request.tail = Tail::NONE);
    leave_place::<F>(borrow(place!(const scratch.unassured_look)), tuple);
}

/// Returns the place as [`leave`] does, for an entry that is removed. `place` lies on the stack or
/// in a map.
#[inline(always)]
pub fn leave_place<F: Family>(place: &u32, tuple: &Tuple<F::Address>) {
    if let Some(held) = F::unassured().lookup::<u32, Tuple<F::Address>>(place)
        // It may belong to another flow by now.
        && get!(held.ports) == tuple.ports
        && get!(held.source) == tuple.source
    {
        set!(held.protocol = 0);
    }
}

/// Removes an unassured flow from a full table: the oldest of the longer queue, whichever protocol
/// fills the table. False: none was found.
#[inline(always)]
pub fn make_room<F: Family>(scratch: *mut Scratch<F::Address>) -> bool {
    set!(scratch.made_room = 0);
    let _ = if F::V6 { evict_some6() } else { evict_some4() };
    get!(scratch.made_room) != 0
}

global_functions! {
    evict4 => evict::<V4>, spares: u64;
    evict6 => evict::<V6>, spares: u64;
    evict_some4 => evict_some::<V4>;
    evict_some6 => evict_some::<V6>;
}

#[inline(always)]
fn evict_some<F: Family>() -> i32 {
    let (Some(scratch), Some(usage)) = (F::scratch(), TABLE_USAGE.get_ptr_mut(0)) else { return 0 };
    let [tcp, udp] = [true, false].map(|tcp| Queue::of::<F>(usage, tcp).length::<F>());
    set!(scratch.tcp_first = (tcp >= udp) as u64);
    let turn = if F::V6 { turn6 as *mut c_void } else { turn4 as *mut c_void };
    // SAFETY: a helper of the kernel: the verifier checks its arguments, and the callback with
    // them.
    unsafe { bpf_loop(LOOKS, turn, ptr::null_mut(), 0) as i32 }
}

/// Examines one place: 0 to continue, 1 to stop.
#[inline(always)]
fn turn<F: Family>(index: u64) -> i64 {
    let (Some(scratch), Some(usage)) = (F::scratch(), TABLE_USAGE.get_ptr_mut(0)) else { return 1 };
    let queue = Queue::of::<F>(usage, (get!(scratch.tcp_first) != 0) == (index < LONGER_LOOKS));
    let Some(place) = queue.oldest_place::<F>() else { return 0 };
    set!(scratch.unassured_look = place);
    let made_room = evict::<F>(0) != 0;
    set!(scratch.made_room = made_room as u32);
    made_room as i64
}

extern "C" fn turn4(index: u64, _: *mut c_void) -> i64 {
    turn::<V4>(index)
}

extern "C" fn turn6(index: u64, _: *mut c_void) -> i64 {
    turn::<V6>(index)
}

/// The result of [`evict`] that has left a stream of datagrams in its place.
const SPARED: i32 = 2;

/// Empties the place that `Scratch` names, and removes its flow if that is unassured: 1 if it was.
/// With `spares` other than 0 a stream of datagrams that is in use stays: [`SPARED`].
#[inline(always)]
fn evict<F: Family>(spares: u64) -> i32 {
    let Some(scratch) = F::scratch() else { return 0 };
    let place = place!(const scratch.unassured_look);
    let Some(held) = F::unassured().lookup::<u32, Tuple<F::Address>>(borrow(place)) else { return 0 };
    if get!(held.protocol) == 0 {
        return 0;
    }
    let (request_key, reply_key, room) =
        (place!(mut scratch.other), place!(mut scratch.former), place!(mut scratch.flow_key));
    store(request_key, load(held));
    set!(held.protocol = 0);
    let table = FlowTable::<F>::new();
    let request = table.find_in(borrow(request_key), room);
    if request.is_null() || !is_at(request, load(place)) {
        return 0;
    }
    if spares != 0 && datagrams::is_stream_in_use(request) {
        set!(held.protocol = PROTOCOL_UDP);
        return SPARED;
    }
    let former = claim(request);
    if former == CLAIMED {
        return 0;
    }
    // The flow may have been assured, or removed and its element reused by another flow, which may
    // have taken this very place.
    if table.find_in(borrow(request_key), room) != request || !is_at(request, load(place)) {
        give_back(request, former);
        return 0;
    }
    recycle::name_counterpart(request, get!(request_key.protocol), reply_key);
    let reply = table.find_in(borrow(reply_key), room);
    if reply.is_null() || !table::is_counterpart_in_place(reply, request_key) {
        // Its reply entry has been removed, or belongs to another flow.
        recycle::remove_alone::<F>(request, borrow(request_key), room);
    } else {
        recycle::remove::<F>(request, request_key, reply, borrow(reply_key), room);
    }
    1
}

/// Whether an entry belongs to an unassured flow, and holds this place.
#[inline(always)]
fn is_at<A: Address>(request: *const Flow<A>, place: u32) -> bool {
    matches!(get!(request.kind), kind::FORWARD | kind::DELIVER | kind::DIRECT)
        && get!(request.state) & ASSURED == 0
        && get!(request.tail) == Tail::of_queue_place(place)
}
