//! Direct forwarding: the packet around a packet, and what is opened.

mod by_snat;
mod established;
mod full_table;
mod headers;
mod icmp;
mod in_front;
mod l2;
mod outer_errors;
mod outer_reply_errors;
mod pieces;
mod sctp;
mod sctp_tunnel;
mod states;
mod tunnel;
mod udp;
mod way;
mod way_back;
mod without_ethernet;

use traffic_policy_ebpf::tcp;
use traffic_policy_testing::harness::{self, Device, Frontend, Harness, Hook, Setup, Spot};
use traffic_policy_testing::lab::Family;
use traffic_policy_testing::packet::{Extension, Packet, Transport, chunk, flag};

use crate::sweeping::{SLACK, TIMEOUTS, sweeper};
use crate::table::{CLIENT_PORT, ENDPOINT_PORT, PORT, Terms};

const NODE: (Spot, u16) = (Spot::Node, PORT);
const VIP: (Spot, u16) = (Spot::Vip, PORT);
const NEAR: (Spot, u16) = (Spot::Near, ENDPOINT_PORT);
const LOCAL: (Spot, u16) = (Spot::Local, ENDPOINT_PORT);
/// The node in front, where this node has the endpoint.
const FRONT: Spot = Spot::Router;
/// IPv4 within IPv4 (RFC 2003), IPv6 within IPv6 (RFC 2473).
const IPIP: u8 = 4;
const IP6IP6: u8 = 41;

fn terms(hook: Hook) -> impl Iterator<Item = Terms> {
    Terms::all().filter(move |terms| terms.hook == hook)
}

fn each_ingress(mut work: impl FnMut(&mut Harness, Terms) + Send) {
    harness::with(|harness| Hook::INGRESS.into_iter().flat_map(terms).for_each(|terms| work(harness, terms)));
}

/// The bytes of an outer header.
fn outer(terms: Terms) -> usize {
    if terms.v4() { 20 } else { 40 }
}

/// The identification of an outer IPv4 packet, or the flow label of IPv6, with a number of owners.
/// In IPv4 it is in the first three bits, and the others count the segments of an aggregate.
pub(crate) fn label(v4: bool, number: u32) -> u16 {
    u16::try_from(if v4 { number << 13 } else { number }).unwrap()
}

/// A packet within another one.
fn within(inner: &Packet, from: Spot, to: Spot) -> Packet {
    let (family, protocol) = if inner.source.is_ipv4() { (Family::V4, IPIP) } else { (Family::V6, IP6IP6) };
    let ip = &inner.bytes()[14..];
    Packet::new(from.of(family), to.of(family), Transport::Other(protocol)).payload(ip)
}

/// The same as it leaves this node for the endpoint's.
fn sent(inner: &Packet) -> Packet {
    within(inner, Spot::Node, NEAR.0).macs(Device::Eth0.mac(), Spot::RouterNear.mac()).with(|outer| {
        outer.ttl = 64;
        // The number of owners that were asked before is 0.
        outer.label = if inner.source.is_ipv4() { 0 } else { inner.label & !7 };
        outer.dont_fragment = true;
        outer.traffic_class = inner.traffic_class;
    })
}

#[test]
fn packets_leave_within_packets_to_the_endpoint() {
    each_ingress(|harness, terms| {
        for to in [NODE, VIP] {
            harness.set_up(&Setup::of(Frontend::new(to.0, to.1).endpoints(&[NEAR]).direct()));
            let request =
                terms.request(to).with(|packet| (packet.traffic_class, packet.label) = (0x2e, 0x1234));
            for _ in 0..3 {
                harness.run(terms.hook, &request).expect("forwarded-direct").expect_frame(&sent(&request));
            }
            if terms.tcp {
                for flags in [flag::ACK, flag::FIN | flag::ACK, flag::RST] {
                    let next = request.clone().with(|packet| packet.tcp_mut().flags = flags);
                    harness.run(terms.hook, &next).expect("forwarded-direct").expect_frame(&sent(&next));
                }
            }
            assert_eq!(harness.flows(terms.family).len(), 1, "no entry for replies, {terms:?}");
        }
    });
}

