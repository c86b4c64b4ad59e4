//! The life of a TCP or UDP flow: assured, closing, opened again.

use traffic_policy_ebpf::abi::ServiceCountKey;
use traffic_policy_ebpf::outcome::Outcome;
use traffic_policy_ebpf::tcp::{ANSWERED, ASSURED, FIN, REMOVED, RST};
use traffic_policy_testing::harness::{FlowEntry, Frontend, Harness, Input, Setup, Spot};
use traffic_policy_testing::packet::flag;

use crate::dialogue::{ANSWER_NUMBER, Dialogue, SYN_NUMBER, everywhere, everywhere_tcp};
use crate::table::{ENDPOINT_PORT, PORT, Terms};

const VIP: (Spot, u16) = (Spot::Vip, PORT);
const ACK: u8 = flag::ACK;
const FIN_ACK: u8 = flag::FIN | flag::ACK;
const SYN_ACK: u8 = flag::SYN | flag::ACK;

fn set_up(harness: &mut Harness, endpoints: &[Spot]) {
    let endpoints: Vec<_> = endpoints.iter().map(|spot| (*spot, ENDPOINT_PORT)).collect();
    harness.set_up(&Setup::of(Frontend::new(VIP.0, VIP.1).endpoints(&endpoints)).snat_ports(5000..5100));
}

/// Runs a test with an endpoint on another node, and with one on this node: both must behave the
/// same.
fn each(work: impl Fn(&mut Harness, Terms, Dialogue) + Sync) {
    everywhere(|harness, terms| {
        for endpoint in [Spot::Near, Spot::Local] {
            set_up(harness, &[endpoint]);
            work(harness, terms, Dialogue::new(terms, VIP));
        }
    });
}

fn each_tcp(work: impl Fn(&mut Harness, Terms, Dialogue) + Sync) {
    each(|harness, terms, dialogue| {
        if terms.tcp {
            work(harness, terms, dialogue);
        }
    });
}

fn states((request, reply): (FlowEntry, FlowEntry)) -> (u8, u8) {
    (request.state, reply.state)
}

#[test]
fn confirmed_by_the_right_packet_only() {
    each(|harness, terms, dialogue| {
        dialogue.open(harness);
        assert_eq!(states(dialogue.entries(harness)), (0, 0));
        assert_eq!(harness.unassured(terms.family, terms.tcp), 1);
        dialogue.send(harness, ACK);
        assert_eq!(states(dialogue.entries(harness)), (0, 0), "the endpoint has not answered");
        dialogue.answer(harness, SYN_ACK);
        assert_eq!(states(dialogue.entries(harness)), (0, ANSWERED));
        if terms.tcp {
            for wrong in [ANSWER_NUMBER, ANSWER_NUMBER + 2, 0] {
                let packet = dialogue.request(ACK).with(|p| p.tcp_mut().acknowledgement = wrong);
                harness.run(terms.hook, &packet);
                assert_eq!(dialogue.entries(harness).0.state, 0, "acknowledged {wrong}");
            }
            dialogue.open(harness);
            dialogue.send(harness, flag::RST | ACK);
            assert_eq!(dialogue.entries(harness).0.state & ASSURED, 0, "an RST assures nothing");
        }
        dialogue.let_stream(harness);
        dialogue.send(harness, ACK);
        assert_eq!(states(dialogue.entries(harness)), (ASSURED, ASSURED | ANSWERED));
        assert_eq!(harness.unassured(terms.family, terms.tcp), 0);
        dialogue.send(harness, ACK);
        assert_eq!(harness.unassured(terms.family, terms.tcp), 0, "counted once");
    });
}

/// The entry program alone translates an established packet, in either direction.
#[test]
fn established_packets_go_no_further_than_the_entry_program() {
    each(|harness, _, dialogue| {
        dialogue.establish(harness);
        // The first reply resolves the next hop towards the client.
        dialogue.answer(harness, ACK);
        harness.without_jumps(|harness| {
            for _ in 0..2 {
                let outcome = dialogue.send(harness, ACK).outcome;
                assert!(matches!(outcome, "forwarded" | "delivered"), "request {outcome}");
                let outcome = dialogue.answer(harness, ACK).outcome;
                assert!(matches!(outcome, "replied" | "replied-local"), "reply {outcome}");
            }
            dialogue.with_port(7).open(harness).expect("passed-missed-tail-call");
        });
    });
}

