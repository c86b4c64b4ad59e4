//! SYNs on existing flows: whether one is a new attempt to open the connection, or neither end
//! knows that connection any more.

use traffic_policy_ebpf::{
    abi::{Address, Flow, Tail},
    tcp::{
        ANSWERED, FIN, flag,
        numbers::{self, Segment},
    },
};

use crate::datapath::clock;

/// The fraction of a second without a packet after which a SYN with another number is a new
/// attempt. Earlier, it may be forged, and the answer to the first one may still arrive.
const NEW_ATTEMPT: u32 = 4;
/// The seconds without an answer after which neither end knows the connection any more. A host that
/// knows it answers a SYN by an ACK (RFC 9293 section 3.10.7.4); SYNs are retransmitted after 1, 3,
/// 7 … seconds.
const SILENCE: u32 = 3;

/// Notes a SYN of an unassured flow. False: it is not the SYN whose answer is awaited or
/// acknowledged.
#[inline(always)]
pub fn is_attempt<A: Address>(entry: *mut Flow<A>, reply: *mut Flow<A>, syn: &Segment) -> bool {
    if get!(entry.numbers) == syn.opening() {
        return true;
    }
    let (now, second) = (clock::jiffies(), clock::hz());
    let quiet = if get!(reply.state) & ANSWERED == 0 { second / NEW_ATTEMPT } else { SILENCE * second };
    if now.wrapping_sub(get!(entry.last)) < quiet || now.wrapping_sub(get!(reply.last)) < quiet {
        return false;
    }
    if get!(reply.state) & ANSWERED != 0 {
        // The endpoint of the earlier attempt may still await the ACK.
        set!(reply.numbers = numbers::half_open(get!(entry.numbers), get!(reply.numbers)));
    }
    set!(entry.numbers = syn.opening());
    if get!(reply.packets).count() == 0 {
        set!(reply.bytes = syn.opening());
    }
    set!(reply.state &= !ANSWERED);
    true
}

/// Returns the jiffies since a SYN came on an assured flow; `None` if none did, or a packet of the
/// flow came after it.
#[inline(always)]
fn unanswered_for<A: Address>(request: *const Flow<A>, reply: *const Flow<A>) -> Option<u32> {
    let now = clock::jiffies();
    let (asked, request_last, reply_last) = (get!(request.tail).syn(), get!(request.last), get!(reply.last));
    let since = now.wrapping_sub(asked);
    if asked == 0 || now.wrapping_sub(request_last) < since || now.wrapping_sub(reply_last) < since {
        return None;
    }
    Some(since)
}

/// Whether neither end knows an assured flow's connection any more, as shown by a SYN on it: at
/// least [`SILENCE`] after an earlier one that remained unanswered. Notes the first such SYN.
#[inline(always)]
pub fn after_syn<A: Address>(request: *mut Flow<A>, reply: *const Flow<A>) -> bool {
    match unanswered_for(request, reply) {
        Some(time) => is_silence(time),
        None => {
            // Never 0, which means that no SYN came.
            set!(request.tail = Tail::of_syn(clock::jiffies() | 1));
            false
        }
    }
}

#[inline(always)]
fn is_silence(time: u32) -> bool {
    let second = clock::hz();
    second != 0 && time >= SILENCE * second
}

/// Takes over the numbers of a segment that does not fit an assured flow, if no packet of the flow
/// came after a SYN: its endpoint had forgotten the connection and has accepted another one.
/// Returns whether it does.
#[inline(always)]
pub fn goes_on_anew<A: Address>(
    entry: *mut Flow<A>,
    request: *const Flow<A>,
    reply: *const Flow<A>,
    segment: &Segment,
) -> bool {
    if segment.flags & (flag::SYN | flag::RST | flag::ACK) != flag::ACK {
        return false;
    }
    let anew = unanswered_for(request, reply).is_some_and(is_silence);
    if anew {
        set!(entry.numbers = segment.numbers);
        set!(entry.state &= !FIN);
    }
    anew
}
