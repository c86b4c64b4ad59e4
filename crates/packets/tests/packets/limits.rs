//! Exhausted resources: table entries, source ports, tuples. Other flows go on.

use traffic_policy_dataplane::MapSizes;
use traffic_policy_testing::harness::{self, FlowEntry, Frontend, HZ, Harness, Hook, Input, Setup, Spot};
use traffic_policy_testing::packet::flag;

use crate::dialogue::{ANSWER_NUMBER, Dialogue, everywhere, everywhere_tcp, everywhere_udp};
use crate::table::{CLIENT_PORT, ENDPOINT_PORT, PORT, Terms};

const VIP: (Spot, u16) = (Spot::Vip, PORT);
const NODE: (Spot, u16) = (Spot::Node, PORT);
const ACK: u8 = flag::ACK;
const SYN_ACK: u8 = flag::SYN | flag::ACK;

/// Tables with room for every port of a SNAT port range.
const LARGE: MapSizes = MapSizes { flows4: 4096, flows6: 4096, unassured: 4096, ..harness::SIZES };

fn setup(endpoint: Spot) -> Setup {
    Setup::of(Frontend::new(VIP.0, VIP.1).endpoints(&[(endpoint, ENDPOINT_PORT)])).snat_ports(5000..6000)
}

/// Unassured flows make room, the oldest first; assured ones never do.
#[test]
fn a_full_table() {
    everywhere(|harness, terms| {
        for (endpoint, outcome) in [(Spot::Near, "forwarded"), (Spot::Local, "delivered")] {
            harness.set_up(&setup(endpoint));
            full(harness, terms, outcome);
        }
    });
}

fn full(harness: &mut Harness, terms: Terms, outcome: &str) {
    let of_port = |port| Dialogue::new(terms, VIP).with_port(port);
    let open = |port, harness: &Harness| {
        of_port(port).open(harness).expect(outcome);
    };
    let is_there = |port, harness: &Harness| of_port(port).request_entry(harness).is_some();
    (1..=64).for_each(|port| of_port(port).establish(harness));
    (65..=128).for_each(|port| open(port, harness));
    assert_eq!(harness.flows(terms.family).len(), 256, "two entries a flow in a table of 256");
    // The flows in the first places of the queue are assured by now: one new flow may look at no
    // more than 48.
    let found_room = (500..520).filter(|port| of_port(*port).open(harness).outcome == outcome).count();
    assert!(found_room >= 18, "{found_room} of 20 new flows, {terms:?}");
    assert!((1..=64).all(|port| is_there(port, harness)), "no assured flow makes room");
    let gone: Vec<_> = (65..=128).filter(|port| !is_there(*port, harness)).collect();
    assert_eq!(gone, (65..65 + found_room as u16).collect::<Vec<_>>(), "the oldest first, {terms:?}");
    for dialogue in [of_port(1), of_port(64), of_port(128), of_port(519)] {
        dialogue.establish(harness);
    }
    assert_eq!(harness.flows(terms.family).len(), 256, "both entries of each");
}

/// If all flows are assured, and none has expired, there is no room, as in a full table of
/// conntrack.
#[test]
fn a_table_full_of_flows_that_stand() {
    everywhere(|harness, terms| {
        harness.set_up(&setup(Spot::Near));
        (1..=128).for_each(|port| Dialogue::new(terms, VIP).with_port(port).establish(harness));
        let standing = harness.flows(terms.family);
        let late = Dialogue::new(terms, VIP).with_port(500);
        late.open(harness).expect("dropped-table-full");
        assert_eq!(harness.flows(terms.family), standing, "no flow that stands is touched");
        let (request, reply) = Dialogue::new(terms, VIP).with_port(5).entries(harness);
        harness.evict(&request);
        late.open(harness).expect("dropped-table-full");
        assert_eq!(late.request_entry(harness), None, "room for one entry is not enough for a flow");
        harness.evict(&reply);
        late.open(harness).expect("forwarded");
    });
}

#[test]
fn an_exhausted_port_range_drops_new_flows_to_this_endpoint_only() {
    everywhere(|harness, terms| {
        harness.set_up(&setup(Spot::Near).snat_ports(5000..5020));
        for port in 1..=20 {
            Dialogue::new(terms, VIP).with_port(port).open(harness).expect("forwarded");
        }
        let ports: std::collections::BTreeSet<_> = (1..=20)
            .map(|port| Dialogue::new(terms, VIP).with_port(port).entries(harness).0.new_from.port())
            .collect();
        assert_eq!(ports, (5000..5020).collect(), "each port once");
        let late = Dialogue::new(terms, VIP).with_port(21);
        late.open(harness).expect("dropped-no-snat-port");
        assert_eq!(late.request_entry(harness), None);
        Dialogue::new(terms, VIP).with_port(1).establish(harness);
        let other = Frontend::new(Spot::OtherVip, PORT).endpoints(&[(Spot::OtherNear, ENDPOINT_PORT)]);
        harness.put(2, &other);
        Dialogue::new(terms, (Spot::OtherVip, PORT)).with_port(21).open(harness).expect("forwarded");
    });
}

