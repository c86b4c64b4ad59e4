//! SYNs on flows that exist: whether one is a new attempt to open the connection, or nobody knows
//! that connection any more.

use traffic_policy_ebpf::{
    abi::{Address, Flow},
    tcp::{
        ANSWERED, FIN, flag,
        numbers::{self, Segment},
    },
};

use crate::datapath::clock;

/// A SYN with another number is a new attempt if nothing has come for so long, as a part of a
/// second. Before, it may be a stranger's, and the answer to the first one is on its way.
const NEW_ATTEMPT: u32 = 4;
/// Seconds without an answer after which nobody is there who knows a connection. A host that does
/// answers a SYN by an ACK (RFC 9293 section 3.10.7.4); SYNs are sent again after 1, 3, 7 …
/// seconds.
const SILENCE: u32 = 3;

/// Notes a SYN of a flow that is not assured; false: it is not the one whose answer is awaited, or
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
        // Its endpoint may await the ACK still.
        set!(reply.numbers = numbers::half_open(get!(entry.numbers), get!(reply.numbers)));
    }
    set!(entry.numbers = syn.opening());
    if get!(reply.packets).count() == 0 {
        set!(reply.bytes = syn.opening());
    }
    set!(reply.state &= !ANSWERED);
    true
}

/// Jiffies since a SYN came on an assured flow; `None` if none did, or something that belongs to
/// the flow came after it.
#[inline(always)]
fn unanswered_for<A: Address>(request: *const Flow<A>, reply: *const Flow<A>) -> Option<u32> {
    let now = clock::jiffies();
    let (asked, request_last, reply_last) =
        (u32::from_ne_bytes(get!(request.mac_tail)), get!(request.last), get!(reply.last));
    let since = now.wrapping_sub(asked);
    if asked == 0 || now.wrapping_sub(request_last) < since || now.wrapping_sub(reply_last) < since {
        return None;
    }
    Some(since)
}

/// Whether nobody knows an assured flow's connection any more, told by a SYN on it: [`SILENCE`]
/// after an earlier one to which nobody has said anything. Notes the first such SYN.
#[inline(always)]
pub fn after_syn<A: Address>(request: *mut Flow<A>, reply: *const Flow<A>) -> bool {
    match unanswered_for(request, reply) {
        Some(time) => is_silence(time),
        None => {
            // Never 0, which stands for no SYN.
            set!(request.mac_tail = (clock::jiffies() | 1).to_ne_bytes());
            false
        }
    }
}

#[inline(always)]
fn is_silence(time: u32) -> bool {
    let second = clock::hz();
    second != 0 && time >= SILENCE * second
}

/// Takes over the numbers of a segment that does not fit an assured flow, if nothing has since a
/// SYN came: its endpoint had forgotten the connection and has accepted another one. Returns
/// whether it does.
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
