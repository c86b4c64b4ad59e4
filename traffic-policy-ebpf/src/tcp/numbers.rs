//! Sequence and acknowledgement numbers: whether a segment belongs to the conversation with its
//! addresses and ports.
//!
//! Each entry of a TCP flow keeps the numbers of the last segment of its direction, and the largest
//! window that its direction has offered. As RFC 5961 assumes, an attacker that sees no packet of a
//! connection cannot know them: a segment that does not fit is forwarded, the host decides, and
//! nothing changes here. A segment fits if it lies near the last one, or in the [windows][Windows]
//! of both hosts, as a host itself decides (RFC 9293 section 3.10.7.4, RFC 5961 section 5.2): many
//! megabytes may be in flight in both directions at once, and be lost before they arrive here. An
//! RST has to fit more closely: with windows of 64 KiB, one blind guess in 2^31 resets a flow.
//! Larger windows need fewer guesses, as in conntrack: a forged ACK without data that lies in both
//! windows is taken for the last segment, and an RST with the same numbers then fits. If both
//! windows are 4 MiB and the connection is silent, that takes about 2^21 guesses. Modelled on
//! `tcp_in_window` and `td_maxack` of
//! <https://github.com/torvalds/linux/blob/v6.12/net/netfilter/nf_conntrack_proto_tcp.c>.
//!
//! | the flow is | request entry: high half, low half | reply entry |
//! |---|---|---|
//! | opened | number of the SYN, bytes of data that it carried (RFC 7413) | of an earlier conversation, or 0 |
//! | answered | the same | number of the SYN-ACK, bytes that the endpoint has sent after it |
//! | assured | sequence and acknowledgement number of the last segment | the same |

use super::{ANSWERED, FIN, RST, closing, flag};
use crate::abi::Packets;

/// Two numbers, the first in the high half, as eight bytes of a TCP header read in network byte
/// order.
pub type Numbers = u64;

/// Flags, numbers and length of a TCP segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    /// See [`flag`].
    pub flags: u8,
    /// The sequence and acknowledgement number.
    pub numbers: Numbers,
    /// The bytes of data.
    pub length: u32,
}

/// An entry after a segment of its direction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct After {
    pub state: u8,
    pub numbers: Numbers,
    /// Whether the segment belongs to this conversation, as far as its numbers show.
    pub fits: bool,
}

/// The largest distance from the last segment to another one, in either number and direction: the
/// longest possible segment, or a few reordered ones.
const NEAR: i32 = 1 << 16;
/// The largest window (RFC 7323 section 2.3).
const WINDOW: i32 = 1 << 30;
/// The largest advance of an established packet that [`continues`] accepts: two of the longest
/// segments.
const ADVANCE: u64 = 0x0001_ffff_0001_ffff;

/// The largest windows that the two directions have offered, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Windows {
    /// The window of a segment's own direction: it bounds what the other side may have sent, and so
    /// what this one acknowledges.
    pub own: u32,
    /// The window of the other direction: it bounds what this side may have sent.
    pub other: u32,
}

impl Windows {
    #[inline(always)]
    pub const fn of(own: Packets, other: Packets) -> Self {
        Self { own: own.offered(other), other: other.offered(own) }
    }

    /// Returns a window as the limit of a distance. It is at least `NEAR`, until a window is known,
    /// and for a longest segment that the window's end cuts: `MAXACKWINCONST` of conntrack.
    #[inline(always)]
    const fn limit(window: u32) -> i32 {
        let window = window.cast_signed();
        if window < NEAR { NEAR } else { window + 1 }
    }
}

#[inline(always)]
pub const fn numbers(sequence: u32, acknowledgement: u32) -> Numbers {
    (sequence as u64) << 32 | acknowledgement as u64
}

#[inline(always)]
pub const fn sequence(numbers: Numbers) -> u32 {
    (numbers >> 32) as u32
}

#[inline(always)]
pub const fn acknowledgement(numbers: Numbers) -> u32 {
    numbers as u32
}

/// The distance of `number` beyond `from`; negative if it is before it.
#[inline(always)]
const fn beyond(number: u32, from: u32) -> i32 {
    number.wrapping_sub(from).cast_signed()
}

#[inline(always)]
const fn within(difference: i32, limit: i32) -> bool {
    -limit < difference && difference < limit
}

/// Whether a segment is the next one of an established flow, or a repetition of the last: the only
/// check of the fast path. One subtraction serves both numbers; if it borrows, once in 4 GiB, the
/// slow path checks again.
#[inline(always)]
pub const fn continues(segment: Numbers, last: Numbers) -> bool {
    segment.wrapping_sub(last) & !ADVANCE == 0
}

/// Whether the sequence number of a segment is near that of the last one of its direction.
#[inline(always)]
pub const fn is_near(segment: &Segment, last: Numbers) -> bool {
    within(beyond(sequence(segment.numbers), sequence(last)), NEAR)
}

