//! Replies that go back through the node in front, within packets.

use traffic_policy_testing::harness::{self, Device, Frontend, Harness, Hook, Setup, Spot};
use traffic_policy_testing::packet::{Packet, Transport, flag};

use super::headers::ANY_ORDER;
use super::way::Way;
use super::{
    FRONT, LOCAL, NEAR, NODE, VIP, addresses, arrives, each_ingress, label, octets, outer, sent, set_up_home,
    terms, udp, within,
};
use crate::errors::{WHOLE, error, port_unreachable};
use crate::table::{CLIENT_PORT, PORT, Terms};

const CLIENT: (Spot, u16) = (Spot::Client, CLIENT_PORT);
/// Another node in front.
pub(super) const OTHER_FRONT: Spot = Spot::RouterNear;
/// Notes in an outer packet that replies are to come back: beside the number of owners.
pub(super) fn through_front(outer: &mut Packet) {
    outer.label |= label(outer.source.is_ipv4(), 4);
}

/// A request that asks for replies through the node in front, as it comes to the endpoint's node.
pub(super) fn asks(inner: &Packet, from: Spot) -> Packet {
    arrives(inner, from, LOCAL.0).with(through_front)
}

/// The endpoint's answer as it leaves this node for the node in front.
pub(super) fn to_front(answered: &Packet, front: Spot) -> Packet {
    within(answered, Spot::Node, front).macs(Device::Eth0.mac(), front.mac()).with(|outer| {
        outer.ttl = 64;
        outer.label = 0;
        outer.dont_fragment = true;
    })
}

pub(super) fn answer(terms: Terms) -> (Packet, Packet) {
    let answer = terms.answer(LOCAL, CLIENT).ttl(63);
    let answered = answer.clone().source(terms.at(VIP));
    (answer, answered)
}

/// A node in front of an endpoint that is on another node.
pub(super) fn set_up_front(harness: &mut Harness, to: (Spot, u16)) {
    harness.set_up(&Setup::of(Frontend::new(to.0, to.1).endpoints(&[NEAR]).tunnel()));
    harness.let_send_directly(Spot::RouterNear);
}

/// A reply within a packet, as it comes to the node in front.
pub(super) fn comes_back(inner: &Packet, from: Spot, to: Spot) -> Packet {
    within(inner, from, to).macs(Spot::RouterNear.mac(), Device::Eth0.mac())
}

fn reply(terms: Terms, from: (Spot, u16)) -> Packet {
    terms.answer(from, CLIENT).ttl(63)
}

#[test]
fn the_node_in_front_asks_for_it() {
    each_ingress(|harness, terms| {
        set_up_front(harness, VIP);
        let request = terms.request(VIP);
        let expected = sent(&request).with(through_front);
        for _ in 0..3 {
            harness.run(terms.hook, &request).expect("forwarded-direct").expect_frame(&expected);
        }
        if terms.tcp {
            let next = request.clone().with(|packet| packet.tcp_mut().flags = flag::ACK);
            let expected = sent(&next).with(through_front);
            for _ in 0..2 {
                harness.run(terms.hook, &next).expect("forwarded-direct").expect_frame(&expected);
            }
        }
    });
}

#[test]
fn the_reply_goes_back_to_the_node_in_front() {
    harness::with(|harness| {
        for terms in terms(Hook::Ingress) {
            set_up_home(harness, VIP);
            let request = terms.request(VIP);
            let delivered = request.clone().destination(terms.at(LOCAL));
            let (answer, answered) = answer(terms);
            for _ in 0..3 {
                harness.run(terms.hook, &asks(&request, FRONT)).expect("delivered").expect_frame(&delivered);
                let ran = harness.run(Hook::Egress, &answer);
                ran.expect("replied-to-front").expect_frame(&to_front(&answered, FRONT));
            }
        }
    });
}

/// The last packet decides: another node in front, or this node itself.
#[test]
fn replies_follow_the_requests() {
    harness::with(|harness| {
        for terms in terms(Hook::Ingress) {
            set_up_home(harness, VIP);
            harness.let_send_directly_as(OTHER_FRONT, 2);
            let request = terms.request(VIP);
            let (answer, answered) = answer(terms);
            harness.run(terms.hook, &asks(&request, FRONT)).expect("delivered");
            harness.run(Hook::Egress, &answer).expect_frame(&to_front(&answered, FRONT));
            let next = request.clone().with(|packet| {
                if terms.tcp {
                    packet.tcp_mut().flags = flag::ACK;
                }
            });
            harness.run(terms.hook, &asks(&next, OTHER_FRONT)).expect("delivered");
            harness.run(Hook::Egress, &answer).expect_frame(&to_front(&answered, OTHER_FRONT));
            harness.run(terms.hook, &arrives(&next, FRONT, LOCAL.0)).expect("delivered");
            harness.run(Hook::Egress, &answer).expect("replied-local").expect_frame(&answered);
            harness.run(terms.hook, &asks(&next, FRONT)).expect("delivered");
            harness.run(Hook::Egress, &answer).expect_frame(&to_front(&answered, FRONT));
            harness.run(terms.hook, &request).expect("delivered");
            harness.run(Hook::Egress, &answer).expect("replied-local").expect_frame(&answered);
        }
    });
}