#[test]
fn packets_and_bytes_are_counted() {
    each(|harness, terms, dialogue| {
        dialogue.establish(harness);
        let (request, reply) = dialogue.entries(harness);
        let length = dialogue.request(ACK).bytes().len() as u64 - 14;
        assert_eq!((request.packets, request.bytes), (2, 2 * length), "{terms:?}");
        assert_eq!(reply.packets, 1);
        assert_eq!((request.service, reply.service), (1, 1));
    });
}

#[test]
fn a_syn_changes_nothing_in_a_living_flow() {
    each(|harness, terms, dialogue| {
        // The SYN is retransmitted before the answer and after it, in a live flow, with one more
        // endpoint to choose from.
        dialogue.open(harness);
        let first = dialogue.entries(harness);
        let more = Frontend::new(VIP.0, VIP.1).endpoints(&[(Spot::OtherNear, ENDPOINT_PORT)]);
        harness.put(1, &more);
        dialogue.open(harness);
        assert_eq!(dialogue.entries(harness).0.new_to, first.0.new_to);
        assert_eq!(harness.flows(terms.family).len(), 2);
        dialogue.establish(harness);
        let before = states(dialogue.entries(harness));
        dialogue.open(harness);
        assert_eq!(dialogue.entries(harness).0.new_to, first.0.new_to);
        assert_eq!(states(dialogue.entries(harness)), before);
        assert_eq!(harness.flows(terms.family).len(), 2);
    });
}

#[test]
fn the_end_of_a_connection() {
    each_tcp(|harness, terms, dialogue| {
        dialogue.establish(harness);
        dialogue.send(harness, FIN_ACK);
        assert_eq!(dialogue.entries(harness).0.state, ASSURED | FIN);
        dialogue.answer(harness, ACK);
        let open = dialogue.entries(harness).0.new_from;
        dialogue.open(harness);
        assert_eq!(dialogue.entries(harness).0.new_from, open, "half closed is not closed");
        dialogue.answer(harness, FIN_ACK);
        dialogue.send(harness, ACK);
        assert_eq!(states(dialogue.entries(harness)), (ASSURED | FIN, ASSURED | ANSWERED | FIN));
        // Data after an RST: the RST was forged.
        dialogue.send(harness, flag::RST);
        assert_eq!(dialogue.entries(harness).0.state & RST, RST);
        dialogue.send(harness, ACK);
        assert_eq!(dialogue.entries(harness).0.state & RST, RST, "an ACK from before it may come late");
        harness.run(
            terms.hook,
            &dialogue.request(ACK).numbers(SYN_NUMBER + 2, ANSWER_NUMBER + 1).payload(b"more"),
        );
        assert_eq!(dialogue.entries(harness).0.state & RST, 0);
    });
}

/// A segment sent before a FIN may still be in flight, or lost and retransmitted.
#[test]
fn a_syn_before_the_last_ack_is_no_new_connection() {
    each_tcp(|harness, _, dialogue| {
        dialogue.establish(harness);
        dialogue.send(harness, FIN_ACK);
        dialogue.answer(harness, FIN_ACK);
        let before = dialogue.entries(harness).0.new_from;
        let more = Frontend::new(VIP.0, VIP.1).endpoints(&[(Spot::OtherNear, ENDPOINT_PORT)]);
        harness.put(1, &more);
        dialogue.open(harness);
        assert_eq!(dialogue.entries(harness).0.new_from, before);
        assert_eq!(states(dialogue.entries(harness)), (ASSURED | FIN, ASSURED | ANSWERED | FIN));
    });
}

