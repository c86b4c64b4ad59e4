//! UDP flows that are not assured: when they are more than a question and its answer, and how
//! rarely one-way ones have to be looked at.
//!
//! The low half of both entries' `numbers` has the jiffies when the flow began, the high half of
//! the request entry's those when it is looked at next.

use traffic_policy_ebpf::{
    abi::{Address, Flow, kind},
    tcp::{ANSWERED, ASSURED},
};

use crate::datapath::{barrier::compare_exchange, clock, flow::recycle::CLAIMED};

/// Seconds after the first datagram from which on a datagram of either side, once there was an
/// answer, makes the flow a stream: as conntrack's `stream_ts`.
/// <https://github.com/torvalds/linux/blob/v6.12/net/netfilter/nf_conntrack_proto_udp.c#L101>
const STREAM: u32 = 2;

/// Seconds since its last datagram for which a stream is in use: `nf_conntrack_udp_timeout`, after
/// which conntrack forgets it.
const IN_USE: u32 = 30;

/// Jiffies of the longest second.
const LONGEST_SECOND: u32 = 1000;

/// Whether a flow that is not assured began so long ago that it is more than a question and its
/// answer. `entry`: either of its entries.
#[inline(always)]
pub fn is_stream<A: Address>(entry: *const Flow<A>) -> bool {
    clock::jiffies().wrapping_sub(get!(entry.numbers) as u32) > STREAM * clock::hz()
}

/// Whether a client's datagrams of a flow that is not assured span as long, and the last one came a
/// short time ago.
#[inline(always)]
pub fn is_stream_in_use<A: Address>(request: *const Flow<A>) -> bool {
    let (began, last) = (get!(request.numbers) as u32, get!(request.last));
    last.wrapping_sub(began) > STREAM * clock::hz()
        && clock::jiffies().wrapping_sub(last) <= IN_USE * clock::hz()
}

/// Whether a datagram of the endpoint shows that its flow is a stream: the flow is not assured, was
/// answered before, and began more than [`STREAM`] seconds ago.
#[inline(always)]
pub fn may_be_stream<A: Address>(reply: *const Flow<A>) -> bool {
    get!(reply.state) & (ASSURED | ANSWERED) == ANSWERED && is_stream(reply)
}

/// Whether datagrams of a client need nothing but their translation, though their flow is not
/// assured: it was looked at in the last second. One-way protocols (syslog, statsd, RTP) never have
/// another state.
#[inline(always)]
pub fn is_looked_at<A: Address>(request: *const Flow<A>, state: u8, now: u32) -> bool {
    let next_look = (get!(request.numbers) >> 32) as u32;
    state == 0
        && matches!(get!(request.kind), kind::FORWARD | kind::DELIVER)
        && next_look.wrapping_sub(now).wrapping_sub(1) < LONGEST_SECOND
}

/// Notes that a flow which is not assured is to be looked at again in a second.
#[inline(always)]
pub fn look_again<A: Address>(request: *mut Flow<A>) {
    let began = get!(request.numbers);
    // An even number is not that of [`CLAIMED`].
    let next_look = clock::jiffies().wrapping_add(clock::hz()) & !1;
    if began != CLAIMED {
        compare_exchange(
            place!(mut request.numbers),
            began,
            (began as u32) as u64 | (next_look as u64) << 32,
        );
    }
}