/// Whether `number` acknowledges a SYN or SYN-ACK with these numbers, and at most what was sent
/// after it.
#[inline(always)]
pub const fn acknowledges(number: u32, opening: Numbers) -> bool {
    number.wrapping_sub(sequence(opening)).wrapping_sub(1) <= acknowledgement(opening)
}

/// The sequence number after a SYN or SYN-ACK with these numbers and all that was sent after it.
#[inline(always)]
const fn sent_after(opening: Numbers) -> u32 {
    sequence(opening).wrapping_add(acknowledgement(opening)).wrapping_add(1)
}

impl Segment {
    #[inline(always)]
    const fn has(&self, flags: u8) -> bool {
        self.flags & flags != 0
    }

    /// The sequence number after the segment.
    #[inline(always)]
    const fn end(&self) -> u32 {
        sequence(self.numbers).wrapping_add(self.length).wrapping_add((self.flags & flag::FIN) as u32)
    }

    /// The numbers of an entry that this SYN or SYN-ACK creates.
    #[inline(always)]
    pub const fn opening(&self) -> Numbers {
        numbers(sequence(self.numbers), self.length)
    }
}

/// Whether a connection with these entries has ended, so that a SYN opens a new one and its port is
/// free: it was reset, or each side has acknowledged the other's FIN. Before that the last data may
/// still be in flight, or be retransmitted.
#[inline(always)]
pub const fn is_over(states: (u8, u8), own: Numbers, other: Numbers) -> bool {
    let (state, other_state) = states;
    closing(state, other_state)
        && ((state | other_state) & RST != 0
            || acknowledgement(own) == sequence(other) && acknowledgement(other) == sequence(own))
}

/// Returns an entry of an assured flow after a segment of its direction; `other`: the numbers of
/// the other direction.
///
/// The sender of an RST sends nothing new afterwards, so a segment with something new shows that
/// the RST was forged; the same holds for data beyond a FIN. A segment from before either may
/// arrive late, or again.
#[inline(always)]
pub const fn assured(state: u8, own: Numbers, other: Numbers, windows: Windows, segment: &Segment) -> After {
    let unchanged = After { state, numbers: own, fits: false };
    let (number, ack) = (sequence(segment.numbers), acknowledgement(segment.numbers));
    let (ahead, acked) = (beyond(number, sequence(own)), beyond(ack, acknowledgement(own)));
    if segment.has(flag::RST) {
        // An answer to a challenge (RFC 5961 section 3.2), or to a segment for a closed socket, has
        // the number that the other side acknowledged last. A host that closes with unread data
        // sends it at the end of all data in flight.
        let train = segment.has(flag::ACK) && 0 <= ahead && ahead < NEAR && 0 <= acked && acked < NEAR;
        return if number == acknowledgement(other) || train {
            let last = if ahead > 0 { number } else { sequence(own) };
            After { state: state | RST, numbers: numbers(last, acknowledgement(own)), fits: true }
        } else {
            unchanged
        };
    }
    if segment.has(flag::SYN) || !segment.has(flag::ACK) {
        return unchanged;
    }
    let near = within(ahead, NEAR) && within(acked, NEAR);
    // The numbers that this side may send follow from what the other side has acknowledged and
    // offered, and those that it may acknowledge from what the other side has sent. The last
    // segment of this side itself is no measure: much may have been lost after it.
    let (sendable, acknowledgeable) = (Windows::limit(windows.other), Windows::limit(windows.own));
    let in_window = within(beyond(number, acknowledgement(other)), sendable)
        && within(beyond(ack, sequence(other)), acknowledgeable);
    // An entry may be far behind. Then one number is unchanged, or equals that of the other side.
    // If both equal those of the other side, it is the next segment, however old this entry's
    // numbers are.
    let (seen, expected) = (number == acknowledgement(other), ack == sequence(other));
    let exact = ahead == 0 || acked == 0 || seen || expected;
    if !(near || in_window || exact && within(ahead, WINDOW) && within(acked, WINDOW) || seen && expected) {
        return unchanged;
    }
    // A late segment changes no number. A segment further behind than any late one shows that the
    // entry's numbers are wrong.
    let late = near || in_window && -sendable < ahead && -acknowledgeable < acked;
    // The number of an entry with a FIN is the one after it, and does not go back.
    let number = if ahead > 0 || !late && state & FIN == 0 { number } else { sequence(own) };
    let ack = if acked > 0 || !late { ack } else { acknowledgement(own) };
    let last = numbers(number, ack);
    let end = beyond(segment.end(), sequence(own));
    let state = if acked > 0 || segment.length != 0 && end > 0 { state & !RST } else { state };
    if segment.has(flag::FIN) && end >= 0 {
        let numbers = numbers(segment.end(), acknowledgement(last));
        return After { state: state | FIN, numbers, fits: true };
    }
    let state = if segment.length != 0 && end > 0 { state & !FIN } else { state };
    After { state, numbers: last, fits: true }
}

