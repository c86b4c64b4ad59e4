//! Sequence and acknowledgement numbers: whether a segment belongs to the conversation whose addresses and ports it has.
//!
//! Each entry of a TCP flow keeps the numbers of the last segment of its direction. Who sees no packet of a connection cannot
//! know them, as RFC 5961 has it: what does not fit them is sent on, for the host to judge, and changes nothing here. The rules
//! are narrower than a host's own, whose window is not known here: a guess that ends a flow is one in 2^31, as a guess that
//! a host believes. What they are modelled on: `tcp_in_window` and `td_maxack` of
//! <https://github.com/torvalds/linux/blob/v6.12/net/netfilter/nf_conntrack_proto_tcp.c>.
//!
//! | the flow is | request entry: high half, low half | reply entry |
//! |---|---|---|
//! | opened | number of the SYN, bytes of data that it carried (RFC 7413) | of an earlier conversation, or 0 |
//! | answered | the same | number of the SYN-ACK, bytes that the endpoint has sent after it |
//! | assured | sequence and acknowledgement number of the last segment | the same |

use super::{ANSWERED, FIN, RST, closing, flag};

/// Two numbers: the first in the high half, as eight bytes of a TCP header read in network byte order.
pub type Numbers = u64;

/// Flags, numbers and length of a TCP segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    /// See [`flag`].
    pub flags: u8,
    /// Sequence and acknowledgement number.
    pub numbers: Numbers,
    /// Bytes of data.
    pub length: u32,
}

/// An entry after a segment of its direction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct After {
    pub state: u8,
    pub numbers: Numbers,
    /// The segment is of this conversation, as far as its numbers tell.
    pub fits: bool,
}

/// Largest distance from the last segment to another one, in either number and direction: the longest possible segment, or a
/// few reordered ones.
const NEAR: i32 = 1 << 16;
/// The largest window (RFC 7323 section 2.3).
const WINDOW: i32 = 1 << 30;
/// Largest advance of an established packet that [`continues`] accepts: two of the longest segments.
const ADVANCE: u64 = 0x0001_ffff_0001_ffff;

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

/// Distance of `number` beyond `from`; negative if it is before it.
#[inline(always)]
const fn beyond(number: u32, from: u32) -> i32 {
    number.wrapping_sub(from).cast_signed()
}

#[inline(always)]
const fn within(difference: i32, limit: i32) -> bool {
    -limit < difference && difference < limit
}

/// Whether a segment is the next one of an established flow, or the same once more: all that the fast path asks. One subtraction
/// for both numbers; where it borrows, once in 4 GiB, the slow path looks again.
#[inline(always)]
pub const fn continues(segment: Numbers, last: Numbers) -> bool {
    segment.wrapping_sub(last) & !ADVANCE == 0
}

/// Whether `number` acknowledges a SYN or SYN-ACK of these numbers, and at most what was sent after it.
#[inline(always)]
pub const fn acknowledges(number: u32, opening: Numbers) -> bool {
    number.wrapping_sub(sequence(opening)).wrapping_sub(1) <= acknowledgement(opening)
}

impl Segment {
    #[inline(always)]
    const fn has(&self, flags: u8) -> bool {
        self.flags & flags != 0
    }

    /// The sequence number after it.
    #[inline(always)]
    const fn end(&self) -> u32 {
        sequence(self.numbers).wrapping_add(self.length).wrapping_add((self.flags & flag::FIN) as u32)
    }

    /// The numbers of an entry that this SYN or SYN-ACK makes.
    #[inline(always)]
    pub const fn opening(&self) -> Numbers {
        numbers(sequence(self.numbers), self.length)
    }
}

/// Whether a connection with these entries has ended, so that a SYN opens a new one and its port is free: it was reset, or each side
/// has acknowledged the other's FIN. Before that the last data may still be on its way, or come again.
#[inline(always)]
pub const fn is_over(states: (u8, u8), own: Numbers, other: Numbers) -> bool {
    let (state, other_state) = states;
    closing(state, other_state)
        && ((state | other_state) & RST != 0
            || acknowledgement(own) == sequence(other) && acknowledgement(other) == sequence(own))
}