#[test]
fn a_packet_that_would_be_too_long_is_refused_with_what_fits() {
    each_ingress(|harness, terms| {
        harness.set_up(&Setup::of(Frontend::new(VIP.0, VIP.1).endpoints(&[NEAR]).direct()));
        let ip = outer(terms);
        let header = ip + if terms.tcp { 20 } else { 8 };
        let longest = 1500 - ip;
        let of_length = |length: usize| {
            terms.request(VIP).payload(&vec![7; length - header]).with(|packet| packet.dont_fragment = true)
        };
        let fits = of_length(longest);
        harness.run(terms.hook, &fits).expect("forwarded-direct").expect_frame(&sent(&fits));
        let ran = harness.run(terms.hook, &of_length(longest + 1));
        if terms.xdp() {
            ran.expect("passed-to-tc");
        } else {
            ran.expect("rejected-mtu-exceeded");
            // The MTU is in the last bytes of the ICMP header, which comes from the frontend.
            let icmp = &ran.frame[14 + ip..];
            assert_eq!(icmp[6..8], u16::try_from(longest).unwrap().to_be_bytes(), "{terms:?}");
            assert_eq!(icmp[..2], if terms.v4() { [3, 4] } else { [2, 0] }, "{terms:?}");
            let [source, to] = addresses(&ran.frame, terms);
            assert_eq!((source, to), (octets(terms, Spot::Vip), octets(terms, Spot::Client)), "{terms:?}");
        }
    });
}

/// A pod that is its own client, and a node, whose own endpoint may be chosen, would not accept
/// their own address from outside.
#[test]
fn what_an_endpoint_would_not_accept_gets_this_nodes_address() {
    each_ingress(|harness, terms| {
        let by_mac = || Frontend::new(VIP.0, VIP.1).endpoints(&[NEAR]).direct_by_mac();
        let table = "251".parse().unwrap();
        for frontend in [
            Frontend::new(VIP.0, VIP.1).endpoints(&[NEAR]).direct(),
            Frontend::new(VIP.0, VIP.1).endpoints(&[NEAR]).direct_within_udp(),
            Frontend::new(VIP.0, VIP.1).endpoints(&[NEAR]).tunnel(),
            by_mac().maglev(table),
        ] {
            for (client, outcome) in
                [(NEAR.0, "forwarded"), (FRONT, "forwarded"), (Spot::OtherNear, "forwarded-direct")]
            {
                harness.set_up(&Setup::of(frontend.clone()));
                harness.let_send_directly(FRONT);
                let request = terms.packet((client, CLIENT_PORT), VIP);
                let request = request.macs(Spot::RouterNear.mac(), Device::Eth0.mac());
                for _ in 0..2 {
                    harness.run(terms.hook, &request).expect(outcome);
                }
            }
        }
    });
}

/// Source and destination of a frame.
fn addresses(frame: &[u8], terms: Terms) -> [Vec<u8>; 2] {
    let (first, length) = if terms.v4() { (12, 4) } else { (8, 16) };
    [0, 1].map(|place| frame[14 + first + place * length..][..length].to_vec())
}

fn octets(terms: Terms, spot: Spot) -> Vec<u8> {
    match spot.of(terms.family) {
        std::net::IpAddr::V4(address) => address.octets().to_vec(),
        std::net::IpAddr::V6(address) => address.octets().to_vec(),
    }
}

/// A node whose endpoint is on it, as another one sends to it.
fn set_up_home(harness: &mut Harness, to: (Spot, u16)) {
    harness.set_up(&Setup::of(Frontend::new(to.0, to.1).endpoints(&[NEAR])));
    harness.let_send_directly(FRONT);
    harness.open_for(LOCAL.0, 1, LOCAL.1);
}

fn arrives(inner: &Packet, from: Spot, to: Spot) -> Packet {
    within(inner, from, to).macs(Spot::Router.mac(), Device::Eth0.mac())
}

/// The endpoint's answer leaves for the client with the frontend's address.
fn the_answer_leaves(harness: &mut Harness, terms: Terms) {
    let answer = terms.answer(LOCAL, (Spot::Client, CLIENT_PORT)).ttl(63);
    let answered = answer.clone().source(terms.at(VIP));
    harness.run(Hook::Egress, &answer).expect("replied-local").expect_frame(&answered);
}

#[test]
fn what_another_node_sends_is_opened_for_its_endpoint() {
    harness::with(|harness| {
        for terms in terms(Hook::Ingress) {
            set_up_home(harness, VIP);
            let request = terms.request(VIP);
            let delivered = request.clone().destination(terms.at(LOCAL));
            for _ in 0..2 {
                let ran = harness.run(terms.hook, &arrives(&request, FRONT, LOCAL.0));
                ran.expect("delivered").expect_frame(&delivered);
            }
            the_answer_leaves(harness, terms);
        }
    });
}

