//! Packets within UDP: what leaves, what is opened, and which datagrams to the same port are a
//! pod's own.

use traffic_policy_testing::harness::{self, Device, Frontend, Harness, Hook, Setup, Spot};
use traffic_policy_testing::lab::Family;
use traffic_policy_testing::packet::{Extension, Packet, Transport, flag};

use super::headers::ANY_ORDER;
use super::{
    FRONT, LOCAL, NEAR, VIP, addresses, each_ingress, icmp, octets, outer, set_up_home, terms,
    the_answer_leaves,
};
use crate::table::{CLIENT_PORT, PORT, Terms};

/// GUE of variant 1: the packet follows the UDP header.
const GUE: u16 = 6080;
/// A source port that nodes use.
const SOURCE: u16 = 777;
pub(super) const UDP: usize = 8;

/// A packet within UDP.
pub(super) fn within(inner: &Packet, source: u16, from: Spot, to: Spot) -> Packet {
    let family = if inner.source.is_ipv4() { Family::V4 } else { Family::V6 };
    let [from, to] = [from, to].map(|spot| spot.of(family));
    let udp = Transport::Udp { source, destination: GUE, checksum: false };
    Packet::new(from, to, udp).payload(&inner.bytes()[14..])
}

/// The same as it leaves this node for the endpoint's.
pub(super) fn sent(inner: &Packet, source: u16) -> Packet {
    within(inner, source, Spot::Node, NEAR.0).macs(Device::Eth0.mac(), Spot::RouterNear.mac()).with(|outer| {
        outer.ttl = 64;
        outer.label = if inner.source.is_ipv4() { 0 } else { inner.label & !7 };
        outer.dont_fragment = true;
        outer.traffic_class = inner.traffic_class;
    })
}

fn arrives(inner: &Packet, from: Spot) -> Packet {
    within(inner, SOURCE, from, LOCAL.0).macs(Spot::Router.mac(), Device::Eth0.mac())
}

pub(super) fn source_port(frame: &[u8], terms: Terms) -> u16 {
    let l4 = 14 + outer(terms);
    u16::from_be_bytes([frame[l4], frame[l4 + 1]])
}

fn set_up_front(harness: &mut Harness) {
    harness.set_up(&Setup::of(Frontend::new(VIP.0, VIP.1).endpoints(&[NEAR]).direct_within_udp()));
}

#[test]
fn packets_leave_within_udp_with_one_source_port_for_each_flow() {
    each_ingress(|harness, terms| {
        set_up_front(harness);
        let mut ports = std::collections::BTreeSet::new();
        for client in 0..32 {
            let of = |flags| {
                let packet = terms.packet((Spot::Client, CLIENT_PORT + client), VIP);
                packet.macs(Spot::Router.mac(), Device::Eth0.mac()).with(|packet| {
                    (packet.traffic_class, packet.label) = (0x2e, 0x1234);
                    if terms.tcp {
                        packet.tcp_mut().flags = flags;
                    }
                })
            };
            let mut first = None;
            for flags in [flag::SYN, flag::ACK, flag::ACK, flag::FIN | flag::ACK] {
                let ran = harness.run(terms.hook, &of(flags));
                let port = source_port(&ran.frame, terms);
                assert_eq!(*first.get_or_insert(port), port, "{terms:?}");
                ran.expect("forwarded-direct").expect_frame(&sent(&of(flags), port));
                assert!((512..1024).contains(&port), "{port}, {terms:?}");
                ports.insert(port);
            }
        }
        assert!(ports.len() > 16, "flows are spread: {ports:?}, {terms:?}");
    });
}

#[test]
fn established_packets_need_no_slow_path() {
    each_ingress(|harness, terms| {
        set_up_front(harness);
        let request = terms.request(VIP);
        harness.run(terms.hook, &request).expect("forwarded-direct");
        let next = if terms.tcp {
            request.with(|packet| packet.tcp_mut().flags = flag::ACK).numbers(1001, 5001)
        } else {
            request
        };
        harness.run(terms.hook, &next).expect("forwarded-direct");
        harness.without_slow_path(|harness| {
            let ran = harness.run(terms.hook, &next);
            let port = source_port(&ran.frame, terms);
            ran.expect("forwarded-direct").expect_frame(&sent(&next, port));
        });
    });
}

