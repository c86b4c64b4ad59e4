//! The way back of replies through the node in front, and what meets it: ICMP errors about replies,
//! and replies that bypass the stack at the same moment (`--local-delivery direct`).

use traffic_policy_testing::harness::{self, Device, Frontend, Harness, Hook, Input, Ran, Setup, Spot};
use traffic_policy_testing::packet::{Packet, flag};

use super::icmp::{about_reply, known};
use super::tunnel::{OTHER_FRONT, answer, asks, set_up_front, through_front, to_front};
use super::{FRONT, LOCAL, NODE, VIP, arrives, each_ingress, sent, set_up_home, terms};
use crate::dialogue::{ANSWER_NUMBER, Dialogue, SYN_NUMBER};
use crate::errors::kinds;
use crate::local_delivery;
use crate::table::{CLIENT_PORT, Terms};

const CLIENT: (Spot, u16) = (Spot::Client, CLIENT_PORT);
/// No-operation, window scale 7 (RFC 7323 section 2.2).
const SCALED: [u8; 4] = [1, 3, 3, 7];

fn scaled(packet: Packet) -> Packet {
    packet.with(|packet| packet.tcp_mut().options = SCALED.to_vec())
}

/// Path MTU discovery of replies: what a router on the way to the client says goes on to the
/// endpoint's node, as requests do.
#[test]
fn an_error_about_a_reply_follows_the_flow() {
    each_ingress(|harness, terms| {
        for to in [NODE, VIP] {
            set_up_front(harness, to);
            harness.run(terms.hook, &terms.request(to)).expect("forwarded-direct");
            let before = harness.flows(terms.family);
            for kind in kinds(terms) {
                let comes = about_reply(terms, kind, to, CLIENT);
                let expected = sent(&comes).with(through_front);
                harness.run(terms.hook, &comes).expect("forwarded-icmp-error").expect_frame(&expected);
            }
            assert_eq!(harness.flows(terms.family), before, "{terms:?}");
        }
    });
}

/// The pod gets an ICMP error that quotes its own packet, and the way of its replies stays, whether
/// the error came within an outer packet or from a router.
#[test]
fn an_error_about_a_reply_reaches_the_pod() {
    harness::with(|harness| {
        for terms in terms(Hook::Ingress) {
            set_up_home(harness, VIP);
            harness.run(terms.hook, &asks(&terms.request(VIP), FRONT)).expect("delivered");
            let (answer, answered) = answer(terms);
            harness.run(Hook::Egress, &answer).expect("replied-to-front");
            for kind in kinds(terms) {
                let comes = about_reply(terms, kind, VIP, CLIENT);
                let ran = harness.run(terms.hook, &asks(&comes, FRONT));
                ran.expect("delivered-icmp-error").expect_frame(&known(terms, kind));
                // It has come to this node itself, as a router would send it.
                let ran = harness.run(terms.hook, &comes);
                ran.expect("delivered-icmp-error").expect_frame(&known(terms, kind));
            }
            let ran = harness.run(Hook::Egress, &answer);
            ran.expect("replied-to-front").expect_frame(&to_front(&answered, FRONT));
        }
    });
}

/// A card, or the kernel, that cuts an aggregate gives each segment the next identification.
#[test]
fn each_segment_of_an_aggregate_asks_for_the_same() {
    harness::with(|harness| {
        for terms in terms(Hook::Ingress).filter(|terms| terms.v4()) {
            set_up_home(harness, VIP);
            let request = terms.request(VIP);
            let (answer, answered) = answer(terms);
            for place in [0, 1, 2, 3, 4, 5, 44, 8191] {
                let cut = |outer: Packet| outer.with(|outer| outer.label += place);
                harness.run(terms.hook, &cut(asks(&request, FRONT))).expect("delivered");
                let ran = harness.run(Hook::Egress, &answer);
                ran.expect("replied-to-front").expect_frame(&to_front(&answered, FRONT));
                harness.run(terms.hook, &cut(arrives(&request, FRONT, LOCAL.0))).expect("delivered");
                harness.run(Hook::Egress, &answer).expect("replied-local").expect_frame(&answered);
            }
        }
    });
}

