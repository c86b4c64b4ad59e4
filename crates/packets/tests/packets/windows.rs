//! Windows that TCP segments offer, by which later segments are judged.

use traffic_policy_testing::harness::{Frontend, Setup, Spot};
use traffic_policy_testing::packet::{Packet, flag};

use crate::dialogue::{ANSWER_NUMBER, Dialogue, SYN_NUMBER, everywhere_tcp};
use crate::table::{ENDPOINT_PORT, PORT};

const VIP: (Spot, u16) = (Spot::Vip, PORT);
const ACK: u8 = flag::ACK;
const SYN_ACK: u8 = flag::SYN | flag::ACK;

/// The endpoint may have lost half a megabyte after its last segment, if the client has offered a
/// window for as much: whether by the first packet of a jiffy, which the fast path reads, or not at
/// all.
#[test]
fn a_window_that_the_fast_path_has_seen_is_sent_into() {
    // No-operation, window scale 7 (RFC 7323 section 2.2).
    const SCALED: [u8; 4] = [1, 3, 3, 7];
    everywhere_tcp(|harness, terms| {
        let cases = [Spot::Near, Spot::Local].map(|spot| [(spot, 8_192, true), (spot, 512, false)]);
        for (endpoint, offered, belongs) in cases.into_iter().flatten() {
            harness.set_up(&Setup::of(Frontend::new(VIP.0, VIP.1).endpoints(&[(endpoint, ENDPOINT_PORT)])));
            let dialogue = Dialogue::new(terms, VIP);
            let scaled = |packet: Packet| packet.with(|packet| packet.tcp_mut().options = SCALED.to_vec());
            harness.run(terms.hook, &scaled(dialogue.opening()));
            dialogue.answered(harness, &scaled(dialogue.answer_packet(harness, SYN_ACK)));
            dialogue.send(harness, ACK);
            dialogue.idle(harness, 1);
            harness.run(terms.hook, &dialogue.request(ACK).with(|packet| packet.tcp_mut().window = offered));
            dialogue.idle(harness, 1);
            let before = dialogue.entries(harness).1.last;
            // Neither number is one that the entries hold.
            let far = dialogue.answer_packet(harness, ACK).numbers(ANSWER_NUMBER + 500_001, SYN_NUMBER + 11);
            let outcome = dialogue.answered(harness, &far).outcome;
            assert!(outcome.starts_with("replied"), "{outcome}");
            let after = dialogue.entries(harness).1.last;
            assert_eq!(after != before, belongs, "a window of {offered} << 7, {terms:?}");
        }
    });
}