/// The error goes by the flow's entry, and without one by the table, from which no port of UDP is
/// known.
#[test]
fn an_error_about_a_reply_travels_within_udp() {
    each_ingress(|harness, terms| {
        let frontend = Frontend::new(VIP.0, VIP.1).endpoints(&[NEAR]).direct_within_udp();
        let set_up = Setup::of(frontend.maglev("251".parse().unwrap()));
        for known in [true, false] {
            harness.set_up(&set_up);
            let request = harness.run(terms.hook, &terms.request(VIP));
            if !known {
                harness.set_up(&set_up);
            }
            let error = icmp::unreachable(terms, VIP);
            let ran = harness.run(terms.hook, &error);
            let port = source_port(&ran.frame, terms);
            ran.expect("forwarded-icmp-error").expect_frame(&sent(&error, port));
            assert!((512..1024).contains(&port), "{port}, {terms:?}");
            assert!(!known || port == source_port(&request.frame, terms), "{terms:?}");
        }
    });
}

/// An ICMP error has no ports, and yet travels within UDP as packets of its flow do.
#[test]
fn an_error_about_a_reply_is_opened() {
    harness::with(|harness| {
        for terms in terms(Hook::Ingress) {
            set_up_home(harness, VIP);
            harness.run(terms.hook, &arrives(&terms.request(VIP), FRONT)).expect("delivered");
            let error = icmp::unreachable(terms, VIP);
            harness.run(terms.hook, &arrives(&error, FRONT)).expect("delivered-icmp-error");
        }
    });
}

#[test]
fn a_packet_that_would_be_too_long_is_refused_with_what_fits() {
    each_ingress(|harness, terms| {
        set_up_front(harness);
        let ip = outer(terms);
        let header = ip + if terms.tcp { 20 } else { 8 };
        let longest = 1500 - ip - UDP;
        let of_length = |length: usize| {
            terms.request(VIP).payload(&vec![7; length - header]).with(|packet| packet.dont_fragment = true)
        };
        let fits = of_length(longest);
        let ran = harness.run(terms.hook, &fits);
        let port = source_port(&ran.frame, terms);
        ran.expect("forwarded-direct").expect_frame(&sent(&fits, port));
        let ran = harness.run(terms.hook, &of_length(longest + 1));
        if terms.xdp() {
            ran.expect("passed-to-tc");
        } else {
            ran.expect("rejected-mtu-exceeded");
            let icmp = &ran.frame[14 + ip..];
            assert_eq!(icmp[6..8], u16::try_from(longest).unwrap().to_be_bytes(), "{terms:?}");
            assert_eq!(addresses(&ran.frame, terms)[0], octets(terms, Spot::Vip), "{terms:?}");
        }
    });
}

#[test]
fn a_way_too_narrow_for_ipv6_is_not_taken() {
    each_ingress(|harness, terms| {
        for (mtu, outcome) in [(1327, "forwarded"), (1328, "forwarded-direct")] {
            let frontend = Frontend::new(VIP.0, VIP.1).endpoints(&[NEAR]).direct_within_udp();
            let mut setup = Setup::of(frontend);
            setup.route_mtus = vec![(NEAR.0, mtu)];
            harness.set_up(&setup);
            let outcome = if terms.v4() { "forwarded-direct" } else { outcome };
            harness.run(terms.hook, &terms.request(VIP)).expect(outcome);
        }
    });
}

