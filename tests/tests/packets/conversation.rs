//! The life of a conversation: confirmed, closing, opened again.

use traffic_policy_ebpf::abi::ServiceCountKey;
use traffic_policy_ebpf::outcome::Outcome;
use traffic_policy_ebpf::tcp::{ANSWERED, CONFIRMED, FIN, GONE, RST};
use traffic_policy_testing::harness::{Frontend, Half, Harness, Setup, Spot};
use traffic_policy_testing::packet::flag;

use crate::table::{ENDPOINT_PORT, PORT, Terms};
use crate::talk::{ANSWER_NUMBER, Talk, everywhere};

const VIP: (Spot, u16) = (Spot::Vip, PORT);
const ACK: u8 = flag::ACK;
const FIN_ACK: u8 = flag::FIN | flag::ACK;
const SYN_ACK: u8 = flag::SYN | flag::ACK;

fn set_up(harness: &mut Harness, endpoints: &[Spot]) {
    let endpoints: Vec<_> = endpoints.iter().map(|spot| (*spot, ENDPOINT_PORT)).collect();
    harness.set_up(&Setup::of(Frontend::new(VIP.0, VIP.1).endpoints(&endpoints)).pool(5000..5100));
}

/// Where the endpoints of this test are: the same must hold for those of this node and of others.
fn each(work: impl Fn(&mut Harness, Terms, Talk) + Sync) {
    everywhere(|harness, terms| {
        for endpoint in [Spot::Near, Spot::Local] {
            set_up(harness, &[endpoint]);
            work(harness, terms, Talk::new(terms, VIP));
        }
    });
}

fn states((request, reply): (Half, Half)) -> (u8, u8) {
    (request.state, reply.state)
}

#[test]
fn confirmed_by_the_right_packet_only() {
    each(|harness, terms, talk| {
        talk.open(harness);
        assert_eq!(states(talk.halves(harness)), (0, 0));
        assert_eq!(harness.usage().unconfirmed[terms.family as usize], 1);
        talk.send(harness, ACK);
        assert_eq!(states(talk.halves(harness)), (0, 0), "the endpoint has not answered");
        talk.answer(harness, SYN_ACK);
        assert_eq!(states(talk.halves(harness)), (0, ANSWERED));
        if terms.tcp {
            for wrong in [ANSWER_NUMBER, ANSWER_NUMBER + 2, 0] {
                let packet = talk.request(ACK).with(|p| p.tcp_mut().acknowledgement = wrong);
                harness.run(terms.hook, &packet);
                assert_eq!(talk.halves(harness).0.state, 0, "acknowledged {wrong}");
            }
            talk.open(harness);
            talk.send(harness, flag::RST | ACK);
            assert_eq!(talk.halves(harness).0.state & CONFIRMED, 0, "an RST confirms nothing");
        }
        talk.send(harness, ACK);
        assert_eq!(states(talk.halves(harness)), (CONFIRMED, CONFIRMED | ANSWERED));
        assert_eq!(harness.usage().unconfirmed, [0, 0]);
        talk.send(harness, ACK);
        assert_eq!(harness.usage().unconfirmed, [0, 0], "confirmed once");
    });
}

/// The entry program alone translates an established packet, in either direction.
#[test]
fn established_packets_go_no_further_than_the_entry_program() {
    each(|harness, _, talk| {
        talk.establish(harness);
        // The first reply finds the way back.
        talk.answer(harness, ACK);
        harness.without_jumps(|harness| {
            for _ in 0..2 {
                let outcome = talk.send(harness, ACK).outcome;
                assert!(matches!(outcome, "forwarded" | "delivered"), "request {outcome}");
                let outcome = talk.answer(harness, ACK).outcome;
                assert!(matches!(outcome, "replied" | "replied-local"), "reply {outcome}");
            }
            talk.with_port(7).open(harness).expect("passed-missed-tail-call");
        });
    });
}

#[test]
fn packets_and_bytes_are_counted() {
    each(|harness, terms, talk| {
        talk.establish(harness);
        let (request, reply) = talk.halves(harness);
        let length = talk.request(ACK).bytes().len() as u64 - 14;
        assert_eq!((request.packets, request.bytes), (2, 2 * length), "{terms:?}");
        assert_eq!(reply.packets, 1);
        assert_eq!((request.service, reply.service), (1, 1));
    });
}

#[test]
fn a_syn_changes_nothing_in_a_living_flow() {
    each(|harness, terms, talk| {
        // Retransmitted before the answer, and after it; in a flow that lives, with an endpoint more to choose from.
        talk.open(harness);
        let first = talk.halves(harness);
        let more = Frontend::new(VIP.0, VIP.1).endpoints(&[(Spot::OtherNear, ENDPOINT_PORT)]);
        harness.put(1, &more);
        talk.open(harness);
        assert_eq!(talk.halves(harness).0.new_to, first.0.new_to);
        assert_eq!(harness.flows(terms.family).len(), 2);
        talk.establish(harness);
        let before = states(talk.halves(harness));
        talk.open(harness);
        assert_eq!(talk.halves(harness).0.new_to, first.0.new_to);
        assert_eq!(states(talk.halves(harness)), before);
        assert_eq!(harness.flows(terms.family).len(), 2);
    });
}

