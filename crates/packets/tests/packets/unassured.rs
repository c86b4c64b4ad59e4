//! Unassured flows: the oldest makes room for a new one, and no assured one does.

use traffic_policy_dataplane::MapSizes;
use traffic_policy_ebpf::abi::kind;
use traffic_policy_ebpf::tcp::{ANSWERED, ASSURED};
use traffic_policy_testing::harness::{self, Frontend, HZ, Harness, Hook, Setup, Spot};
use traffic_policy_testing::lab::Family;
use traffic_policy_testing::packet::flag;

use crate::dialogue::{Dialogue, everywhere, everywhere_udp};
use crate::table::{ENDPOINT_PORT, PORT, Terms};

const VIP: (Spot, u16) = (Spot::Vip, PORT);
const ACK: u8 = flag::ACK;
const SYN_ACK: u8 = flag::SYN | flag::ACK;

/// Queues of 64 flows for IPv4 and of 32 for IPv6, in tables with room for many more.
const SIZES: MapSizes = MapSizes { flows4: 2048, flows6: 2048, unassured: 64, ..harness::SIZES };

fn places(terms: Terms) -> u16 {
    if terms.family == Family::V4 { 64 } else { 32 }
}

fn setup(endpoint: Spot) -> Setup {
    Setup::of(Frontend::new(VIP.0, VIP.1).endpoints(&[(endpoint, ENDPOINT_PORT)])).snat_ports(5000..7000)
}

fn of_port(terms: Terms, port: u16) -> Dialogue {
    Dialogue::new(terms, VIP).with_port(port)
}

fn is_there(harness: &Harness, terms: Terms, port: u16) -> bool {
    of_port(terms, port).request_entry(harness).is_some()
}

#[track_caller]
fn open(harness: &Harness, terms: Terms, port: u16) {
    let outcome = of_port(terms, port).open(harness).outcome;
    assert!(matches!(outcome, "forwarded" | "delivered"), "{outcome}, {terms:?}");
}

/// Runs a test in all columns, for endpoints of both kinds, with small queues.
fn each(work: impl Fn(&mut Harness, Terms) + Sync) {
    harness::with_sizes(SIZES, |harness| {
        for terms in Terms::all() {
            for endpoint in [Spot::Near, Spot::Local] {
                harness.set_up(&setup(endpoint));
                work(harness, terms);
            }
        }
    });
}

#[test]
fn the_oldest_makes_room() {
    each(|harness, terms| {
        let places = places(terms);
        (1..=places + 10).for_each(|port| open(harness, terms, port));
        let there: Vec<_> = (1..=places + 10).filter(|port| is_there(harness, terms, *port)).collect();
        assert_eq!(there, (11..=places + 10).collect::<Vec<_>>(), "{terms:?}");
        assert_eq!(harness.flows(terms.family).len(), 2 * usize::from(places), "with both entries");
        assert_eq!(harness.unassured(terms.family, terms.tcp), u64::from(places));
    });
}

/// A flood of ten times the queue's length removes no flow that is assured, or that is assured
/// before its turn in the queue comes.
#[test]
fn an_assured_flow_makes_no_room() {
    each(|harness, terms| {
        let places = places(terms);
        let (before, amid) = (of_port(terms, 1), of_port(terms, 2));
        before.establish(harness);
        (100..100 + 5 * places).for_each(|port| open(harness, terms, port));
        amid.open(harness);
        (100 + 5 * places..100 + 6 * places - 1).for_each(|port| open(harness, terms, port));
        amid.answer(harness, SYN_ACK);
        amid.let_stream(harness);
        amid.send(harness, ACK);
        (100 + 6 * places..100 + 10 * places).for_each(|port| open(harness, terms, port));
        for dialogue in [before, amid] {
            let (request, reply) = dialogue.entries(harness);
            assert_eq!((request.state, reply.state), (ASSURED, ASSURED | ANSWERED), "{terms:?}");
            let outcome = dialogue.answer(harness, ACK).outcome;
            assert!(matches!(outcome, "replied" | "replied-local"), "{outcome}");
        }
        assert_eq!(harness.flows(terms.family).len(), 2 * usize::from(places) + 4);
    });
}