/// Any order will do once the first has told the ports. The last one is shorter than a UDP header.
#[test]
fn fragments_travel_as_whole_packets_do() {
    let fragments = |whole: &Packet| whole.fragments(48);
    let whole = |terms: Terms| {
        let length = if terms.tcp { 48 * 3 - 20 + 1 } else { 48 * 3 - 8 + 1 };
        let packet = terms.request(VIP).payload(&vec![7; length]);
        packet.with(|packet| (packet.dont_fragment, packet.label) = (false, 76))
    };
    each_ingress(|harness, terms| {
        set_up_front(harness);
        let fragments = fragments(&whole(terms));
        harness.run(terms.hook, &fragments[1]).expect("passed-fragment").expect_frame(&fragments[1]);
        for fragment in ANY_ORDER.map(|at| &fragments[at]).into_iter().chain(&fragments[3..]) {
            let ran = harness.run(terms.hook, fragment);
            let port = source_port(&ran.frame, terms);
            ran.expect("forwarded-direct").expect_frame(&sent(fragment, port));
        }
    });
    harness::with(|harness| {
        for terms in terms(Hook::Ingress) {
            set_up_home(harness, VIP);
            let delivered = fragments(&whole(terms).destination(terms.at(LOCAL)));
            let fragments = fragments(&whole(terms));
            harness.run(terms.hook, &arrives(&fragments[1], FRONT)).expect("dropped-unknown-endpoint");
            for at in ANY_ORDER.into_iter().chain(3..fragments.len()) {
                let ran = harness.run(terms.hook, &arrives(&fragments[at], FRONT));
                ran.expect("delivered").expect_frame(&delivered[at]);
            }
        }
    });
}

#[test]
fn what_another_node_sends_is_opened_for_its_endpoint() {
    harness::with(|harness| {
        for terms in terms(Hook::Ingress) {
            set_up_home(harness, VIP);
            let request = terms.request(VIP);
            let delivered = request.clone().destination(terms.at(LOCAL));
            for congested in [false, true] {
                let mark = if congested { 3 } else { 0 };
                let request = request.clone().with(|packet| packet.traffic_class = 2);
                let arrives = arrives(&request, FRONT).with(|outer| outer.traffic_class = mark);
                let delivered = delivered.clone().with(|packet| packet.traffic_class = 2 | mark);
                harness.run(terms.hook, &arrives).expect("delivered").expect_frame(&delivered);
            }
            the_answer_leaves(harness, terms);
        }
    });
}

/// A pod may itself serve that port: what no node has sent for a Service reaches it as it is.
#[test]
fn datagrams_to_a_pod_are_left_alone() {
    harness::with(|harness| {
        for terms in terms(Hook::Ingress) {
            set_up_home(harness, VIP);
            let request = terms.request(VIP);
            let lan = |packet: Packet| packet.macs(Spot::Router.mac(), Device::Eth0.mac());
            let unknown = terms.packet((Spot::Client, CLIENT_PORT), (Spot::Vip, PORT + 1));
            let [client, vip] = [Spot::Client, Spot::Vip].map(|spot| spot.of(terms.family));
            let not_ip = Packet::new(client, vip, Transport::Other(47)).payload(&[0; 40]);
            let longer = arrives(&request, FRONT).with(|outer| outer.payload.push(0));
            let text = lan(within(&request, SOURCE, FRONT, LOCAL.0)).payload(&[b'G'; 200]);
            let other_port = arrives(&request, FRONT).with(|outer| {
                outer.transport = Transport::Udp { source: SOURCE, destination: GUE + 1, checksum: false };
            });
            let fragment = arrives(&request, FRONT).with(|outer| {
                outer.more_fragments = true;
                outer.extensions = vec![Extension::fragment(0, true, 9)];
            });
            for (what, packet) in [
                ("from a host", arrives(&request, Spot::Client)),
                ("to the node", lan(within(&request, SOURCE, FRONT, Spot::Node))),
                ("to another pod", lan(within(&request, SOURCE, FRONT, Spot::LocalTyped))),
                ("from a port of SNAT", lan(within(&request, 20000, FRONT, LOCAL.0))),
                ("from the port after the last", lan(within(&request, 1024, FRONT, LOCAL.0))),
                ("from the port before the first", lan(within(&request, 511, FRONT, LOCAL.0))),
                ("no Service", arrives(&unknown, FRONT)),
                ("another protocol", arrives(&not_ip, FRONT)),
                ("longer than its packet", longer),
                ("text", text),
                ("to another port", other_port),
                ("a fragment", fragment),
            ] {
                let ran = harness.run(terms.hook, &packet);
                assert!(ran.outcome.starts_with("passed"), "{what}: {}, {terms:?}", ran.outcome);
                ran.expect_frame(&packet);
            }
            harness.run(terms.hook, &arrives(&request, FRONT)).expect("delivered");
        }
    });
}