/// XDP leaves such a flow's packets to TC, where the way back is changed.
#[test]
fn a_client_that_comes_to_this_node_is_answered_from_here() {
    harness::with(|harness| {
        for terms in terms(Hook::Ingress) {
            set_up_home(harness, VIP);
            let request = terms.request(VIP);
            harness.run(terms.hook, &asks(&request, FRONT)).expect("delivered");
            harness.run(Hook::Xdp, &request).expect("passed-to-tc");
            harness.run(terms.hook, &request).expect("delivered");
            let (answer, answered) = answer(terms);
            harness.run(Hook::Egress, &answer).expect("replied-local").expect_frame(&answered);
        }
    });
}

/// A segment with other numbers, as one that a stranger has made, leads no replies elsewhere.
#[test]
fn a_segment_of_no_such_connection_changes_no_way() {
    harness::with(|harness| {
        for terms in terms(Hook::Ingress).filter(|terms| terms.tcp) {
            set_up_home(harness, VIP);
            harness.let_send_directly_as(OTHER_FRONT, 2);
            let segment = |flags, sequence| {
                let packet = terms.request(VIP).with(|packet| packet.tcp_mut().flags = flags);
                packet.numbers(sequence, 5000)
            };
            harness.run(terms.hook, &asks(&segment(flag::SYN, 1000), FRONT)).expect("delivered");
            let forged = segment(flag::ACK, 900_000_000);
            harness.run(terms.hook, &asks(&forged, OTHER_FRONT));
            harness.run(terms.hook, &forged);
            let (answer, answered) = answer(terms);
            let ran = harness.run(Hook::Egress, &answer);
            ran.expect("replied-to-front").expect_frame(&to_front(&answered, FRONT));
        }
    });
}

#[test]
fn a_reply_that_would_be_too_long_is_refused_with_what_fits() {
    harness::with(|harness| {
        for terms in terms(Hook::Ingress) {
            set_up_home(harness, VIP);
            harness.run(terms.hook, &asks(&terms.request(VIP), FRONT)).expect("delivered");
            let longest = 1500 - outer(terms);
            let header = outer(terms) + if terms.tcp { 20 } else { 8 };
            for dont_fragment in [true, false] {
                let of_length = |length: usize| {
                    let (answer, answered) = answer(terms);
                    [answer, answered].map(|packet| {
                        packet
                            .payload(&vec![7; length - header])
                            .with(|packet| packet.dont_fragment = dont_fragment)
                    })
                };
                let [fits, answered] = of_length(longest);
                let ran = harness.run(Hook::Egress, &fits);
                ran.expect("replied-to-front").expect_frame(&to_front(&answered, FRONT));
                let ran = harness.run(Hook::Egress, &of_length(longest + 1)[0]);
                ran.expect("rejected-mtu-exceeded");
                let icmp = &ran.frame[14 + outer(terms)..];
                assert_eq!(icmp[6..8], u16::try_from(longest).unwrap().to_be_bytes(), "{terms:?}");
                let [source, to] = addresses(&ran.frame, terms);
                let expected = (octets(terms, Spot::Client), octets(terms, Spot::Local));
                assert_eq!((source, to), expected, "{terms:?}");
            }
        }
    });
}

/// Routers and cards spread flows by the ports of what they travel in.
#[test]
fn replies_of_one_flow_have_one_source_port_and_those_of_others_have_others() {
    harness::with(|harness| {
        for terms in terms(Hook::Ingress) {
            set_up_home(harness, VIP);
            let mut ports = std::collections::BTreeSet::new();
            for client in 0..32 {
                let client = (Spot::Client, CLIENT_PORT + client);
                let request = terms.packet(client, VIP).macs(Spot::Router.mac(), Device::Eth0.mac());
                let asks = Way::ALL[1].arrives(&request, FRONT, LOCAL.0).with(through_front);
                harness.run(terms.hook, &asks).expect("delivered");
                let answer = terms.answer(LOCAL, client).ttl(63);
                let of_answer = |harness: &mut Harness| {
                    let ran = harness.run(Hook::Egress, &answer);
                    ran.expect("replied-to-front");
                    udp::source_port(&ran.frame, terms)
                };
                let port = of_answer(harness);
                assert_eq!(of_answer(harness), port, "{terms:?}");
                assert!((512..1024).contains(&port), "{terms:?}: {port}");
                ports.insert(port);
            }
            // Of 32 out of 512 ports, 31 differ on average.
            assert!(ports.len() >= 16, "{terms:?}: {ports:?}");
        }
    });
}