/// Whether a segment with these numbers may be the next one of a connection of which the host that
/// it is for says what it awaits (`rcv_nxt`), what of its own was acknowledged last (`snd_una`),
/// and what it sends next (`snd_nxt`).
#[inline(always)]
pub const fn is_awaited(segment: Numbers, rcv_nxt: u32, snd_una: u32, snd_nxt: u32) -> bool {
    let ack = acknowledgement(segment);
    within(beyond(sequence(segment), rcv_nxt), NEAR)
        && beyond(ack, snd_una) > -NEAR
        && beyond(ack, snd_nxt) <= 0
}

/// Whether a segment of the client is the ACK of the SYN-ACK, which proves that the client's
/// address is genuine (RFC 9293 section 3.10.7.4).
#[inline(always)]
pub const fn assures(segment: &Segment, opening: Numbers, answer: Numbers) -> bool {
    let ahead = beyond(sequence(segment.numbers), sequence(opening));
    segment.flags & (flag::SYN | flag::RST | flag::ACK) == flag::ACK
        && acknowledges(acknowledgement(segment.numbers), answer)
        && 0 < ahead
        && ahead < 2 * NEAR
}

/// Returns the request entry after `segment`, which [`assures`] the flow: as [`assured`] with the
/// segment's own numbers as the last ones. An RST before it was invalid, because the connection
/// continues.
#[inline(always)]
pub const fn assuring(state: u8, segment: &Segment) -> After {
    let state = state & !RST;
    if segment.has(flag::FIN) {
        let numbers = numbers(segment.end(), acknowledgement(segment.numbers));
        return After { state: state | FIN, numbers, fits: true };
    }
    After { state, numbers: segment.numbers, fits: true }
}

/// The numbers of the reply entry when `segment` assures the flow.
#[inline(always)]
pub const fn assured_reply(segment: &Segment, answer: Numbers) -> Numbers {
    numbers(sent_after(answer), sequence(segment.numbers))
}

/// The numbers of an endpoint that still awaits the ACK of its SYN-ACK when another connection gets
/// the tuple: it answers that connection's SYN with the numbers that it expects (RFC 9293
/// section 3.10.7.4). An entry that is unassured has a length in the place of the second number.
#[inline(always)]
pub const fn half_open(opening: Numbers, answer: Numbers) -> Numbers {
    numbers(sent_after(answer), sequence(opening).wrapping_add(1))
}

/// Whether an RST of the client ends an unassured flow.
#[inline(always)]
pub const fn resets_opening(segment: &Segment, opening: Numbers) -> bool {
    acknowledges(sequence(segment.numbers), opening)
}

/// Returns the reply entry of an unassured flow after a segment of the endpoint. `fits` is false
/// for a segment of another conversation: until the client has proved its address, the tuple may
/// belong to a connection without a Service.
#[inline(always)]
pub const fn unassured(
    answered: bool,
    state: u8,
    own: Numbers,
    opening: Numbers,
    segment: &Segment,
) -> After {
    let unchanged = After { state, numbers: own, fits: false };
    let number = sequence(segment.numbers);
    let acknowledges_syn = segment.has(flag::ACK) && acknowledges(acknowledgement(segment.numbers), opening);
    if segment.has(flag::RST) {
        return if acknowledges_syn || answered && acknowledges(number, own) {
            After { state: state | RST, numbers: own, fits: true }
        } else {
            unchanged
        };
    }
    if segment.has(flag::SYN) {
        if !acknowledges_syn {
            return unchanged;
        }
        // A retransmitted SYN-ACK may have another number: that of a SYN cookie.
        let again = answered && number == sequence(own);
        let numbers = if again { own } else { segment.opening() };
        return After { state: (state & !RST) | ANSWERED, numbers, fits: true };
    }
    let ahead = beyond(number, sequence(own));
    if !answered {
        // The last segments of an earlier conversation with this tuple: a host in TIME-WAIT answers
        // a SYN that it takes for an old one.
        let acked = beyond(acknowledgement(segment.numbers), acknowledgement(own));
        return After { state, numbers: own, fits: own != 0 && within(ahead, NEAR) && within(acked, NEAR) };
    }
    if !acknowledges_syn || ahead < 0 || ahead >= NEAR {
        return unchanged;
    }
    // The endpoint need not wait for the client's ACK: RFC 7413 section 4.2.
    let sent = beyond(segment.end(), sequence(own)) - 1;
    let longer = sent > 0 && sent as u32 > acknowledgement(own);
    let numbers = if longer { numbers(sequence(own), sent as u32) } else { own };
    let fin = if segment.has(flag::FIN) { FIN } else { 0 };
    After { state: (state & !RST) | fin, numbers, fits: true }
}

#[cfg(test)]
mod tests;