/// An entry of an assured flow after a segment of its direction; `other`: the numbers of the other direction.
///
/// The sender of an RST has nothing new to say, so a segment that has shows that the RST was forged; data beyond a FIN likewise. A
/// segment from before either may come later, or again.
#[inline(always)]
pub const fn assured(state: u8, own: Numbers, other: Numbers, segment: &Segment) -> After {
    let unchanged = After { state, numbers: own, fits: false };
    let (number, ack) = (sequence(segment.numbers), acknowledgement(segment.numbers));
    let (ahead, acked) = (beyond(number, sequence(own)), beyond(ack, acknowledgement(own)));
    if segment.has(flag::RST) {
        // An answer to a challenge (RFC 5961 section 3.2), or to a segment for a socket that is gone, has the number that the
        // other side acknowledged last. A host that closes with unread data sends it at the end of all that is in flight.
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
    // Much was lost before it came here, or comes again: one number then is where it was, or where the other side is. Both, and it
    // is the next segment, however old this entry's numbers are.
    let (seen, expected) = (number == acknowledgement(other), ack == sequence(other));
    let exact = ahead == 0 || acked == 0 || seen || expected;
    if !(near || exact && within(ahead, WINDOW) && within(acked, WINDOW) || seen && expected) {
        return unchanged;
    }
    // Of an entry with a FIN, the number is that behind it, and does not go back.
    let number = if ahead > 0 || !near && state & FIN == 0 { number } else { sequence(own) };
    let ack = if acked > 0 || !near { ack } else { acknowledgement(own) };
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

/// Whether a segment of the client is the ACK of the SYN-ACK, which proves that it is where it says (RFC 9293 section 3.10.7.4).
#[inline(always)]
pub const fn assures(segment: &Segment, opening: Numbers, answer: Numbers) -> bool {
    let ahead = beyond(sequence(segment.numbers), sequence(opening));
    segment.flags & (flag::SYN | flag::RST | flag::ACK) == flag::ACK
        && acknowledges(acknowledgement(segment.numbers), answer)
        && 0 < ahead
        && ahead < 2 * NEAR
}

/// The request entry when `segment`, which [`assures`], has come: as [`assured`] with the segment's own numbers as the last ones. A reset
/// before it was none, since it goes on.
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
    let end = sequence(answer).wrapping_add(acknowledgement(answer)).wrapping_add(1);
    numbers(end, sequence(segment.numbers))
}

/// The numbers that an endpoint has which awaits the ACK of its SYN-ACK still, when another connection gets the tuple: to that one's SYN
/// it says what it expects (RFC 9293 section 3.10.7.4). An entry that is not assured has a length in the place of the second number.
#[inline(always)]
pub const fn half_open(opening: Numbers, answer: Numbers) -> Numbers {
    let end = sequence(answer).wrapping_add(acknowledgement(answer)).wrapping_add(1);
    numbers(end, sequence(opening).wrapping_add(1))
}

/// Whether an RST of the client ends a flow that is not assured.
#[inline(always)]
pub const fn resets_opening(segment: &Segment, opening: Numbers) -> bool {
    acknowledges(sequence(segment.numbers), opening)
}

/// The reply entry of a flow that is not assured after a segment of the endpoint; `fits` is false for what is none of this
/// conversation: until the client has proved where it is, the tuple may be that of a connection without a Service.
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
        // Sent again it may have another number: a SYN cookie's.
        let again = answered && number == sequence(own);
        let numbers = if again { own } else { segment.opening() };
        return After { state: (state & !RST) | ANSWERED, numbers, fits: true };
    }
    let ahead = beyond(number, sequence(own));
    if !answered {
        // The last words of an earlier conversation with this tuple: a TIME-WAIT answers a SYN that it takes for an old one.
        let acked = beyond(acknowledgement(segment.numbers), acknowledgement(own));
        return After { state, numbers: own, fits: own != 0 && within(ahead, NEAR) && within(acked, NEAR) };
    }
    if !acknowledges_syn || ahead < 0 || ahead >= NEAR {
        return unchanged;
    }
    // It need not wait for the client's ACK: RFC 7413 section 4.2.
    let sent = beyond(segment.end(), sequence(own)) - 1;
    let longer = sent > 0 && sent as u32 > acknowledgement(own);
    let numbers = if longer { numbers(sequence(own), sent as u32) } else { own };
    let fin = if segment.has(flag::FIN) { FIN } else { 0 };
    After { state: (state & !RST) | fin, numbers, fits: true }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const PSH: u8 = 8;
    const OWN: Numbers = numbers(0xffff_ff00, 5_000);
    const OTHER: Numbers = numbers(5_000, 0xffff_ff00);

    const fn segment(flags: u8, ahead: u32, acked: u32, length: u32) -> Segment {
        let numbers = numbers(sequence(OWN).wrapping_add(ahead), acknowledgement(OWN).wrapping_add(acked));
        Segment { flags, numbers, length }
    }

    fn after(state: u8, segment: &Segment) -> After {
        assured(state, OWN, OTHER, segment)
    }

    #[test]
    fn the_next_segment_continues_a_flow_and_no_other() {
        for (ahead, acked) in [(0, 0), (1448, 0), (0, 1448), (70_000, 70_000), (0x1_ffff, 0)] {
            assert!(continues(segment(0, ahead, acked, 0).numbers, OWN), "{ahead} {acked}");
        }
        for (ahead, acked) in [(0x2_0000, 0), (0, 0x2_0000), (u32::MAX, 0), (0, u32::MAX), (1 << 31, 1 << 31)]
        {
            assert!(!continues(segment(0, ahead, acked, 0).numbers, OWN), "{ahead} {acked}");
        }
    }

    #[test]
    fn a_retransmission_changes_nothing_but_what_it_acknowledges() {
        let again = segment(flag::ACK, 0_u32.wrapping_sub(1448), 700, 1448);
        assert_eq!(after(1, &again), After { state: 1, numbers: numbers(0xffff_ff00, 5_700), fits: true });
    }

    #[test]
    fn a_flow_is_followed_beyond_a_gap_and_back() {
        // Half a megabyte was lost before it came here; the receiver's acknowledgement jumps likewise.
        let gap = segment(flag::ACK, 500_000, 0, 1448);
        assert_eq!(after(1, &gap).numbers, gap.numbers);
        let jump = segment(flag::ACK, 0, 500_000, 0);
        assert_eq!(after(1, &jump).numbers, jump.numbers);
        let back = segment(flag::ACK, 0_u32.wrapping_sub(500_000), 0, 1448);
        assert_eq!(after(1, &back).numbers, back.numbers);
    }

    #[test]
    fn a_fin_stays_until_there_is_data_beyond_it() {
        let fin = after(1, &segment(flag::FIN | flag::ACK, 100, 0, 50));
        assert_eq!(fin, After { state: 1 | FIN, numbers: numbers(0xffff_ff97, 5_000), fits: true });
        let next =
            |ahead, length| assured(fin.state, fin.numbers, OTHER, &segment(flag::ACK, ahead, 0, length));
        for (what, ahead, length) in [("lost before", 0, 100), ("all of it", 100, 50), ("an ACK", 151, 0)] {
            assert_eq!(next(ahead, length).state, 1 | FIN, "{what}");
        }
        assert_eq!(next(151, 1).state, 1);
        // An ACK was faster than it.
        let own = numbers(sequence(OWN).wrapping_add(151), 5_000);
        assert_eq!(assured(1, own, OTHER, &segment(flag::FIN | flag::ACK, 100, 0, 50)).state, 1 | FIN);
    }

    #[test]
    fn a_reset_counts_at_the_acknowledged_number_or_at_the_end_of_a_train() {
        let counts = |flags, ahead, acked| after(1, &segment(flags, ahead, acked, 0)).state & RST != 0;
        assert!(counts(flag::RST, 0, 1 << 30), "it need not acknowledge anything");
        assert!(counts(flag::RST | flag::ACK, 60_000, 60_000));
        assert!(!counts(flag::RST, 1, 0));
        assert!(!counts(flag::RST | flag::ACK, 1 << 16, 0));
        assert!(!counts(flag::RST | flag::ACK, 1, 1 << 16));
        assert!(!counts(flag::RST | flag::ACK, u32::MAX, 0));
    }

    #[test]
    fn a_reset_is_forgotten_when_there_is_more_to_say_and_not_before() {
        let reset = after(1, &segment(flag::RST | flag::ACK, 3_000, 0, 0));
        assert_eq!(reset, After { state: 1 | RST, numbers: segment(0, 3_000, 0, 0).numbers, fits: true });
        let next = |ahead, acked, length| {
            assured(reset.state, reset.numbers, OTHER, &segment(flag::ACK, ahead, acked, length))
        };
        for (what, ahead, length) in [("overtaken", 1_552, 1_448), ("again", 0, 1_448), ("an ACK", 3_000, 0)]
        {
            assert_eq!(next(ahead, 0, length).state, 1 | RST, "{what}");
        }
        assert_eq!(next(3_000, 0, 1).state, 1, "it goes on");
        assert_eq!(next(3_000, 1, 0).state, 1, "it receives");
    }

    #[test]
    fn a_retransmission_far_behind_a_fin_leaves_it() {
        let fin = After { state: 1 | FIN, numbers: OWN, fits: true };
        let mut entry = fin;
        for behind in [500_000_u32, 498_552, 70_000, 1_448] {
            entry = assured(
                entry.state,
                entry.numbers,
                OTHER,
                &segment(flag::ACK, 0_u32.wrapping_sub(behind), 0, 1_448),
            );
            assert_eq!(entry, fin, "{behind} behind");
        }
    }

    #[test]
    fn a_half_open_endpoint_is_known_by_both_numbers() {
        let (opening, answer) = (numbers(u32::MAX, 0), numbers(7_000, 100));
        let former = half_open(opening, answer);
        assert_eq!(former, numbers(7_101, 0));
        let says = |number, ack| Segment { flags: flag::ACK, numbers: numbers(number, ack), length: 0 };
        let fits = |own, segment| unassured(false, 0, own, numbers(1 << 30, 0), &segment).fits;
        assert!(fits(former, says(7_101, 0)), "an ACK of the connection before");
        assert!(!fits(former, says(7_101, 1 << 30)), "of another one");
        let former = half_open(numbers(1 << 31, 0), answer);
        assert!(fits(former, says(7_101, (1 << 31) + 1)));
        assert!(!fits(former, says(7_101, 100)), "a length is no acknowledgement");
    }

    #[test]
    fn a_connection_is_over_when_both_fins_are_acknowledged() {
        let (own, other) = (numbers(1_000, 7_000), numbers(7_000, 1_000));
        let closed = (1 | FIN, 1 | FIN);
        assert!(is_over(closed, own, other));
        assert!(!is_over(closed, numbers(1_000, 6_999), other), "the last data may be lost");
        assert!(!is_over(closed, own, numbers(7_000, 900)));
        assert!(!is_over((1 | FIN, 1), own, other), "half closed");
        assert!(is_over((1, 1 | RST), numbers(1, 2), numbers(3, 4)));
    }

    #[test]
    fn numbers_that_were_lost_come_back() {
        let stale = numbers(1 << 31, 0);
        let next = Segment {
            flags: flag::ACK,
            numbers: numbers(acknowledgement(OTHER), sequence(OTHER)),
            length: 0,
        };
        assert_eq!(assured(1, stale, OTHER, &next), After { state: 1, numbers: next.numbers, fits: true });
    }

    proptest! {
        /// However far the right numbers are, wherever they are on the circle.
        #[test]
        fn who_is_off_in_both_numbers_changes_nothing(
            state: u8, own: u64, other: u64, flags: u8, length in 0_u32..65_536, there in 65_536_u32..0xffff_0000,
            back in 65_536_u32..0xffff_0000,
        ) {
            let numbers =
                numbers(sequence(own).wrapping_add(there), acknowledgement(own).wrapping_add(back));
            prop_assume!(sequence(numbers) != acknowledgement(other) && acknowledgement(numbers) != sequence(other));
            let segment = Segment { flags, numbers, length };
            prop_assert_eq!(assured(state, own, other, &segment), After { state, numbers: own, fits: false });
        }

        /// A segment touches FIN and RST only: it never assures, nor revives a flow whose endpoint is gone.
        #[test]
        fn segments_touch_fin_and_rst_only(state: u8, own: u64, other: u64, flags: u8, ahead: u16, length: u16) {
            let numbers = own.wrapping_add(u64::from(ahead) << 32);
            let after = assured(state, own, other, &Segment { flags, numbers, length: length.into() });
            prop_assert_eq!(after.state & !(FIN | RST), state & !(FIN | RST));
        }

        /// The shorter form for the segment that assures a flow agrees with the general one.
        #[test]
        fn what_assures_is_followed_as_any_other(
            rst: bool, fin: bool, psh: bool, opening: u64, answer: u64, ahead in 1_u32..0x2_0000, acked: u16, length: u16,
        ) {
            let answer = numbers(sequence(answer), acked.into());
            let numbers = numbers(
                sequence(opening).wrapping_add(ahead),
                sequence(answer).wrapping_add(1 + acknowledgement(answer)),
            );
            let flags = flag::ACK | if fin { flag::FIN } else { 0 } | if psh { PSH } else { 0 };
            let segment = Segment { flags, numbers, length: length.into() };
            prop_assume!(assures(&segment, opening, answer));
            let state = if rst { RST } else { 0 };
            let reply = assured_reply(&segment, answer);
            prop_assert_eq!(assuring(state, &segment), assured(state & !RST, numbers, reply, &segment));
        }

        /// Segments that the fast path accepts would be accepted by the slow path, too.
        #[test]
        fn what_continues_fits_or_is_a_burst(own: u64, other: u64, ahead in 0_u64..65_536, acked in 0_u64..65_536) {
            let numbers = numbers(
                sequence(own).wrapping_add(ahead as u32),
                acknowledgement(own).wrapping_add(acked as u32),
            );
            prop_assume!(continues(numbers, own));
            let after = assured(1, own, other, &Segment { flags: flag::ACK, numbers, length: 0 });
            prop_assert_eq!(after, After { state: 1, numbers, fits: true });
        }

        #[test]
        fn an_answer_acknowledges_the_syn_and_at_most_its_data(syn: u32, length in 0_u32..65_536, ack: u32) {
            let opening = numbers(syn, length);
            for inside in [1, length + 1] {
                prop_assert!(acknowledges(syn.wrapping_add(inside), opening));
            }
            prop_assert!(!acknowledges(syn, opening) && !acknowledges(syn.wrapping_add(length + 2), opening));
            prop_assert_eq!(acknowledges(ack, opening), (1..=length + 1).contains(&ack.wrapping_sub(syn)));
        }
    }
}