/// An RST for a connection that nobody knows has the frontend's address, too.
#[test]
fn what_this_node_answers_goes_back_as_well() {
    harness::with(|harness| {
        for terms in terms(Hook::Ingress).filter(|terms| terms.tcp) {
            set_up_home(harness, VIP);
            let segment = terms.request(VIP).with(|packet| {
                packet.tcp_mut().flags = flag::ACK;
                *packet = packet.clone().numbers(1000, 2000);
            });
            let ran = harness.run(terms.hook, &asks(&segment, FRONT));
            ran.expect("reset-no-flow");
            let [source, to] = addresses(&ran.frame, terms);
            assert_eq!((source, to), (octets(terms, Spot::Node), octets(terms, FRONT)), "{terms:?}");
            let mut inner = ran.frame.clone();
            inner.drain(14..14 + outer(terms));
            let [source, to] = addresses(&inner, terms);
            assert_eq!((source, to), (octets(terms, Spot::Vip), octets(terms, Spot::Client)), "{terms:?}");
            assert_eq!(inner[14 + outer(terms) + 13], flag::RST);
        }
    });
}

#[test]
fn the_node_in_front_opens_replies() {
    each_ingress(|harness, terms| {
        for (to, way) in [NODE, VIP].into_iter().flat_map(|to| Way::ALL.map(|way| (to, way))) {
            set_up_front(harness, to);
            let comes_back = |inner: &Packet| {
                let outer = way.within(inner, Spot::RouterNear, Spot::Node);
                outer.macs(Spot::RouterNear.mac(), Device::Eth0.mac())
            };
            let reply = reply(terms, to);
            let leaves = reply.clone().ttl(62).macs(Device::Eth0.mac(), Spot::Router.mac());
            for _ in 0..2 {
                let ran = harness.run(terms.hook, &comes_back(&reply));
                ran.expect("replied-opened").expect_frame(&leaves);
            }
            assert_eq!(harness.flows(terms.family), [], "nothing is remembered");
            // An ICMP error of the endpoint about a request.
            let error = error(terms, port_unreachable(terms), to.0, &terms.request(to), WHOLE).ttl(63);
            let leaves = error.clone().ttl(62).macs(Device::Eth0.mac(), Spot::Router.mac());
            let ran = harness.run(terms.hook, &comes_back(&error));
            ran.expect("replied-opened").expect_frame(&leaves);
        }
    });
}

/// The node that has sent the reply is told about its outer packet, as by a router on the way, with
/// a quote that names the reply.
#[test]
fn a_reply_that_is_too_long_for_the_way_to_the_client_is_refused_with_what_fits() {
    each_ingress(|harness, terms| {
        for way in Way::ALL {
            set_up_front(harness, VIP);
            let comes_back = |length: usize| {
                let headers = outer(terms) + if terms.tcp { 20 } else { 8 };
                let reply = reply(terms, VIP).payload(&vec![7; length - headers]);
                let outer = way.within(&reply, Spot::RouterNear, Spot::Node);
                outer.macs(Spot::RouterNear.mac(), Device::Eth0.mac())
            };
            harness.run(terms.hook, &comes_back(1500)).expect("replied-opened");
            let too_long = comes_back(1501);
            let ran = harness.run(terms.hook, &too_long);
            let mtu = u16::try_from(1500 + way.bytes(terms)).unwrap();
            let quoted = 2 * outer(terms) + udp::UDP + 8;
            let told = too_long_for(terms, mtu, &too_long, quoted);
            let told = told.macs(Device::Eth0.mac(), Spot::RouterNear.mac());
            ran.expect("rejected-mtu-exceeded").expect_frame(&told);
        }
    });
}

fn too_long_for(terms: Terms, mtu: u16, about: &Packet, quoted: usize) -> Packet {
    let [high, low] = mtu.to_be_bytes();
    let kind = if terms.v4() { (3, 4) } else { (2, 0) };
    error(terms, (kind.0, kind.1, [0, 0, high, low]), Spot::Node, about, quoted)
        .with(|packet| packet.ttl = 64)
}