/// 95 % of the ports of a range this large can be used towards one endpoint before the first client
/// is refused.
#[test]
fn nearly_all_of_a_port_range_can_be_used() {
    const PORTS: u16 = 1000;
    harness::with_sizes(LARGE, |harness| {
        for terms in Terms::all() {
            harness.set_up(&setup(Spot::Near).snat_ports(5000..5000 + PORTS));
            let opened = (1..=PORTS)
                .take_while(|port| {
                    Dialogue::new(terms, VIP).with_port(*port).open(harness).outcome == "forwarded"
                })
                .count();
            assert!(opened * 100 >= usize::from(PORTS) * 95, "{opened} of {PORTS} ports, {terms:?}");
        }
    });
}

/// RFC 6191: a port may be used again long before TIME_WAIT ends, as in conntrack's
/// `nf_nat_may_kill`.
#[test]
fn ports_of_flows_that_are_over_are_used_again() {
    everywhere_tcp(|harness, terms| {
        let (first, second) =
            (Dialogue::new(terms, VIP).with_port(1), Dialogue::new(terms, VIP).with_port(2));
        type Reach = fn(Dialogue, &Harness);
        const FIN_ACK: u8 = flag::FIN | ACK;
        let half_closed: Reach = |dialogue, harness| {
            dialogue.establish(harness);
            dialogue.send(harness, FIN_ACK);
        };
        let not_acknowledged: Reach = |dialogue, harness| {
            dialogue.establish(harness);
            dialogue.send(harness, FIN_ACK);
            dialogue.answer(harness, FIN_ACK);
        };
        let closed: Reach = |dialogue, harness| {
            dialogue.establish(harness);
            dialogue.close(harness);
        };
        let reset: Reach = |dialogue, harness| {
            dialogue.establish(harness);
            dialogue.send(harness, flag::RST | ACK);
        };
        let never_answered: Reach = |dialogue, harness| drop(dialogue.open(harness));
        let after = |harness: &mut Harness, reach: Reach, seconds: u32| {
            harness.set_up(&setup(Spot::Near).snat_ports([5000]));
            reach(first, harness);
            first.idle(harness, seconds);
            second.open(harness).outcome
        };
        for (what, reach, seconds) in [
            ("idle is not over", (|dialogue, harness| dialogue.establish(harness)) as Reach, 1000),
            ("half closed", half_closed, 1000),
            ("the last data may be lost", not_acknowledged, 1000),
            ("just closed", closed, 2),
            ("its SYN may come again", never_answered, 8),
        ] {
            assert_eq!(after(harness, reach, seconds), "dropped-no-snat-port", "{what}");
        }
        for reach in [closed, reset, never_answered] {
            assert_eq!(after(harness, reach, 30), "forwarded");
            assert_eq!(first.request_entry(harness), None, "both entries of the old flow are gone");
            assert_eq!(harness.flows(terms.family).len(), 2);
            second.answer(harness, SYN_ACK).expect("replied");
            second.send(harness, ACK).expect("forwarded");
        }
    });
}

