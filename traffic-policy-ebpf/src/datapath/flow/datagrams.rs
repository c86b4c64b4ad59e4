//! Unassured UDP flows: when they count as a stream rather than a question and its answer, and how
//! rarely one-way flows have to be examined.
//!
//! The low half of both entries' `numbers` holds the jiffies when the flow began, the high half of
//! the request entry's `numbers` the jiffies of its next examination.

use traffic_policy_ebpf::{
    abi::{Address, Flow, kind},
    tcp::{ANSWERED, ASSURED},
};

use crate::datapath::{barrier::compare_exchange, clock, flow::claim::CLAIMED};

/// The seconds after the first datagram after which a datagram of either side, once there was an
/// answer, makes the flow a stream: as conntrack's `stream_ts`.
/// <https://github.com/torvalds/linux/blob/v6.12/net/netfilter/nf_conntrack_proto_udp.c#L101>
const STREAM: u32 = 2;

/// The seconds since its last datagram for which a stream is in use: `nf_conntrack_udp_timeout`,
/// after which conntrack removes it.
const IN_USE: u32 = 30;

/// The most jiffies by which a flow's last datagram is taken to be before its first one. A flow
/// that lasts for 2^32 jiffies less these, 49 days at 1,000 a second, begins anew.
const BEFORE: u32 = 1 << 20;

/// The jiffies of a second at the highest HZ.
const LONGEST_SECOND: u32 = 1000;

/// Whether an unassured flow began so long ago that it is more than a question and its answer.
/// `entry`: either of its entries.
#[inline(always)]
pub fn is_stream<A: Address>(entry: *const Flow<A>) -> bool {
    clock::jiffies().wrapping_sub(get!(entry.numbers) as u32) > STREAM * clock::hz()
}

/// Whether a client's datagrams of an unassured flow span more than [`STREAM`] seconds, and the
/// last one came recently.
#[inline(always)]
pub fn is_stream_in_use<A: Address>(request: *const Flow<A>) -> bool {
    let (began, last) = (get!(request.numbers) as u32, get!(request.last));
    last.wrapping_sub(began) > STREAM * clock::hz()
        && clock::jiffies().wrapping_sub(last) <= IN_USE * clock::hz()
}

/// Whether a client's datagrams of an unassured flow span more than [`STREAM`] seconds.
#[inline(always)]
pub fn spans_stream<A: Address>(request: &Flow<A>) -> bool {
    // Times that other CPUs have noted may be a little before the first.
    let span = request.last.wrapping_sub(request.numbers as u32);
    span.wrapping_add(BEFORE) > STREAM * clock::hz() + BEFORE
}

/// Whether a datagram of the endpoint shows that its flow is a stream: the flow is unassured, was
/// answered before, and began more than [`STREAM`] seconds ago.
#[inline(always)]
pub fn may_be_stream<A: Address>(reply: *const Flow<A>) -> bool {
    get!(reply.state) & (ASSURED | ANSWERED) == ANSWERED && is_stream(reply)
}

/// Whether datagrams of a client need nothing but their translation although their flow is
/// unassured: it was examined in the last second. One-way protocols (syslog, statsd, RTP) never
/// reach another state.
#[inline(always)]
pub fn is_looked_at<A: Address>(request: *const Flow<A>, state: u8, now: u32) -> bool {
    let next_look = (get!(request.numbers) >> 32) as u32;
    state == 0
        && matches!(get!(request.kind), kind::FORWARD | kind::DELIVER)
        && next_look.wrapping_sub(now).wrapping_sub(1) < LONGEST_SECOND
}

/// Notes that an unassured flow is to be examined again in a second.
#[inline(always)]
pub fn look_again<A: Address>(request: *mut Flow<A>) {
    let began = get!(request.numbers);
    // An even number never equals the high half of [`CLAIMED`].
    let next_look = clock::jiffies().wrapping_add(clock::hz()) & !1;
    if began != CLAIMED {
        compare_exchange(
            place!(mut request.numbers),
            began,
            (began as u32) as u64 | (next_look as u64) << 32,
        );
    }
}