/// One-way protocols (statsd, syslog) never assure a flow: their sources must not push out clients
/// that open connections.
#[test]
fn tcp_and_udp_do_not_make_room_for_each_other() {
    each(|harness, terms| {
        let places = places(terms);
        (1..=places).for_each(|port| open(harness, terms, port));
        let other = Terms { tcp: !terms.tcp, ..terms };
        (1..=3 * places).for_each(|port| open(harness, other, port));
        let there = (1..=places).filter(|port| is_there(harness, terms, *port)).count();
        assert_eq!(there, usize::from(places), "{terms:?}");
    });
}

/// Two datagrams of one request (A and AAAA of a resolver) are not a stream, like `stream_ts` of
/// conntrack.
#[test]
fn datagrams_are_a_stream_after_two_seconds() {
    everywhere_udp(|harness, terms| {
        harness.set_up(&setup(Spot::Near));
        let dialogue = of_port(terms, 1);
        let state = |harness: &Harness| dialogue.entries(harness).0.state;
        dialogue.open(harness).expect("forwarded");
        harness.begin_earlier(&dialogue.entries(harness).0, 3 * HZ);
        dialogue.send(harness, ACK).expect("forwarded");
        assert_eq!(state(harness), 0, "nobody has answered");
        let fresh = of_port(terms, 2);
        fresh.open(harness).expect("forwarded");
        fresh.answer(harness, SYN_ACK).expect("replied");
        fresh.send(harness, ACK).expect("forwarded");
        assert_eq!(fresh.entries(harness).0.state, 0, "not two seconds after it began");
        dialogue.answer(harness, SYN_ACK).expect("replied");
        harness.begin_earlier(&dialogue.entries(harness).0, HZ);
        dialogue.send(harness, ACK).expect("forwarded");
        assert_eq!(state(harness), ASSURED);
        dialogue.answer(harness, SYN_ACK).expect("replied");
        dialogue.send(harness, ACK).expect("forwarded");
    });
}

/// A client that sends one request to an endpoint that keeps sending: this is a stream as well,
/// made by a datagram of either side.
#[test]
fn an_endpoint_that_goes_on_answering_makes_a_stream() {
    everywhere_udp(|harness, terms| {
        for endpoint in [Spot::Near, Spot::Local] {
            harness.set_up(&setup(endpoint));
            let dialogue = of_port(terms, 1);
            open(harness, terms, 1);
            let states = |harness: &Harness| {
                let (request, reply) = dialogue.entries(harness);
                (request.state, reply.state)
            };
            let later = |harness: &mut Harness| {
                let (request, reply) = dialogue.entries(harness);
                harness.begin_earlier(&request, 3 * HZ);
                harness.begin_earlier(&reply, 3 * HZ);
            };
            dialogue.answer(harness, SYN_ACK);
            dialogue.answer(harness, SYN_ACK);
            assert_eq!(states(harness), (0, ANSWERED), "within two seconds");
            later(harness);
            dialogue.answer(harness, SYN_ACK);
            assert_eq!(states(harness), (ASSURED, ASSURED | ANSWERED), "{terms:?}");
            assert_eq!(harness.unassured(terms.family, terms.tcp), 0);
            dialogue.answer(harness, SYN_ACK);
            dialogue.send(harness, ACK);
            assert_eq!(states(harness), (ASSURED, ASSURED | ANSWERED));
        }
    });
}