/// Each node has node ports at its own addresses. This one has them at another address than the
/// one that its Node object names, as with `--node-port-addresses CIDR`.
#[test]
fn node_ports_of_another_node_are_opened_wherever_this_one_has_its_own() {
    harness::with(|harness| {
        for terms in terms(Hook::Ingress) {
            let of_front = (FRONT, PORT);
            let at = |own| Frontend::new(own, PORT).endpoints(&[NEAR]);
            // The last one is at the primary address alone, as before other nodes take part.
            for own in [at(Spot::NodeEth1).node_port(), at(Spot::Vip).node_port(), at(Spot::Node)] {
                harness.set_up(&Setup::of(own));
                harness.let_send_directly(FRONT);
                harness.open_for(LOCAL.0, 1, LOCAL.1);
                let request = terms.request(of_front);
                let delivered = request.clone().destination(terms.at(LOCAL));
                for _ in 0..2 {
                    let ran = harness.run(terms.hook, &arrives(&request, FRONT, LOCAL.0));
                    ran.expect("delivered").expect_frame(&delivered);
                }
                let answer = terms.answer(LOCAL, (Spot::Client, CLIENT_PORT)).ttl(63);
                let answered = answer.clone().source(terms.at(of_front));
                harness.run(Hook::Egress, &answer).expect("replied-local").expect_frame(&answered);
                let other = terms.request((FRONT, PORT + 1));
                harness.run(terms.hook, &arrives(&other, FRONT, LOCAL.0)).expect("dropped-unknown-endpoint");
            }
        }
    });
}

/// Neither from a host that is no node, nor to an address without an endpoint; nor what is not
/// whole. The stack gets it as it is.
#[test]
fn everything_else_is_left_alone() {
    harness::with(|harness| {
        for terms in terms(Hook::Ingress) {
            set_up_home(harness, VIP);
            let request = terms.request(VIP);
            let fragment = arrives(&request, FRONT, LOCAL.0).with(|outer| {
                outer.more_fragments = true;
                outer.extensions = vec![Extension::fragment(0, true, 9)];
            });
            // The walk over IPv6's headers ends at what is no transport.
            let fragmented = if terms.v4() { "passed-fragment" } else { "passed-unsupported-protocol" };
            for (what, packet, outcome) in [
                ("from a host", arrives(&request, Spot::Client, LOCAL.0), "passed-unsupported-protocol"),
                ("to the node", arrives(&request, FRONT, Spot::Node), "passed-unsupported-protocol"),
                ("to another pod", arrives(&request, FRONT, Spot::LocalTyped), "passed-unsupported-protocol"),
                ("a fragment", fragment, fragmented),
            ] {
                let ran = harness.run(terms.hook, &packet);
                assert_eq!(ran.outcome, outcome, "{what}, {terms:?}");
            }
        }
    });
}

/// A packet that is opened for no endpoint is dropped, never handed on as it is: this node's stack
/// would send it back to the other node.
#[test]
fn what_was_inside_never_passes_untranslated() {
    harness::with(|harness| {
        for terms in terms(Hook::Ingress) {
            set_up_home(harness, VIP);
            let unknown = terms.packet((Spot::Client, CLIENT_PORT), (Spot::Vip, PORT + 1));
            let [client, vip] = [Spot::Client, Spot::Vip].map(|spot| spot.of(terms.family));
            let not_ip = Packet::new(client, vip, Transport::Other(47));
            let again = within(&terms.request(VIP), FRONT, LOCAL.0);
            let martian = terms.packet((Spot::Node, CLIENT_PORT), VIP);
            for (what, inner, outcome) in [
                ("no Service", unknown, "dropped-unknown-endpoint"),
                ("another protocol", not_ip.payload(&[0; 40]), "dropped-unknown-endpoint"),
                ("another outer packet", again, "dropped-unknown-endpoint"),
                ("this node as client", martian, "dropped-martian-source"),
            ] {
                let ran = harness.run(terms.hook, &arrives(&inner, FRONT, LOCAL.0));
                assert_eq!(ran.outcome, outcome, "{what}, {terms:?}");
            }
        }
    });
}

