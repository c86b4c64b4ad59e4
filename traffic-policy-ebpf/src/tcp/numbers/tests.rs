//! Tests of sequence numbers at the edges of windows, beyond them, and at random.

use proptest::prelude::*;

use super::*;

const PSH: u8 = 8;
const OWN: Numbers = numbers(0xffff_ff00, 5_000);
const OTHER: Numbers = numbers(5_000, 0xffff_ff00);

const SMALL: Windows = Windows { own: 0, other: 0 };

const fn segment(flags: u8, ahead: u32, acked: u32, length: u32) -> Segment {
    let numbers = numbers(sequence(OWN).wrapping_add(ahead), acknowledgement(OWN).wrapping_add(acked));
    Segment { flags, numbers, length }
}

fn after(state: u8, segment: &Segment) -> After {
    assured(state, OWN, OTHER, SMALL, segment)
}

#[test]
fn the_next_segment_continues_a_flow_and_no_other() {
    for (ahead, acked) in [(0, 0), (1448, 0), (0, 1448), (70_000, 70_000), (0x1_ffff, 0)] {
        assert!(continues(segment(0, ahead, acked, 0).numbers, OWN), "{ahead} {acked}");
    }
    for (ahead, acked) in [(0x2_0000, 0), (0, 0x2_0000), (u32::MAX, 0), (0, u32::MAX), (1 << 31, 1 << 31)] {
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
    // Half a megabyte was lost before it arrived here; the receiver's acknowledgement jumps
    // likewise.
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
        |ahead, length| assured(fin.state, fin.numbers, OTHER, SMALL, &segment(flag::ACK, ahead, 0, length));
    for (what, ahead, length) in [("lost before", 0, 100), ("all of it", 100, 50), ("an ACK", 151, 0)] {
        assert_eq!(next(ahead, length).state, 1 | FIN, "{what}");
    }
    assert_eq!(next(151, 1).state, 1);
    // An ACK overtook it.
    let own = numbers(sequence(OWN).wrapping_add(151), 5_000);
    assert_eq!(assured(1, own, OTHER, SMALL, &segment(flag::FIN | flag::ACK, 100, 0, 50)).state, 1 | FIN);
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
        assured(reset.state, reset.numbers, OTHER, SMALL, &segment(flag::ACK, ahead, acked, length))
    };
    for (what, ahead, length) in [("overtaken", 1_552, 1_448), ("again", 0, 1_448), ("an ACK", 3_000, 0)] {
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
            SMALL,
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

/// Data in both directions: each side is half a megabyte ahead of what the other has acknowledged,
/// and as much was lost after the last segments that arrived here.
#[test]
fn data_both_ways_is_followed_within_the_windows_and_not_beyond() {
    const MEGABYTE: i32 = 1 << 20;
    let (own, other) = (numbers(10_000_000, 50_000_000), numbers(50_500_000, 9_500_000));
    let windows = Windows { own: MEGABYTE as u32, other: MEGABYTE as u32 };
    let at = |number: u32, ack: u32| {
        let segment = Segment { flags: flag::ACK, numbers: numbers(number, ack), length: 1448 };
        (assured(1, own, other, windows, &segment), segment.numbers)
    };
    let beyond = |from: u32, by: i32| from.wrapping_add_signed(by);
    let (after, sent) = at(10_400_000, 50_400_000);
    assert_eq!(after, After { state: 1, numbers: sent, fits: true }, "a burst was lost");
    let (after, _) = at(9_600_000, 50_100_000);
    assert_eq!(after, After { state: 1, numbers: numbers(10_000_000, 50_100_000), fits: true }, "sent again");
    for (number, ack, fits) in [
        (beyond(9_500_000, MEGABYTE), 50_500_000, true),
        (beyond(9_500_000, MEGABYTE + 1), 50_400_001, false),
        (beyond(9_500_000, -MEGABYTE), 50_400_001, true),
        (beyond(9_500_000, -MEGABYTE - 1), 50_400_001, false),
        (9_600_000, beyond(50_500_000, -MEGABYTE), true),
        (9_600_000, beyond(50_500_000, -MEGABYTE - 1), false),
        (9_600_000, beyond(50_500_000, MEGABYTE + 1), false),
    ] {
        assert_eq!(at(number, ack).0.fits, fits, "{number} {ack}");
    }
    let fin = Segment { flags: flag::FIN | flag::ACK, numbers: numbers(10_400_000, 50_400_000), length: 100 };
    let after = assured(1, own, other, windows, &fin);
    assert_eq!(after, After { state: 1 | FIN, numbers: numbers(10_400_101, 50_400_000), fits: true });
    let rst = Segment { flags: flag::RST | flag::ACK, ..fin };
    assert!(!assured(1, own, other, windows, &rst).fits, "a window is not enough to reset a connection");
}

/// An entry that is far behind, or was moved ahead by a forged segment, is no obstacle, because the
/// other entry decides.
#[test]
fn an_entry_far_off_is_set_right_by_the_next_segment_in_the_windows() {
    let other = numbers(50_500_000, 9_500_000);
    let windows = Windows { own: 1 << 20, other: 1 << 20 };
    let segment = Segment { flags: flag::ACK, numbers: numbers(9_900_000, 50_400_000), length: 0 };
    for own in [numbers(1_000_000, 40_000_000), numbers(1 << 31, 1 << 31), numbers(90_000_000, 90_000_000)] {
        let after = assured(1, own, other, windows, &segment);
        assert_eq!(after, After { state: 1, numbers: segment.numbers, fits: true }, "{own:#x}");
    }
}

#[test]
fn numbers_that_were_lost_come_back() {
    let stale = numbers(1 << 31, 0);
    let next =
        Segment { flags: flag::ACK, numbers: numbers(acknowledgement(OTHER), sequence(OTHER)), length: 0 };
    assert_eq!(assured(1, stale, OTHER, SMALL, &next), After { state: 1, numbers: next.numbers, fits: true });
}

proptest! {
    /// Holds for any distance from the right numbers, anywhere on the circle.
    #[test]
    fn who_is_off_in_both_numbers_changes_nothing(
        state: u8, own: u64, other: u64, flags: u8, length in 0_u32..65_536, there in 65_536_u32..0xffff_0000,
        back in 65_536_u32..0xffff_0000,
    ) {
        let numbers =
            numbers(sequence(own).wrapping_add(there), acknowledgement(own).wrapping_add(back));
        prop_assume!(sequence(numbers) != acknowledgement(other) && acknowledgement(numbers) != sequence(other));
        let segment = Segment { flags, numbers, length };
        prop_assert_eq!(assured(state, own, other, SMALL, &segment), After { state, numbers: own, fits: false });
    }

    /// A segment changes FIN and RST only: it never assures a flow, nor revives one whose endpoint
    /// was removed.
    #[test]
    fn segments_touch_fin_and_rst_only(state: u8, own: u64, other: u64, flags: u8, ahead: u16, length: u16) {
        let numbers = own.wrapping_add(u64::from(ahead) << 32);
        let after = assured(state, own, other, SMALL, &Segment { flags, numbers, length: length.into() });
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
        prop_assert_eq!(assuring(state, &segment), assured(state & !RST, numbers, reply, SMALL, &segment));
    }

    /// Segments that the fast path accepts would be accepted by the slow path, too.
    #[test]
    fn what_continues_fits_or_is_a_burst(own: u64, other: u64, ahead in 0_u64..65_536, acked in 0_u64..65_536) {
        let numbers = numbers(
            sequence(own).wrapping_add(ahead as u32),
            acknowledgement(own).wrapping_add(acked as u32),
        );
        prop_assume!(continues(numbers, own));
        let after = assured(1, own, other, SMALL, &Segment { flags: flag::ACK, numbers, length: 0 });
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

/// A segment that finds no flow is compared with what the pod's socket awaits: what was lost before
/// it, and what of the pod's is still under way, may lie between.
#[test]
fn a_socket_awaits_what_is_near_its_own_numbers() {
    let near: u32 = NEAR.cast_unsigned();
    for (rcv_nxt, snd_una, sent) in [(1_000_000, 5_000_000, 0_u32), (10_u32, u32::MAX - 10, 4 << 20)] {
        let snd_nxt = snd_una.wrapping_add(sent);
        let awaited = |number: u32, ack: u32| {
            is_awaited(
                numbers(rcv_nxt.wrapping_add(number), snd_una.wrapping_add(ack)),
                rcv_nxt,
                snd_una,
                snd_nxt,
            )
        };
        for number in [0, 1, near - 1, 1u32.wrapping_sub(near)] {
            for ack in [0, sent, sent / 2, 1u32.wrapping_sub(near)] {
                assert!(awaited(number, ack), "{number} {ack}");
            }
            for ack in [sent + 1, near.wrapping_neg(), 1_u32 << 31] {
                assert!(!awaited(number, ack), "{number} {ack}: not sent, or acknowledged long ago");
            }
        }
        for number in [near, near.wrapping_neg(), 1_u32 << 31] {
            assert!(!awaited(number, 0), "{number}");
        }
    }
}