/// A living endpoint answers a SYN by an ACK that fits. One that is gone, or has forgotten the
/// connection, does not.
#[test]
fn a_syn_that_nobody_answers_chooses_anew() {
    each_tcp(|harness, terms, dialogue| {
        let more = Frontend::new(VIP.0, VIP.1).endpoints(&[(Spot::OtherNear, ENDPOINT_PORT)]);
        dialogue.establish(harness);
        let old = dialogue.entries(harness).0.new_to;
        harness.put(1, &more);
        // The time for which it was idle before does not matter, nor the number of SYNs at once.
        dialogue.idle(harness, 1000);
        for _ in 0..5 {
            dialogue.open(harness);
        }
        assert_eq!(dialogue.entries(harness).0.new_to, old);
        // The SYN is answered in time, and the flow is idle again.
        dialogue.idle(harness, 1);
        dialogue.answer(harness, ACK);
        dialogue.idle(harness, 1000);
        dialogue.open(harness);
        assert_eq!(dialogue.entries(harness).0.new_to, old);
        dialogue.idle(harness, 4);
        dialogue.open(harness).expect("forwarded");
        assert_ne!(dialogue.entries(harness).0.new_to, old);
        assert_eq!(harness.flows(terms.family).len(), 2);
        dialogue.establish(harness);
    });
}

/// The restarted endpoint has accepted the client's SYN: its sequence numbers are different.
#[test]
fn a_connection_goes_on_anew_after_a_silence() {
    each_tcp(|harness, terms, dialogue| {
        dialogue.establish(harness);
        dialogue.idle(harness, 1000);
        const FAR: u32 = 1 << 31;
        harness.run(terms.hook, &dialogue.opening().numbers(SYN_NUMBER + FAR, 0));
        let answer =
            dialogue.answer_packet(harness, SYN_ACK).numbers(ANSWER_NUMBER + FAR, SYN_NUMBER + FAR + 1);
        let outcome = dialogue.answered(harness, &answer).outcome;
        assert!(outcome.starts_with("replied"), "{outcome}");
        let segments = |harness: &Harness| {
            let request = dialogue.request(ACK).numbers(SYN_NUMBER + FAR + 1, ANSWER_NUMBER + FAR + 1);
            let reply =
                dialogue.answer_packet(harness, ACK).numbers(ANSWER_NUMBER + FAR + 1, SYN_NUMBER + FAR + 1);
            let (there, back) =
                (harness.run(terms.hook, &request).outcome, dialogue.answered(harness, &reply).outcome);
            assert!(matches!(there, "forwarded" | "delivered"), "{there}");
            assert!(back.starts_with("replied"), "{back}");
        };
        segments(harness);
        dialogue.idle(harness, 4);
        segments(harness);
        segments(harness);
        harness.without_jumps(|harness| segments(harness));
    });
}

/// A forged SYN with this tuple, whose answer the endpoint no longer awaits.
#[test]
fn a_forged_syn_does_not_keep_the_client_out() {
    each_tcp(|harness, terms, dialogue| {
        const FAR: u32 = 1 << 31;
        harness.run(terms.hook, &dialogue.opening().numbers(SYN_NUMBER + FAR, 0));
        let answer =
            dialogue.answer_packet(harness, SYN_ACK).numbers(ANSWER_NUMBER + FAR, SYN_NUMBER + FAR + 1);
        let outcome = dialogue.answered(harness, &answer).outcome;
        assert!(outcome.starts_with("replied"), "{outcome}");
        // It is not accepted while an answer may be under way.
        dialogue.open(harness);
        dialogue.answer(harness, SYN_ACK).expect("passed-out-of-window");
        dialogue.idle(harness, 4);
        // Nor do packets with its tuple keep the flow alive.
        let before = dialogue.entries(harness).0.last;
        dialogue.send(harness, ACK);
        assert_eq!(dialogue.entries(harness).0.last, before);
        dialogue.establish(harness);
        assert_eq!(states(dialogue.entries(harness)), (ASSURED, ASSURED | ANSWERED));
    });
}