/// The first answer comes late, as from a slow server: it is a single answer.
#[test]
fn a_late_answer_makes_no_stream() {
    everywhere_udp(|harness, terms| {
        harness.set_up(&setup(Spot::Near));
        let dialogue = of_port(terms, 1);
        open(harness, terms, 1);
        let (request, reply) = dialogue.entries(harness);
        harness.begin_earlier(&request, 3 * HZ);
        harness.begin_earlier(&reply, 3 * HZ);
        dialogue.answer(harness, SYN_ACK);
        assert_eq!(dialogue.entries(harness).0.state, 0);
    });
}

/// An endpoint without a free port costs other Services no flow.
#[test]
fn a_flow_without_a_port_pushes_out_nobody() {
    harness::with_sizes(SIZES, |harness| {
        for terms in Terms::all() {
            let local = Frontend::new(VIP.0, VIP.1).endpoints(&[(Spot::Local, ENDPOINT_PORT)]);
            let near = Frontend::new(Spot::OtherVip, PORT).endpoints(&[(Spot::Near, ENDPOINT_PORT)]);
            harness.set_up(&Setup::of(local).and(near).snat_ports([5000]));
            let to_near = |port| Dialogue::new(terms, (Spot::OtherVip, PORT)).with_port(port);
            to_near(1).establish(harness);
            let places = places(terms);
            (1..=places).for_each(|port| open(harness, terms, port));
            let there =
                |harness: &Harness| (1..=places).filter(|port| is_there(harness, terms, *port)).count();
            let before = there(harness);
            for port in 100..120 {
                to_near(port).open(harness).expect("dropped-no-snat-port");
            }
            assert_eq!(there(harness), before, "{terms:?}");
            assert!(before + 1 >= usize::from(places), "{before}");
        }
    });
}

/// One-way protocols never reach another state: most of their datagrams need no more work than
/// those of an established flow.
#[test]
fn datagrams_without_an_answer_take_the_fast_path() {
    harness::with_sizes(SIZES, |harness| {
        for terms in Terms::all().filter(|terms| !terms.tcp) {
            for (endpoint, outcome) in [(Spot::Near, "forwarded"), (Spot::Local, "delivered")] {
                harness.set_up(&setup(endpoint));
                let dialogue = of_port(terms, 1);
                dialogue.open(harness).expect(outcome);
                // Once a second one of them takes the slow path, which would miss the reply entry.
                // It may be this one.
                let is_fast = || {
                    dialogue.send(harness, ACK).expect(outcome);
                    harness.evict(&dialogue.entries(harness).1);
                    dialogue.send(harness, ACK).expect(outcome);
                    harness.flows(terms.family).len() == 1
                };
                let mut attempts = std::iter::repeat_with(is_fast).take(10);
                assert!(attempts.any(|fast| fast), "{terms:?}");
                let request = dialogue.request_entry(harness).unwrap();
                assert!(request.packets >= 3 && request.state == 0, "{request:?}");
                // A second later, a datagram takes the slow path again.
                harness.begin_earlier(&request, HZ);
                dialogue.send(harness, ACK).expect(outcome);
                dialogue.answer(harness, SYN_ACK);
                harness.begin_earlier(&dialogue.entries(harness).0, 3 * HZ);
                dialogue.send(harness, ACK).expect(outcome);
                assert_eq!(dialogue.entries(harness).0.state, ASSURED, "{terms:?}");
            }
        }
    });
}

/// A one-way stream (syslog, RTP) would move to another endpoint if its flow made room while it is
/// in use.
#[test]
fn a_one_way_stream_in_use_makes_no_room() {
    each(|harness, terms| {
        if terms.tcp {
            return;
        }
        let (places, stream, quiet) = (places(terms), of_port(terms, 1), of_port(terms, 2));
        for dialogue in [stream, quiet] {
            dialogue.open(harness);
            dialogue.send(harness, ACK);
            harness.begin_earlier(&dialogue.request_entry(harness).unwrap(), 3 * HZ);
        }
        let request = quiet.request_entry(harness).unwrap();
        harness.change(&request, |entry| entry.go_back(31 * HZ));
        for round in 0..10 {
            (100..100 + places).for_each(|port| open(harness, terms, round * places + port));
            let request = stream.request_entry(harness).expect("the stream has gone");
            assert_eq!(request.state, 0, "{terms:?}");
            stream.send(harness, ACK);
        }
        assert!(!is_there(harness, terms, 2), "nothing has come of it for as long as conntrack waits");
        assert_eq!(harness.unassured(terms.family, terms.tcp), u64::from(places));
    });
}