/// The node in front has died with the endpoint's acknowledgements of half a megabyte: the client
/// sends the first of it again, by another node. Beyond the window that the endpoint has offered,
/// it may be a stranger's.
#[test]
fn a_retransmission_leads_replies_to_the_node_that_it_comes_by() {
    harness::with(|harness| {
        for terms in terms(Hook::Ingress).filter(|terms| terms.tcp) {
            for (offered, belongs) in [(8_192, true), (512, false)] {
                set_up_home(harness, VIP);
                harness.let_send_directly_as(OTHER_FRONT, 2);
                let talk = Dialogue::new(terms, VIP);
                harness.run(terms.hook, &asks(&scaled(talk.opening()), FRONT)).expect("delivered");
                let answer = talk.answer_packet(harness, flag::ACK).ttl(63);
                let answer = answer.with(|packet| packet.tcp_mut().window = offered);
                let acknowledges = |sent| answer.clone().numbers(ANSWER_NUMBER + 1, SYN_NUMBER + 1001 + sent);
                let opens = scaled(talk.answer_packet(harness, flag::SYN | flag::ACK)).ttl(63);
                harness.run(Hook::Egress, &opens).expect("replied-to-front");
                let sends = |sent| {
                    let number = SYN_NUMBER + 1 + sent;
                    let packet = talk.request(flag::ACK).numbers(number, ANSWER_NUMBER + 1);
                    packet.payload(&[7; 1000])
                };
                harness.run(terms.hook, &asks(&sends(0), FRONT)).expect("delivered");
                let step = 50_000;
                for sent in (step..=500_000).step_by(step as usize) {
                    harness.run(terms.hook, &asks(&sends(sent), FRONT)).expect("delivered");
                    talk.idle(harness, 1);
                    harness.run(Hook::Egress, &acknowledges(sent)).expect("replied-to-front");
                }
                // Neither number is one that the entries hold.
                let lost = sends(0).numbers(SYN_NUMBER + 1, ANSWER_NUMBER + 11);
                harness.run(terms.hook, &asks(&lost, OTHER_FRONT)).expect("delivered");
                let again = acknowledges(500_000);
                let answered = again.clone().source(terms.at(VIP));
                let front = if belongs { OTHER_FRONT } else { FRONT };
                let ran = harness.run(Hook::Egress, &again);
                ran.expect("replied-to-front").expect_frame(&to_front(&answered, front));
            }
        }
    });
}

/// An established flow of a pod whose replies bypass the stack, with a client of this node.
fn established(harness: &mut Harness, terms: Terms) -> Dialogue {
    harness.set_up(&Setup::of(Frontend::new(VIP.0, VIP.1).endpoints(&[LOCAL])));
    harness.let_send_directly(FRONT);
    harness.open_for(LOCAL.0, 1, LOCAL.1);
    local_delivery::confirmed(harness, terms, VIP)
}

fn from_pod(harness: &Harness, talk: Dialogue) -> Input {
    let packet = local_delivery::from_pod(harness, talk);
    Input { device: Device::Pod0, ..Input::new(Hook::FromPod, packet.bytes()) }
}

#[test]
fn replies_that_passed_the_stack_by_go_back_to_the_node_in_front() {
    harness::with(|harness| {
        for terms in terms(Hook::Ingress) {
            let talk = established(harness, terms);
            let reply = from_pod(harness, talk);
            harness.input(&reply).expect("replied-direct");
            harness.run(terms.hook, &asks(&talk.request(flag::ACK), FRONT)).expect("delivered");
            is_left_to_egress(&harness.input(&reply), terms);
            talk.answer(harness, flag::ACK).expect("replied-to-front");
            // And the other way round.
            harness.run(terms.hook, &talk.request(flag::ACK)).expect("delivered");
            harness.input(&reply).expect("replied-direct");
        }
    });
}

#[track_caller]
fn is_left_to_egress(ran: &Ran, terms: Terms) {
    assert_eq!(ran.outcome, "", "{terms:?}");
}

/// A request by way of the node in front comes in the moment in which a reply stores its hop to the
/// client. Whichever is first, later replies go back to the node in front.
#[test]
fn a_reply_at_the_same_moment_does_not_store_another_way() {
    /// One of ten is wrong if the way is not looked at twice.
    const ROUNDS: usize = 400;
    harness::with(|harness| {
        for terms in terms(Hook::Ingress) {
            let talk = established(harness, terms);
            let request = talk.request(flag::ACK);
            let input = |packet: &Packet| Input::new(terms.hook, packet.bytes());
            let [plain, asks] = [input(&request), input(&asks(&request, FRONT))];
            let turns: Vec<Input> =
                (0..8).flat_map(|_| [asks.clone(), plain.clone()]).chain([asks.clone()]).collect();
            let replies = vec![from_pod(harness, talk); 40];
            let mut wrong = 0;
            for _ in 0..ROUNDS {
                if harness.at_once([&turns, &replies]).is_none() {
                    return;
                }
                wrong += usize::from(!harness.input(&replies[0]).outcome.is_empty());
                talk.answer(harness, flag::ACK).expect("replied-to-front");
                harness.input(&plain).expect("delivered");
            }
            assert_eq!(wrong, 0, "of {ROUNDS}, {terms:?}");
        }
    });
}