/// Datagrams: a request, answered or not, is over after ten seconds; a stream is not.
#[test]
fn ports_of_questions_that_are_over_are_used_again() {
    everywhere_udp(|harness, terms| {
        let (first, second) =
            (Dialogue::new(terms, VIP).with_port(1), Dialogue::new(terms, VIP).with_port(2));
        let asked = |harness: &Harness| drop(first.open(harness));
        let answered = |harness: &Harness| {
            first.open(harness);
            first.answer(harness, SYN_ACK);
        };
        let stream = |harness: &Harness| first.establish(harness);
        type Reach<'a> = &'a dyn Fn(&Harness);
        for (what, reach, seconds, outcome) in [
            ("asked", &asked as Reach<'_>, 8, "dropped-no-snat-port"),
            ("answered", &answered, 8, "dropped-no-snat-port"),
            ("a stream", &stream, 100, "dropped-no-snat-port"),
            ("asked", &asked, 12, "forwarded"),
            ("answered", &answered, 12, "forwarded"),
        ] {
            harness.set_up(&setup(Spot::Near).snat_ports([5000]));
            reach(harness);
            first.idle(harness, seconds);
            assert_eq!(second.open(harness).outcome, outcome, "{what}, {seconds} s, {terms:?}");
            assert_eq!(first.request_entry(harness).is_none(), outcome == "forwarded", "{what}, {seconds} s");
        }
    });
}

/// An endpoint that closes first is in TIME_WAIT: another client's SYN with older time stamps waits
/// for a second there (RFC 7323 appendix B.2). Free ports therefore come first.
#[test]
fn free_ports_come_before_those_of_flows_that_are_over() {
    const FLOWS: u16 = 100;
    harness::with_sizes(LARGE, |harness| {
        for terms in Terms::all().filter(|terms| terms.tcp) {
            harness.set_up(&setup(Spot::Near).snat_ports(5000..5000 + 4 * FLOWS));
            let of_port = |port| Dialogue::new(terms, VIP).with_port(port);
            for port in 1..=FLOWS {
                of_port(port).establish(harness);
                of_port(port).close(harness);
                of_port(port).idle(harness, 30);
            }
            for port in 1..=FLOWS {
                of_port(1000 + port).open(harness).expect("forwarded");
            }
            let requests: Vec<_> =
                harness.flows(terms.family).into_iter().filter(FlowEntry::is_request).collect();
            let taken_over = usize::from(2 * FLOWS) - requests.len();
            assert!(taken_over <= 3, "{taken_over} of {FLOWS} took the port of another, {terms:?}");
        }
    });
}

/// A search of 256 insertions that fails is not repeated for each packet of a client that keeps
/// trying: for two jiffies only the first attempt is made.
#[test]
fn a_search_that_has_just_failed_is_spared() {
    everywhere(|harness, terms| {
        let of_port = |port| Dialogue::new(terms, VIP).with_port(port);
        let forget = |harness: &mut Harness, dialogue: Dialogue| {
            let (request, reply) = dialogue.entries(harness);
            harness.evict(&request);
            harness.evict(&reply);
        };
        harness.set_up(&setup(Spot::Near).snat_ports([5000, 5001]));
        for port in 1..=2 {
            of_port(port).open(harness).expect("forwarded");
        }
        of_port(3).open(harness).expect("dropped-no-snat-port");
        // One of two ports is free, which half of all clients try first.
        forget(harness, of_port(1));
        let served = |harness: &mut Harness, port, spared| {
            if spared {
                harness.fail_searches_now();
            } else {
                harness.forget_failed_searches();
            }
            let found = of_port(port).open(harness).outcome == "forwarded";
            if found {
                forget(harness, of_port(port));
            }
            found
        };
        assert!((100..130).any(|port| !served(harness, port, true)), "{terms:?}");
        assert!((200..230).all(|port| served(harness, port, false)), "{terms:?}");
    });
}

/// An endpoint whose client never established its connection still waits when another client has
/// got its port: it answers the SYN by an ACK of the number that it expects (RFC 9293 section
/// 3.10.7.4), and the client resets that.
#[test]
fn the_new_owner_of_a_half_open_connections_port_gets_its_endpoints_ack() {
    everywhere_tcp(|harness, terms| {
        harness.set_up(&setup(Spot::Near).snat_ports([5000]));
        let (first, second) =
            (Dialogue::new(terms, VIP).with_port(1), Dialogue::new(terms, VIP).with_port(2));
        const FIRST: u32 = 1 << 31;
        harness.run(terms.hook, &first.opening().numbers(FIRST, 0));
        let answer = first.answer_packet(harness, flag::SYN | ACK).numbers(ANSWER_NUMBER, FIRST + 1);
        first.answered(harness, &answer).expect("replied");
        first.idle(harness, 20);
        second.open(harness).expect("forwarded");
        let segment = |ack| second.answer_packet(harness, ACK).numbers(ANSWER_NUMBER + 1, ack);
        // The acknowledgement number equals the number of bytes that the client has sent, which is
        // not accepted.
        second.answered(harness, &segment(0)).expect("passed-out-of-window");
        second.answered(harness, &segment(FIRST + 1)).expect("replied");
    });
}

/// Clients reopen closed connections, while on another CPU new flows take their ports: no CPU
/// overwrites an element that the other has removed, which belongs to another flow by then.
#[test]
fn connections_begin_anew_while_their_ports_are_taken() {
    const PORTS: std::ops::Range<u16> = 5000..5032;
    everywhere_tcp(|harness, terms| {
        let opening = |dialogue: Dialogue| Input::new(terms.hook, dialogue.opening().bytes());
        let of_port = |port| Dialogue::new(terms, VIP).with_port(port);
        let (over, newer): (Vec<_>, Vec<_>) =
            (0..PORTS.len() as u16).map(|number| (of_port(1 + number), of_port(1001 + number))).unzip();
        for _ in 0..40 {
            harness.set_up(&setup(Spot::Near).snat_ports(PORTS));
            for dialogue in &over {
                dialogue.establish(harness);
                dialogue.send(harness, flag::RST | ACK).expect("forwarded");
                dialogue.idle(harness, 30);
            }
            let lists = [&over, &newer].map(|dialogues| dialogues.iter().copied().map(opening).collect());
            let [again, first]: [Vec<_>; 2] = lists;
            if harness.at_once([&again, &first]).is_none() {
                eprintln!("one CPU: nothing is at once");
                return;
            }
            let flows = harness.flows(terms.family);
            let (requests, replies): (Vec<_>, Vec<_>) = flows.into_iter().partition(FlowEntry::is_request);
            assert!(requests.len() >= PORTS.len() / 2, "{requests:?}");
            for request in &requests {
                let pair = |reply: &&FlowEntry| {
                    (reply.from, reply.to) == (request.new_to, request.new_from)
                        && (reply.new_from, reply.new_to) == (request.to, request.from)
                };
                assert_eq!(replies.iter().filter(pair).count(), 1, "{request:?}\n{replies:?}");
            }
        }
    });
}

/// The request entry of a reply entry has gone on with another port: the request entry lives.
#[test]
fn a_port_that_was_left_behind_is_used_again() {
    everywhere_tcp(|harness, terms| {
        let (first, second) =
            (Dialogue::new(terms, VIP).with_port(1), Dialogue::new(terms, VIP).with_port(2));
        harness.set_up(&setup(Spot::Near).snat_ports([5000]));
        first.establish(harness);
        first.answer(harness, flag::RST);
        let (request, left) = first.entries(harness);
        harness.change(&request, |entry| entry.new_from.set_port(4999));
        second.open(harness).expect("dropped-no-snat-port");
        let long_ago = |entry: &mut FlowEntry| entry.last = entry.last.wrapping_sub(30 * HZ);
        harness.change(&first.request_entry(harness).unwrap(), long_ago);
        harness.change(&left, long_ago);
        harness.forget_failed_searches();
        second.open(harness).expect("forwarded");
        assert!(first.request_entry(harness).is_some(), "it is another connection's now");
        assert_eq!(harness.flows(terms.family).len(), 3);
    });
}

/// A client may open and reset at will: one connection at a time holds one pair of entries and one
/// port.
#[test]
fn one_client_port_never_holds_more_than_one_port() {
    everywhere_tcp(|harness, terms| {
        harness.set_up(&setup(Spot::Near).snat_ports(5000..5020));
        let dialogue = Dialogue::new(terms, VIP);
        for _ in 0..200 {
            dialogue.open(harness).expect("forwarded");
            dialogue.send(harness, flag::RST);
        }
        assert_eq!(harness.flows(terms.family).len(), 2);
        for port in 1..=19 {
            Dialogue::new(terms, VIP).with_port(port).open(harness).expect("forwarded");
        }
    });
}

#[test]
fn an_empty_port_range_hurts_no_endpoint_of_this_node() {
    everywhere(|harness, terms| {
        harness.set_up(&setup(Spot::Local).snat_ports([]));
        Dialogue::new(terms, VIP).establish(harness);
    });
}

/// One client port, two frontends, one endpoint of this node: the endpoint must see two different
/// tuples.
#[test]
fn two_frontends_that_meet_in_one_tuple() {
    everywhere(|harness, terms| {
        let endpoints = [(Spot::Local, ENDPOINT_PORT)];
        let both = setup(Spot::Local).and(Frontend::new(NODE.0, NODE.1).endpoints(&endpoints));
        harness.set_up(&both);
        let (first, second) = (Dialogue::new(terms, VIP), Dialogue::new(terms, NODE));
        first.open(harness).expect("delivered");
        let ran = second.open(harness);
        ran.expect("delivered");
        let (request, _) = second.entries(harness);
        assert_eq!(request.new_from.ip(), request.from.ip(), "the endpoint still sees the client");
        assert!((5000..6000).contains(&request.new_from.port()), "{}", request.new_from);
        let expected = second.opening().source((request.new_from.ip(), request.new_from.port()));
        ran.expect_frame(&expected.destination(terms.at(endpoints[0])));
        for dialogue in [first, second] {
            let answer = dialogue.answer_packet(harness, SYN_ACK);
            let expected =
                answer.clone().source(terms.at(dialogue.frontend)).destination(terms.at(dialogue.client));
            harness.run(Hook::Egress, &answer).expect("replied-local").expect_frame(&expected);
            dialogue.send(harness, ACK).expect("delivered");
            dialogue.establish(harness);
        }
        for ports in [vec![CLIENT_PORT], vec![]] {
            harness.set_up(&both.clone().snat_ports(ports));
            first.open(harness).expect("delivered");
            second.open(harness).expect("dropped-no-snat-port");
        }
    });
}