/// Forged streams cannot occupy the whole queue.
#[test]
fn one_way_streams_keep_half_of_the_queue_at_most() {
    each(|harness, terms| {
        if terms.tcp {
            return;
        }
        let places = places(terms);
        for port in 1..=places {
            open(harness, terms, port);
            let request = of_port(terms, port).request_entry(harness).unwrap();
            harness.begin_earlier(&request, 3 * HZ);
        }
        (100..100 + places / 2).for_each(|port| open(harness, terms, port));
        let left = (1..=places).filter(|port| is_there(harness, terms, *port)).count();
        assert_eq!(left, usize::from(places / 2), "{terms:?}");
        (100..100 + places / 2).for_each(|port| assert!(is_there(harness, terms, port), "{port}, {terms:?}"));
    });
}

/// A client's second attempt in place of the first one holds one place, not two.
#[test]
fn a_flow_that_begins_anew_has_one_place() {
    each(|harness, terms| {
        let dialogue = of_port(terms, 1);
        for _ in 0..5 {
            dialogue.open(harness);
            let (_, reply) = dialogue.entries(harness);
            harness.evict(&reply);
        }
        dialogue.open(harness);
        assert_eq!(harness.unassured(terms.family, terms.tcp), 1, "{terms:?}");
        dialogue.establish(harness);
        assert_eq!(harness.unassured(terms.family, terms.tcp), 0, "{terms:?}");
    });
}

/// The endpoint of a removed flow may answer late: the tuple may be that of a connection of the
/// node itself by then.
#[test]
fn an_answer_of_a_flow_that_has_made_room_passes() {
    each(|harness, terms| {
        let dialogue = of_port(terms, 1);
        dialogue.open(harness);
        let answer = dialogue.answer_packet(harness, SYN_ACK);
        let back = match dialogue.entries(harness).0.kind {
            kind::DELIVER => Hook::Egress,
            _ => terms.hook,
        };
        (2..=places(terms) + 1).for_each(|port| open(harness, terms, port));
        assert!(!is_there(harness, terms, 1), "{terms:?}");
        let outcome = harness.run(back, &answer).outcome;
        assert!(outcome.starts_with("passed"), "{outcome}, {terms:?}");
        open(harness, terms, 1);
        dialogue.establish(harness);
    });
}

#[test]
fn without_its_reply_entry_a_request_starts_anew() {
    each(|harness, terms| {
        let dialogue = of_port(terms, 1);
        dialogue.open(harness);
        let (request, reply) = dialogue.entries(harness);
        harness.evict(&reply);
        if terms.tcp {
            dialogue.send(harness, ACK).expect("reset-no-flow");
            assert_eq!(dialogue.request_entry(harness), Some(request), "only a SYN starts anew");
        }
        let outcome = dialogue.open(harness).outcome;
        assert!(matches!(outcome, "forwarded" | "delivered"), "{outcome}");
        dialogue.establish(harness);
    });
}

/// The key of a removed reply entry may belong to another client by now.
#[test]
fn a_reply_entry_of_another_flow_is_not_believed() {
    everywhere(|harness, terms| {
        harness.set_up(&setup(Spot::Near).snat_ports([5000]));
        let (first, second) = (of_port(terms, 1), of_port(terms, 2));
        first.open(harness).expect("forwarded");
        harness.evict(&first.entries(harness).1);
        second.open(harness).expect("forwarded");
        first.open(harness).expect("dropped-no-snat-port");
        second.answer(harness, SYN_ACK).expect("replied");
        second.establish(harness);
    });
}