#[test]
fn the_end_of_a_connection() {
    each(|harness, terms, talk| {
        if !terms.tcp {
            return;
        }
        talk.establish(harness);
        talk.send(harness, FIN_ACK);
        assert_eq!(talk.halves(harness).0.state, CONFIRMED | FIN);
        talk.answer(harness, ACK);
        let open = talk.halves(harness).0.new_from;
        talk.open(harness);
        assert_eq!(talk.halves(harness).0.new_from, open, "half closed is not closed");
        talk.answer(harness, FIN_ACK);
        talk.send(harness, ACK);
        assert_eq!(states(talk.halves(harness)), (CONFIRMED | FIN, CONFIRMED | ANSWERED | FIN));
        // Data after an RST: it was forged.
        talk.send(harness, flag::RST);
        assert_eq!(talk.halves(harness).0.state & RST, RST);
        talk.send(harness, ACK);
        assert_eq!(talk.halves(harness).0.state & RST, 0);
    });
}

/// A connection that is over gives its place to the next one; what still comes from its endpoint is not translated.
#[test]
fn a_syn_on_a_closed_connection_chooses_anew() {
    let closings: [fn(Talk, &Harness); 3] = [
        |talk, harness| {
            talk.send(harness, FIN_ACK);
            talk.answer(harness, FIN_ACK);
        },
        |talk, harness| {
            talk.send(harness, flag::RST);
        },
        |talk, harness| {
            talk.answer(harness, flag::RST);
        },
    ];
    each(|harness, terms, talk| {
        if !terms.tcp {
            return;
        }
        for close in closings {
            talk.establish(harness);
            close(talk, harness);
            let old = talk.halves(harness);
            let late = talk.answer_packet(harness, ACK);
            harness.put(1, &Frontend::new(VIP.0, VIP.1).endpoints(&[(Spot::OtherNear, ENDPOINT_PORT)]));
            let unconfirmed = harness.usage().unconfirmed[terms.family as usize];
            talk.open(harness).expect("forwarded");
            let new = talk.halves(harness);
            assert_ne!(new.0.new_to, old.0.new_to, "another endpoint");
            assert_eq!(states(new), (0, 0));
            assert_eq!(harness.usage().unconfirmed[terms.family as usize], unconfirmed + 1);
            let retired = harness.flows(terms.family).into_iter().find(|half| half.from == old.1.from);
            assert_eq!(retired.unwrap().state & GONE, GONE);
            let hook = if old.1.kind == traffic_policy_ebpf::abi::kind::REPLY_LOCAL {
                traffic_policy_testing::harness::Hook::Egress
            } else {
                terms.hook
            };
            harness.run(hook, &late).expect("passed-stale-flow");
            talk.establish(harness);
            assert_eq!(states(talk.halves(harness)), (CONFIRMED, CONFIRMED | ANSWERED));
            let endpoint =
                if old.0.kind == traffic_policy_ebpf::abi::kind::DELIVER { Spot::Local } else { Spot::Near };
            set_up(harness, &[endpoint]);
        }
    });
}

/// To the same endpoint of this node a new connection has the old one's tuple, and takes its reply half over.
#[test]
fn a_connection_to_this_node_opens_again() {
    everywhere(|harness, terms| {
        if !terms.tcp {
            return;
        }
        set_up(harness, &[Spot::Local]);
        let talk = Talk::new(terms, VIP);
        talk.establish(harness);
        talk.answer(harness, flag::RST);
        let (_, old) = talk.halves(harness);
        let key = ServiceCountKey { service: old.service, outcome: Outcome::RepliedLocal as u32 };
        let counted = |harness: &Harness| harness.tables.service_counts.get(&key, 0).unwrap_or_default();
        let before = counted(harness);
        talk.open(harness).expect("delivered");
        assert_eq!(harness.flows(terms.family).len(), 2);
        let (request, reply) = talk.halves(harness);
        assert_eq!(states((request, reply)), (0, 0));
        // What the old one had answered is the Service's now.
        assert_eq!((old.packets, reply.packets, reply.bytes), (2, 0, 0));
        let after = counted(harness);
        assert_eq!((after.packets, after.flows), (before.packets + 2, before.flows + 1));
        assert_eq!(after.bytes, before.bytes + old.bytes);
        talk.establish(harness);
        assert_eq!(states(talk.halves(harness)), (CONFIRMED, CONFIRMED | ANSWERED));
    });
}

#[test]
fn a_vanished_endpoint_gets_nothing_new() {
    each(|harness, terms, talk| {
        talk.establish(harness);
        let old = talk.halves(harness);
        harness.change(&old.0, |half| half.state |= GONE);
        harness.put(1, &Frontend::new(VIP.0, VIP.1).endpoints(&[(Spot::OtherNear, ENDPOINT_PORT)]));
        if terms.tcp {
            talk.send(harness, ACK);
            assert_eq!(talk.halves(harness).0.new_to, old.0.new_to, "an open connection goes on");
        }
        talk.open(harness).expect("forwarded");
        assert_ne!(talk.halves(harness).0.new_to, old.0.new_to);
        talk.establish(harness);
    });
}

/// Another CPU is writing it: what it holds may be half old, half new.
#[test]
fn a_half_that_is_being_written_translates_nothing() {
    each(|harness, _, talk| {
        talk.establish(harness);
        talk.answer(harness, ACK);
        let (request, _) = talk.halves(harness);
        harness.change(&request, |half| half.kind = 0);
        talk.send(harness, ACK).expect("passed-stale-flow");
    });
}
