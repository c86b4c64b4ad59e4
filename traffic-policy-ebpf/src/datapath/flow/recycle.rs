//! Removal of finished flows by the packet path itself: for the source port that one of them still
//! holds, and for room in a full table, so that a stopped or slow agent does no lasting harm.
//!
//! After an entry has found no room, each new flow of the next seconds looks at the flows of some
//! places of the [`directory`], in an order that all CPUs share.

use core::ptr;

use aya_ebpf::{cty::c_void, helpers::bpf_loop};
use traffic_policy_ebpf::{
    abi::{Address, BY_TABLE, Flow, FlowKey, PROTOCOL_TCP, PROTOCOL_UDP, Scratch, TableUsage, Tuple, kind},
    tcp::{ANSWERED, ASSURED, MARKED, RST, numbers},
};

use crate::datapath::{
    barrier::{fetch_add, opaque},
    clock, counters,
    family::{Family, V4, V6},
    flow::{
        claim::{CLAIMED, claim, give_back},
        directory,
        table::{self, FlowTable},
    },
    maps::{GC_PASS, TABLE_USAGE},
    value::{borrow, load, store},
};

/// The seconds after which the port of a connection that was reset, or closed both ways, is reused,
/// or one that a flow has left behind. A new connection in TIME_WAIT is the subject of RFC 6191 and
/// RFC 1337: its SYN is accepted by its number or time stamp, or answered by an ACK that the client
/// resets. nf_conntrack takes such ports over at once (`nf_nat_may_kill`).
const AFTER_RST: u32 = 1;
const AFTER_FIN: u32 = 5;
/// The seconds for the port of an unassured UDP flow: a question and its answer, which
/// `nf_conntrack_udp_timeout` keeps for 30 seconds. Resolvers and clients of DNS have given up by
/// then.
const AFTER_DATAGRAM: u32 = 10;
/// The seconds for the port of a connection that was never established, without a retransmitted SYN
/// or SYN-ACK. If another SYN comes it gets another port.
const AFTER_SYN: u32 = 10;

/// The places that a new flow looks at while a table is full, and the jiffies for which it counts
/// as full.
const LOOKS: u32 = 16;
const FULL_FOR: u32 = 1024;

/// The seconds without a packet after which an established direct flow gives way in a full table.
/// A connection whose endpoint the Maglev table names goes on with its next segment; any other one
/// is lost.
const BY_TABLE_FOR: u32 = 1;
const ONE_WAY_FOR: u32 = 60;

/// Notes that an entry has found no room in the main table.
#[inline(always)]
pub fn note_full(usage: *mut TableUsage, now: u32) {
    set!(usage.full_at = now);
}

/// Looks for finished flows, if the main table was full recently. It must be called before
/// `NewFlow::write`: both use `flow_key` of `Scratch`.
#[inline(always)]
pub fn make_room<F: Family>(scratch: *mut Scratch<F::Address>, usage: *mut TableUsage, now: u32) {
    if now.wrapping_sub(get!(usage.full_at)) < FULL_FOR {
        set!(scratch.port_search.now = now);
        if F::V6 {
            look_around6();
        } else {
            look_around4();
        }
    }
}

global_functions! {
    look_around4 => look_around::<V4>;
    look_around6 => look_around::<V6>;
}

/// Looks at the next places of the directory.
#[inline(always)]
fn look_around<F: Family>() -> i32 {
    // SAFETY: a helper of the kernel: the verifier checks its arguments, and the callback with
    // them.
    unsafe { bpf_loop(LOOKS, turn::<F>(), ptr::null_mut(), 0) as i32 }
}