/// A SYN with another number before any answer: the answer to the first is no longer awaited.
#[test]
fn a_new_attempt_is_answered_by_its_own_number() {
    each_tcp(|harness, terms, dialogue| {
        const FIRST: u32 = SYN_NUMBER + (1 << 31);
        harness.run(terms.hook, &dialogue.opening().numbers(FIRST, 0));
        dialogue.idle(harness, 1);
        dialogue.open(harness);
        let late = dialogue.answer_packet(harness, SYN_ACK).numbers(ANSWER_NUMBER, FIRST + 1);
        dialogue.answered(harness, &late).expect("passed-out-of-window");
        assert_eq!(states(dialogue.entries(harness)), (0, 0));
        let answer = dialogue.answer_packet(harness, SYN_ACK);
        let outcome = dialogue.answered(harness, &answer).outcome;
        assert!(outcome.starts_with("replied"), "{outcome}");
        let (_, reply) = dialogue.entries(harness);
        assert_eq!((reply.packets, reply.bytes), (1, answer.bytes().len() as u64 - 14));
        dialogue.send(harness, ACK);
        assert_eq!(states(dialogue.entries(harness)), (ASSURED, ASSURED | ANSWERED));
    });
}

/// An endpoint that has answered a SYN which its client has given up answers the next one by an ACK
/// of the number that it expects, and the client resets that (RFC 9293 section 3.10.7.4).
#[test]
fn an_endpoint_that_is_half_open_is_reset_by_its_client() {
    each_tcp(|harness, terms, dialogue| {
        const FIRST: u32 = SYN_NUMBER + (1 << 31);
        harness.run(terms.hook, &dialogue.opening().numbers(FIRST, 0));
        let answer = dialogue.answer_packet(harness, SYN_ACK).numbers(ANSWER_NUMBER, FIRST + 1);
        let outcome = dialogue.answered(harness, &answer).outcome;
        assert!(outcome.starts_with("replied"), "{outcome}");
        dialogue.idle(harness, 4);
        dialogue.open(harness);
        let expects = dialogue.answer_packet(harness, ACK);
        let stray = expects.clone().numbers(ANSWER_NUMBER + 1, 0);
        dialogue.answered(harness, &stray).expect("passed-out-of-window");
        let outcome = dialogue.answered(harness, &expects.numbers(ANSWER_NUMBER + 1, FIRST + 1)).outcome;
        assert!(outcome.starts_with("replied"), "{outcome}");
        let reset = dialogue.request(flag::RST).numbers(FIRST + 1, 0);
        assert!(matches!(harness.run(terms.hook, &reset).outcome, "forwarded" | "delivered"));
        dialogue.establish(harness);
        assert_eq!(states(dialogue.entries(harness)), (ASSURED, ASSURED | ANSWERED));
    });
}

/// A closed connection is replaced by the next one; late packets of its endpoint are not
/// translated.
#[test]
fn a_syn_on_a_closed_connection_chooses_anew() {
    let closings: [fn(Dialogue, &Harness); 3] = [
        |dialogue, harness| dialogue.close(harness),
        |dialogue, harness| {
            dialogue.send(harness, flag::RST);
        },
        |dialogue, harness| {
            dialogue.answer(harness, flag::RST);
        },
    ];
    each_tcp(|harness, terms, dialogue| {
        for close in closings {
            dialogue.establish(harness);
            close(dialogue, harness);
            let old = dialogue.entries(harness);
            let late = dialogue.answer_packet(harness, ACK);
            harness.put(1, &Frontend::new(VIP.0, VIP.1).endpoints(&[(Spot::OtherNear, ENDPOINT_PORT)]));
            let unassured = harness.unassured(terms.family, terms.tcp);
            dialogue.open(harness).expect("forwarded");
            let new = dialogue.entries(harness);
            assert_ne!(new.0.new_to, old.0.new_to, "another endpoint");
            assert_eq!(states(new), (0, 0));
            assert_eq!(harness.unassured(terms.family, terms.tcp), unassured + 1);
            assert_eq!(harness.flows(terms.family).len(), 2, "both entries of the old one are gone");
            let hook = if old.1.kind == traffic_policy_ebpf::abi::kind::REPLY_LOCAL {
                traffic_policy_testing::harness::Hook::Egress
            } else {
                terms.hook
            };
            let outcome = harness.run(hook, &late).outcome;
            assert!(outcome.starts_with("passed-"), "{outcome}");
            dialogue.establish(harness);
            assert_eq!(states(dialogue.entries(harness)), (ASSURED, ASSURED | ANSWERED));
            let endpoint =
                if old.0.kind == traffic_policy_ebpf::abi::kind::DELIVER { Spot::Local } else { Spot::Near };
            set_up(harness, &[endpoint]);
        }
    });
}