/// Later fragments follow the first one, in either order; without it there is nothing to tell their
/// frontend.
#[test]
fn fragments_of_replies_are_opened() {
    each_ingress(|harness, terms| {
        for way in Way::ALL {
            set_up_front(harness, VIP);
            let whole = reply(terms, VIP).payload(&[7; 100]);
            let whole = whole.with(|packet| (packet.dont_fragment, packet.label) = (false, 77));
            let fragments = whole.fragments(48);
            assert_eq!(fragments.len(), 3);
            let comes = |fragment: &Packet| {
                let outer = way.within(fragment, Spot::RouterNear, Spot::Node);
                outer.macs(Spot::RouterNear.mac(), Device::Eth0.mac())
            };
            let early = harness.run(terms.hook, &comes(&fragments[1]));
            early.expect(if way.is_udp() { "passed" } else { "passed-unsupported-protocol" });
            for fragment in ANY_ORDER.map(|at| &fragments[at]) {
                let leaves = fragment.clone().ttl(62).macs(Device::Eth0.mac(), Spot::Router.mac());
                let ran = harness.run(terms.hook, &comes(fragment));
                ran.expect("replied-opened").expect_frame(&leaves);
            }
        }
    });
}

/// The pod's stack sends them one after the other; the last may come first to the devices.
#[test]
fn fragments_of_answers_go_back_to_the_node_in_front() {
    harness::with(|harness| {
        for (terms, way) in terms(Hook::Ingress).flat_map(|terms| Way::ALL.map(|way| (terms, way))) {
            set_up_home(harness, VIP);
            let asks = way.arrives(&terms.request(VIP), FRONT, LOCAL.0).with(through_front);
            harness.run(terms.hook, &asks).expect("delivered");
            let whole = |packet: Packet| {
                packet.payload(&[7; 100]).with(|packet| (packet.dont_fragment, packet.label) = (false, 77))
            };
            let (answer, answered) = answer(terms);
            let [answer, answered] = [answer, answered].map(|packet| whole(packet).fragments(48));
            assert_eq!(answer.len(), 3);
            for at in ANY_ORDER {
                let ran = harness.run(Hook::Egress, &answer[at]);
                let outer = way.of(&ran, terms).within(&answered[at], Spot::Node, FRONT);
                let outer = outer.macs(Device::Eth0.mac(), FRONT.mac()).with(|outer| {
                    outer.ttl = 64;
                    outer.label = if terms.v4() { 0 } else { 77 & !7 };
                    outer.dont_fragment = true;
                });
                ran.expect("replied-to-front").expect_frame(&outer);
            }
        }
    });
}

#[test]
fn what_is_no_reply_is_left_alone() {
    each_ingress(|harness, terms| {
        set_up_front(harness, VIP);
        let good = reply(terms, VIP);
        let other_port = reply(terms, (Spot::Vip, PORT + 1));
        let of_host = reply(terms, (Spot::OtherNear, PORT));
        let stranger = error(
            terms,
            port_unreachable(terms),
            Spot::Vip,
            &terms.packet((Spot::OtherClient, CLIENT_PORT), VIP),
            WHOLE,
        )
        .with(|packet| packet.destination = Spot::Client.of(terms.family));
        let [vip, client] = [Spot::Vip, Spot::Client].map(|spot| spot.of(terms.family));
        let echo = Packet::new(vip, client, Transport::Icmp { kind: 0, code: 0, rest: [0; 4] });
        let echo = if terms.v4() {
            echo
        } else {
            Packet::new(vip, client, Transport::Icmp { kind: 129, code: 0, rest: [0; 4] })
        };
        let from = Spot::RouterNear;
        for (what, packet) in [
            ("from a host", comes_back(&good, Spot::OtherClient, Spot::Node)),
            ("to another address", comes_back(&good, from, Spot::Vip)),
            ("from another port", comes_back(&other_port, from, Spot::Node)),
            ("from no frontend", comes_back(&of_host, from, Spot::Node)),
            ("about another's request", comes_back(&stranger, from, Spot::Node)),
            ("no error", comes_back(&echo, from, Spot::Node)),
        ] {
            let ran = harness.run(terms.hook, &packet);
            assert_eq!(ran.outcome, "passed-unsupported-protocol", "{what}, {terms:?}");
            ran.expect_frame(&packet);
        }
        // The control, and a Service whose replies take no such way.
        harness.run(terms.hook, &comes_back(&good, from, Spot::Node)).expect("replied-opened");
        harness.set_up(&Setup::of(Frontend::new(VIP.0, VIP.1).endpoints(&[NEAR]).direct()));
        harness.let_send_directly(from);
        let ran = harness.run(terms.hook, &comes_back(&good, from, Spot::Node));
        assert_eq!(ran.outcome, "passed-unsupported-protocol", "{terms:?}");
    });
}

#[test]
fn a_reply_whose_time_is_over_is_dropped() {
    each_ingress(|harness, terms| {
        set_up_front(harness, VIP);
        let reply = reply(terms, VIP).ttl(1);
        let ran = harness.run(terms.hook, &comes_back(&reply, Spot::RouterNear, Spot::Node));
        ran.expect("dropped-ttl-exceeded");
    });
}