/// Looks at one place. The result 0 makes `bpf_loop` continue.
#[inline(always)]
fn look<F: Family>() -> i64 {
    let (Some(scratch), Some(usage), Some(sweep)) =
        (F::scratch(), TABLE_USAGE.get_ptr_mut(0), GC_PASS.get_ptr(0))
    else {
        return 0;
    };
    let hand = if F::V6 { place!(mut usage.hand[1]) } else { place!(mut usage.hand[0]) };
    set!(scratch.directory_look = fetch_add(hand, 1) as u32 & F::directory_last());
    let Some(held) =
        F::directory().lookup::<u32, Tuple<F::Address>>(borrow(place!(const scratch.directory_look)))
    else {
        return 0;
    };
    if get!(held.protocol) == 0 {
        return 0;
    }
    let (request_key, reply_key, room) =
        (place!(mut scratch.other), place!(mut scratch.former), place!(mut scratch.flow_key));
    store(request_key, load(held));
    let table = FlowTable::<F>::new();
    let request = table.find_in(borrow(request_key), room);
    if request.is_null() {
        set!(held.protocol = 0);
        return 0;
    }
    if get!(request.kind) == kind::DIRECT {
        look_at_direct::<F>(scratch, request);
        return 0;
    }
    if !matches!(get!(request.kind), kind::FORWARD | kind::DELIVER) {
        return 0;
    }
    let protocol = get!(request_key.protocol);
    name_counterpart(request, protocol, reply_key);
    let reply = table.find_in(borrow(reply_key), room);
    // Without its reply entry no reply to this flow could come back. A reply entry of another flow
    // must stay.
    if reply.is_null() || !table::is_counterpart_in_place(reply, request_key) {
        return 0;
    }
    let states = (get!(request.state), get!(reply.state));
    let mut limit = super::timeout(&get!(sweep.timeouts), protocol, states.0, states.1);
    // The same time as for its port, and as `tcp_can_early_drop` of conntrack.
    let after_end = AFTER_FIN * clock::hz();
    if after_end < limit
        && protocol == PROTOCOL_TCP
        && numbers::is_over(states, get!(request.numbers), get!(reply.numbers))
    {
        limit = after_end;
    }
    // The time-outs are set once an agent has started.
    if limit == 0 || idle::<F>(request, reply, get!(scratch.port_search.now)) <= limit {
        return 0;
    }
    let former = claim(request);
    if former == CLAIMED {
        return 0;
    }
    // Behind the compiler's back, as in `take_over`.
    let scratch = opaque(scratch as u64) as *mut Scratch<F::Address>;
    let (request_key, reply_key, room) =
        (place!(mut scratch.other), place!(mut scratch.former), place!(mut scratch.flow_key));
    // If the entries were removed before the claim, they belong to other flows by now.
    if table.find_in(borrow(request_key), room) != request
        || table.find_in(borrow(reply_key), room) != reply
        || !table::is_counterpart_in_place(reply, request_key)
    {
        give_back(request, former);
        return 0;
    }
    remove::<F>(request, request_key, reply, borrow(reply_key), room);
    0
}

/// Returns the seconds without a packet after which an assured direct flow gives way in a full
/// table.
#[inline(always)]
fn patience(address_delta: u16) -> u32 {
    if address_delta & BY_TABLE != 0 { BY_TABLE_FOR } else { ONE_WAY_FOR }
}

/// Removes a direct flow, which has no reply entry, if it has been idle for too long. Its key is
/// `Scratch::other`.
///
/// An assured one gives way before its time-out: no answer was seen, so anybody who forges two
/// packets makes one.
#[inline(always)]
fn look_at_direct<F: Family>(scratch: *mut Scratch<F::Address>, request: *mut Flow<F::Address>) {
    let Some(sweep) = GC_PASS.get_ptr(0) else { return };
    let (key, room) = (borrow(place!(const scratch.other)), place!(mut scratch.flow_key));
    let state = get!(request.state);
    let mut limit = super::timeout(&get!(sweep.timeouts), key.protocol, state, state);
    let patience = patience(get!(request.address_delta)) * clock::hz();
    if state & ASSURED != 0 && patience < limit {
        limit = patience;
    }
    // A second has no length until an agent has measured it.
    if limit == 0 || clock::since(get!(request.last), get!(scratch.port_search.now)) <= limit {
        return;
    }
    let former = claim(request);
    if former == CLAIMED {
        return;
    }
    // If the entry was removed before the claim, it belongs to another flow by now; a packet may
    // have renewed it, too.
    if FlowTable::<F>::new().find_in(key, room) != request
        || clock::since(get!(request.last), get!(scratch.port_search.now)) <= limit
    {
        give_back(request, former);
        return;
    }
    // A packet that finds it meanwhile takes the slow path.
    set!(request.state |= MARKED);
    remove_alone::<F>(request, key, room);
}

/// Removes a request entry that has no reply entry.
#[inline(always)]
pub fn remove_alone<F: Family>(
    request: *mut Flow<F::Address>,
    key: &Tuple<F::Address>,
    room: *mut FlowKey<F::Address>,
) {
    directory::leave::<F>(request);
    counters::end(request.cast_const());
    FlowTable::<F>::new().remove_in(key, room);
}

/// The [`look`] of a family, as a callback of `bpf_loop`.
#[inline(always)]
fn turn<F: Family>() -> *mut c_void {
    if F::V6 { look6 as *mut c_void } else { look4 as *mut c_void }
}

extern "C" fn look4(_: u64, _: *mut c_void) -> i64 {
    look::<V4>()
}

extern "C" fn look6(_: u64, _: *mut c_void) -> i64 {
    look::<V6>()
}