/// A new connection to the same endpoint of this node has the tuple of the old one, and takes its
/// reply entry over.
#[test]
fn a_connection_to_this_node_opens_again() {
    everywhere_tcp(|harness, terms| {
        set_up(harness, &[Spot::Local]);
        let dialogue = Dialogue::new(terms, VIP);
        dialogue.establish(harness);
        dialogue.answer(harness, flag::RST);
        let (_, old) = dialogue.entries(harness);
        let key = ServiceCountKey { service: old.service, outcome: Outcome::RepliedLocal as u32 };
        let counted = |harness: &Harness| harness.tables.service_counts.get(&key, 0).unwrap_or_default();
        let before = counted(harness);
        dialogue.open(harness).expect("delivered");
        assert_eq!(harness.flows(terms.family).len(), 2);
        let (request, reply) = dialogue.entries(harness);
        assert_eq!(states((request, reply)), (0, 0));
        // The answers within the old connection are counted for the Service by now.
        assert_eq!((old.packets, reply.packets, reply.bytes), (2, 0, 0));
        let after = counted(harness);
        assert_eq!((after.packets, after.flows), (before.packets + 2, before.flows + 1));
        assert_eq!(after.bytes, before.bytes + old.bytes);
        dialogue.establish(harness);
        assert_eq!(states(dialogue.entries(harness)), (ASSURED, ASSURED | ANSWERED));
    });
}

#[test]
fn a_vanished_endpoint_gets_nothing_new() {
    each(|harness, terms, dialogue| {
        dialogue.establish(harness);
        let old = dialogue.entries(harness);
        harness.change(&old.0, |entry| entry.state |= REMOVED);
        harness.put(1, &Frontend::new(VIP.0, VIP.1).endpoints(&[(Spot::OtherNear, ENDPOINT_PORT)]));
        if terms.tcp {
            dialogue.send(harness, ACK);
            assert_eq!(dialogue.entries(harness).0.new_to, old.0.new_to, "an open connection goes on");
        }
        if terms.tcp {
            // Nor does a SYN end it, which anybody can send: only the endpoint ends it.
            dialogue.open(harness);
            assert_eq!(dialogue.entries(harness).0.new_to, old.0.new_to);
            dialogue.answer(harness, flag::RST);
        }
        dialogue.open(harness).expect("forwarded");
        assert_ne!(dialogue.entries(harness).0.new_to, old.0.new_to);
        dialogue.establish(harness);
    });
}

/// Another CPU is writing the entry: its content may be half old, half new.
#[test]
fn a_half_that_is_being_written_translates_nothing() {
    each(|harness, _, dialogue| {
        dialogue.establish(harness);
        dialogue.answer(harness, ACK);
        let (request, _) = dialogue.entries(harness);
        harness.change(&request, |entry| entry.kind = 0);
        dialogue.send(harness, ACK).expect("passed-stale-flow");
    });
}

/// Segments of one direction come on two CPUs: a process that closes its connection sends the FIN,
/// while the kernel acknowledges what has just arrived.
#[test]
fn a_fin_beside_an_acknowledgement_is_noted() {
    /// One in some hundred lost the FIN to an acknowledgement that wrote the state it had read.
    const ROUNDS: usize = 300;
    each_tcp(|harness, terms, dialogue| {
        dialogue.establish(harness);
        let input = |flags| Input::new(terms.hook, dialogue.request(flags).bytes());
        let (acknowledgements, fin) = (vec![input(ACK); 50], [input(FIN_ACK)]);
        for round in 0..ROUNDS {
            if harness.at_once([&acknowledgements, &fin]).is_none() {
                println!("there is one CPU: nothing runs at once");
                return;
            }
            let (request, _) = dialogue.entries(harness);
            assert_eq!(request.state, ASSURED | FIN, "round {round}");
            harness.change(&request, |entry| entry.state &= !FIN);
        }
    });
}