/// A segment of a connection that nobody here knows is answered for the frontend.
#[test]
fn an_unknown_connection_is_reset_as_the_frontend() {
    harness::with(|harness| {
        for terms in terms(Hook::Ingress).filter(|terms| terms.tcp) {
            set_up_home(harness, VIP);
            let segment = terms.request(VIP).with(|packet| {
                packet.tcp_mut().flags = flag::ACK;
                *packet = packet.clone().numbers(1000, 2000);
            });
            let ran = harness.run(terms.hook, &arrives(&segment, FRONT, LOCAL.0));
            ran.expect("reset-no-flow");
            let [source, to] = addresses(&ran.frame, terms);
            assert_eq!(source, octets(terms, Spot::Vip), "from the frontend");
            assert_eq!(to, octets(terms, Spot::Client), "to the client");
            assert_eq!(ran.frame[14 + outer(terms) + 13], flag::RST);
        }
    });
}

/// A SYN with a forged source, and the ACK after it, is all that a flow costs: unassured ones make
/// room for each other, and a table that is full for ended ones.
#[test]
fn ended_flows_make_room_in_a_full_table() {
    harness::with(|harness| {
        for terms in terms(Hook::Ingress).filter(|terms| terms.tcp) {
            harness.set_up(&Setup::of(Frontend::new(VIP.0, VIP.1).endpoints(&[NEAR]).direct()));
            let of_port = |port: u16| {
                terms.packet((Spot::Client, port), VIP).macs(Spot::Router.mac(), Device::Eth0.mac())
            };
            harness.sweep(&mut sweeper(), false);
            let room = u16::try_from(if terms.v4() { harness::SIZES.flows4 } else { harness::SIZES.flows6 })
                .unwrap();
            for port in 1..=room {
                for flags in [flag::SYN, flag::ACK, flag::RST] {
                    let packet = of_port(port).with(|packet| packet.tcp_mut().flags = flags);
                    harness.run(terms.hook, &packet).expect("forwarded-direct");
                }
            }
            harness.run(terms.hook, &of_port(20_000)).expect("dropped-table-full");
            let last = harness.now().wrapping_sub(TIMEOUTS.reset + SLACK);
            for flow in harness.flows(terms.family) {
                harness.change(&flow, |entry| entry.last = last);
            }
            let served = (0..32)
                .any(|port| harness.run(terms.hook, &of_port(20_001 + port)).outcome == "forwarded-direct");
            assert!(served, "no ended flow was removed");
        }
    });
}

/// Whatever was inside, the next packet of another client is judged by itself.
#[test]
fn nothing_that_was_inside_concerns_the_next_packet() {
    harness::with(|harness| {
        for terms in terms(Hook::Ingress) {
            let [client, vip] = [Spot::Client, Spot::Vip].map(|spot| spot.of(terms.family));
            let sctp = Packet::sctp((client, CLIENT_PORT), (vip, PORT), 7, &[chunk::DATA, 0, 0, 4]);
            let kind = if terms.v4() { 3 } else { 1 };
            let error = Packet::new(client, vip, Transport::Icmp { kind, code: 1, rest: [0; 4] });
            let fragment = terms.request(VIP).with(|packet| {
                packet.fragment_offset = 100;
                packet.extensions = vec![Extension::fragment(800, false, 9)];
            });
            let options = terms.request(VIP).with(|packet| {
                packet.options = vec![1; 4];
                packet.extensions = vec![Extension::padding(60, 1)];
            });
            let sctp_fragment = sctp.clone().with(|packet| {
                packet.more_fragments = true;
                packet.extensions = vec![Extension::fragment(0, true, 9)];
            });
            let sctp_behind = sctp.clone().with(|packet| packet.extensions = vec![Extension::padding(0, 1)]);
            let error = error.payload(&terms.request(VIP).bytes()[14..]);
            let error_behind =
                error.clone().with(|packet| packet.extensions = vec![Extension::padding(60, 1)]);
            for (what, inner) in [
                ("SCTP", sctp),
                ("a fragment of SCTP", sctp_fragment),
                ("SCTP behind another header", sctp_behind),
                ("an ICMP error", error),
                ("an ICMP error behind another header", error_behind),
                ("a later fragment", fragment),
                ("options", options),
                ("a request", terms.request(VIP)),
            ] {
                set_up_home(harness, VIP);
                let ran = harness.run(terms.hook, &arrives(&inner, FRONT, LOCAL.0));
                assert!(
                    ran.outcome == "delivered" || ran.outcome.starts_with("dropped-"),
                    "{what}: {}",
                    ran.outcome
                );
                let other = terms.packet((Spot::OtherClient, CLIENT_PORT), VIP);
                let other = other.macs(Spot::Router.mac(), Device::Eth0.mac());
                assert_eq!(harness.run(terms.hook, &other).outcome, "forwarded", "after {what}, {terms:?}");
            }
        }
    });
}