/// Removes the flow that holds the port of the reply entry in `scratch`, if it is a TCP connection
/// that has ended, was never established, or has left its port behind, or a flow of datagrams that
/// is unassured.
#[inline(always)]
pub fn take_over<F: Family>(scratch: *mut Scratch<F::Address>) -> bool {
    let (key, request_key, room) =
        (borrow(place!(const scratch.key)), place!(mut scratch.other), place!(mut scratch.flow_key));
    let table = FlowTable::<F>::new();
    let reply = table.find_in(key, room);
    if reply.is_null() {
        // The entry has been removed meanwhile.
        return false;
    }
    name_counterpart(reply, key.protocol, request_key);
    let own = table::is_counterpart_in_place(place!(const scratch.reply), request_key);
    if own {
        // The port belongs to the entry that is about to be overwritten.
        return false;
    }
    let request = table.find_in(borrow(request_key), room);
    let (now, second) = (get!(scratch.port_search.now), clock::hz());
    if second == 0 {
        return false;
    }
    if request.is_null() || !table::is_counterpart_in_place(request, key) {
        // The request entry leads elsewhere. (A request entry that is about to be inserted follows
        // at once.)
        if idle::<F>(reply, reply, now) < AFTER_FIN * second {
            return false;
        }
        let former = claim(reply);
        if former == CLAIMED {
            return false;
        }
        // The same check as below.
        if table.find_in(key, room) != reply || idle::<F>(reply, reply, now) < AFTER_FIN * second {
            give_back(reply, former);
            return false;
        }
        counters::end(reply.cast_const());
        table.remove_in(key, room);
        return true;
    }
    let (states, own, other) =
        ((get!(request.state), get!(reply.state)), get!(request.numbers), get!(reply.numbers));
    let after = if key.protocol == PROTOCOL_UDP {
        if states.0 & ASSURED != 0 {
            return false;
        }
        AFTER_DATAGRAM
    } else if (states.0 | states.1) & RST != 0 {
        AFTER_RST
    } else if states.0 & ASSURED == 0 {
        AFTER_SYN
    } else if key.protocol == PROTOCOL_TCP && numbers::is_over(states, own, other) {
        AFTER_FIN
    } else {
        return false;
    };
    if idle::<F>(request, reply, now) < after * second {
        return false;
    }
    let former = claim(reply);
    if former == CLAIMED {
        return false;
    }
    set!(scratch.claimed[1] = former);
    // The numbers for the ACK that answers the SYN.
    if key.protocol == PROTOCOL_TCP {
        let half_open = states.0 & ASSURED == 0 && states.1 & ANSWERED != 0;
        set!(scratch.reply.numbers = if half_open { numbers::half_open(own, former) } else { former });
    }
    let former = claim(request);
    if former == CLAIMED {
        // Another CPU is writing a new flow over it.
        give_back(reply, get!(scratch.claimed[1]));
        return false;
    }
    set!(scratch.claimed[0] = former);
    // The pointer is hidden from the compiler, which would otherwise keep the words of the keys
    // above on the stack.
    let scratch = opaque(scratch as u64) as *mut Scratch<F::Address>;
    let (key, request_key, room) =
        (borrow(place!(const scratch.key)), place!(mut scratch.other), place!(mut scratch.flow_key));
    // If another CPU removed the entries before the claim, they belong to other flows by now.
    if table.find_in(key, room) != reply
        || table.find_in(borrow(request_key), room) != request
        || !table::is_counterpart_in_place(reply, request_key)
        || !table::is_counterpart_in_place(request, key)
    {
        give_back(reply, get!(scratch.claimed[1]));
        give_back(request, get!(scratch.claimed[0]));
        return false;
    }
    remove::<F>(request, request_key, reply, key, room);
    true
}

/// Writes the key of an entry's counterpart, field by field: the stack of a callback has no room
/// for a tuple.
#[inline(always)]
pub fn name_counterpart<A: Address>(entry: *const Flow<A>, protocol: u32, key: *mut Tuple<A>) {
    set!(key.source = get!(entry.destination));
    set!(key.destination = get!(entry.source));
    set!(key.ports = get!(entry.ports).reversed());
    set!(key.protocol = protocol);
}

/// Returns the jiffies since the last packet of a flow.
#[inline(always)]
fn idle<F: Family>(request: *const Flow<F::Address>, reply: *const Flow<F::Address>, now: u32) -> u32 {
    let (one, other) = (clock::since(get!(request.last), now), clock::since(get!(reply.last), now));
    if one < other { one } else { other }
}

/// Removes both entries of a flow. They are marked first: a packet that finds one meanwhile takes
/// the slow path. The request entry is removed first: without it no packet uses the pair.
#[inline(always)]
pub fn remove<F: Family>(
    request: *mut Flow<F::Address>,
    request_key: *const Tuple<F::Address>,
    reply: *mut Flow<F::Address>,
    reply_key: &Tuple<F::Address>,
    room: *mut FlowKey<F::Address>,
) {
    set!(request.state |= MARKED);
    set!(reply.state |= MARKED);
    directory::leave::<F>(request);
    counters::end(request.cast_const());
    counters::end(reply.cast_const());
    let table = FlowTable::<F>::new();
    table.remove_in(borrow(request_key), room);
    table.remove_in(reply_key, room);
}
