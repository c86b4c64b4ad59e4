//! Packets that go to the MAC address of the endpoint's node as they are: which do, which name
//! their endpoint instead, and what becomes of them there.

use traffic_policy_testing::harness::{self, Device, Frontend, Harness, Hook, Setup, Spot};
use traffic_policy_testing::packet::{Packet, flag};

use super::icmp::{about_reply, known, unreachable};
use super::{FRONT, LOCAL, NEAR, NODE, VIP, each_ingress, label, sent as named, terms};
use crate::errors::kinds;
use crate::table::{CLIENT_PORT, PORT, Terms};

/// The node of the endpoint [`NEAR`], which is the next hop to it.
const HOME: Spot = Spot::RouterNear;

pub(super) fn by_table(to: (Spot, u16), endpoints: &[(Spot, u16)]) -> Frontend {
    Frontend::new(to.0, to.1).endpoints(endpoints).direct_by_mac().maglev("251".parse().unwrap())
}

/// A node in front, which knows the endpoint's node by its MAC address.
fn set_up_front(harness: &mut Harness, frontend: Frontend) {
    harness.set_up(&Setup::of(frontend));
    know_home(harness);
}

/// A packet as it leaves for the endpoint's node: that of a router.
fn sent(packet: &Packet) -> Packet {
    packet.clone().macs(Device::Eth0.mac(), HOME.mac()).ttl(packet.ttl - 1)
}

fn next(terms: Terms) -> Packet {
    let next = terms.request(VIP).with(|packet| (packet.traffic_class, packet.label) = (0x2e, 0x1234));
    if !terms.tcp {
        return next;
    }
    next.with(|packet| packet.tcp_mut().flags = flag::ACK).numbers(1001, 5001)
}

/// No header, no byte less, and the entry program alone for established ones.
#[test]
fn packets_leave_as_they_came_but_for_mac_and_ttl() {
    each_ingress(|harness, terms| {
        set_up_front(harness, by_table(VIP, &[NEAR]));
        let first = terms.request(VIP);
        harness.run(terms.hook, &first).expect("forwarded-direct").expect_frame(&sent(&first));
        let header = if terms.v4() { 20 } else { 40 } + if terms.tcp { 20 } else { 8 };
        let longest = next(terms).payload(&vec![7; 1500 - header]).with(|packet| packet.dont_fragment = true);
        for packet in [next(terms), longest] {
            harness.run(terms.hook, &packet).expect("forwarded-direct").expect_frame(&sent(&packet));
        }
        harness.without_slow_path(|harness| {
            let packet = next(terms);
            harness.run(terms.hook, &packet).expect("forwarded-direct").expect_frame(&sent(&packet));
        });
        let last = next(terms).ttl(1);
        let ran = harness.run(terms.hook, &last);
        assert!(ran.outcome.contains("ttl-exceeded"), "{}, {terms:?}", ran.outcome);
        if terms.tcp {
            for flags in [flag::FIN | flag::ACK, flag::RST] {
                let end = next(terms).with(|packet| packet.tcp_mut().flags = flags);
                harness.run(terms.hook, &end).expect("forwarded-direct").expect_frame(&sent(&end));
            }
        }
    });
}

/// One byte more than the route's MTU.
#[test]
fn what_is_too_long_is_refused_with_the_whole_mtu() {
    harness::with(|harness| {
        for terms in terms(Hook::Ingress) {
            set_up_front(harness, by_table(VIP, &[NEAR]));
            let header = if terms.v4() { 20 } else { 40 } + if terms.tcp { 20 } else { 8 };
            let packet = terms
                .request(VIP)
                .payload(&vec![7; 1501 - header])
                .with(|packet| packet.dont_fragment = true);
            let ran = harness.run(terms.hook, &packet);
            ran.expect("rejected-mtu-exceeded");
            let icmp = &ran.frame[14 + if terms.v4() { 20 } else { 40 }..];
            assert_eq!(icmp[6..8], 1500_u16.to_be_bytes(), "{terms:?}");
        }
    });
}

/// The next hop is no node, or one that does not find the endpoint; the frontend has no flag that
/// the agent has given it for its Service; or the packet has come from a node in the same way:
/// where the tables of two nodes differ, that costs one hop, and nothing goes to and fro.
#[test]
fn other_packets_name_their_endpoint() {
    each_ingress(|harness, terms| {
        let plain = |to: (Spot, u16)| {
            Frontend::new(to.0, to.1).endpoints(&[NEAR]).direct().maglev("251".parse().unwrap())
        };
        type Naming = fn(&mut Harness);
        let cases: [(&str, Frontend, Naming); 4] = [
            ("a gateway", by_table(VIP, &[NEAR]), |_| ()),
            ("a node with another table", by_table(VIP, &[NEAR]), |harness| {
                harness.name_mac(HOME.mac(), false);
            }),
            ("the Service has affinity", plain(VIP), know_home),
            ("it came from a node", by_table(VIP, &[NEAR]), |harness| {
                know_home(harness);
                harness.name_mac(Spot::Router.mac(), true);
            }),
        ];
        for (what, frontend, name) in cases {
            harness.set_up(&Setup::of(frontend));
            name(harness);
            for packet in [terms.request(VIP), next(terms), next(terms)] {
                let ran = harness.run(terms.hook, &packet);
                assert_eq!(ran.outcome, "forwarded-direct", "{what}, {terms:?}");
                ran.expect_frame(&named(&packet));
            }
        }
        // The control: nothing else keeps them from it.
        harness.set_up(&Setup::of(by_table(VIP, &[NEAR])));
        know_home(harness);
        harness.run(terms.hook, &terms.request(VIP)).expect("forwarded-direct");
        harness.run(terms.hook, &next(terms)).expect("forwarded-direct").expect_frame(&sent(&next(terms)));
    });
}

pub(super) fn know_home(harness: &mut Harness) {
    harness.name_mac(HOME.mac(), true);
}

/// A flow that began by a router's packets comes from a node later, and the other way round: each
/// packet is judged by its own source.
#[test]
fn each_packet_is_judged_by_its_own_source() {
    each_ingress(|harness, terms| {
        set_up_front(harness, by_table(VIP, &[NEAR]));
        let other = [2, 0, 0, 0, 9, 9];
        harness.name_mac(other, true);
        let of_node = |packet: &Packet| packet.clone().macs(other, Device::Eth0.mac());
        for packet in [terms.request(VIP), next(terms), next(terms)] {
            harness.run(terms.hook, &packet).expect("forwarded-direct").expect_frame(&sent(&packet));
            harness
                .run(terms.hook, &of_node(&packet))
                .expect("forwarded-direct")
                .expect_frame(&named(&packet));
        }
    });
}

/// A router's MAC address is remembered as none of a node's; the agent raises the hop epoch when it
/// has named another.
#[test]
fn a_router_that_becomes_a_node_is_seen() {
    each_ingress(|harness, terms| {
        set_up_front(harness, by_table(VIP, &[NEAR]));
        harness.run(terms.hook, &terms.request(VIP)).expect("forwarded-direct");
        let packet = next(terms);
        for _ in 0..2 {
            harness.run(terms.hook, &packet).expect("forwarded-direct").expect_frame(&sent(&packet));
        }
        harness.name_mac(Spot::Router.mac(), true);
        harness.change_routes(|routes| routes.hop_epoch += 1);
        for _ in 0..2 {
            harness.run(terms.hook, &packet).expect("forwarded-direct").expect_frame(&named(&packet));
        }
    });
}

/// The endpoint's node, to which the node in front has sent it.
fn set_up_home(harness: &mut Harness) {
    harness.set_up(&Setup::of(by_table(VIP, &[LOCAL])));
    harness.let_send_directly(FRONT);
    harness.name_mac(Spot::Router.mac(), true);
}

/// The endpoint's node serves it as what a router sends, by XDP or TC, also where the port is not
/// the endpoint's.
#[test]
fn the_endpoints_node_delivers_it() {
    each_ingress(|harness, terms| {
        set_up_home(harness);
        assert_ne!(VIP.1, LOCAL.1);
        for _ in 0..2 {
            let request = terms.request(VIP);
            let delivered = request.clone().destination(terms.at(LOCAL));
            harness.run(terms.hook, &request).expect("delivered").expect_frame(&delivered);
        }
        super::the_answer_leaves(harness, terms);
    });
}

/// A former owner is found by nobody's present table.
#[test]
fn a_former_owner_is_named() {
    harness::with(|harness| {
        for terms in Hook::INGRESS.into_iter().flat_map(terms).filter(|terms| terms.tcp) {
            // The present owner is here, and does not know the connection.
            let frontend = by_table(VIP, &[LOCAL]).former(&[NEAR]);
            set_up_front(harness, frontend);
            let packet = next(terms);
            for turn in 0..2 {
                let ran = harness.run(terms.hook, &packet);
                ran.expect("forwarded-direct");
                let outer = named(&packet).with(|outer| {
                    if turn == 0 {
                        outer.label += label(outer.source.is_ipv4(), 1);
                    }
                });
                ran.expect_frame(&outer);
            }
        }
    });
}

/// A node port at the address of the node in front is no frontend of another node's.
#[test]
fn node_ports_name_their_endpoint() {
    each_ingress(|harness, terms| {
        // As the agent writes it: without the flag.
        let frontend = Frontend::new(NODE.0, PORT).endpoints(&[NEAR]).direct_by_mac();
        let frontend = frontend.node_port().maglev("251".parse().unwrap()).without_l2();
        set_up_front(harness, frontend);
        let request = terms.request(NODE);
        harness.run(terms.hook, &request).expect("forwarded-direct").expect_frame(&named(&request));
    });
}

/// A datagram or segment in three pieces.
fn pieces(terms: Terms) -> Packet {
    terms.request(VIP).payload(&[7; 100]).with(|packet| {
        (packet.dont_fragment, packet.label) = (false, 79);
    })
}

/// Once the first fragment has told the ports, in any order; what overtakes it is left to the
/// stack, as it is. Fragments that have come from a node name their endpoint.
#[test]
fn fragments_leave_as_they_came() {
    each_ingress(|harness, terms| {
        set_up_front(harness, by_table(VIP, &[NEAR]));
        let fragments = pieces(terms).fragments(48);
        assert_eq!(fragments.len(), 3);
        harness.run(terms.hook, &fragments[1]).expect("passed-fragment").expect_frame(&fragments[1]);
        for at in [0, 1, 2, 0, 2, 1] {
            let fragment = &fragments[at];
            harness.run(terms.hook, fragment).expect("forwarded-direct").expect_frame(&sent(fragment));
        }
        harness.name_mac(Spot::Router.mac(), true);
        // As the agent does: MAC addresses that are none of nodes' are remembered.
        harness.change_routes(|routes| routes.hop_epoch += 1);
        for at in [0, 2, 1] {
            let fragment = &fragments[at];
            harness.run(terms.hook, fragment).expect("forwarded-direct").expect_frame(&named(fragment));
        }
    });
}

#[test]
fn fragments_are_delivered_by_the_endpoints_node() {
    each_ingress(|harness, terms| {
        set_up_home(harness);
        let whole = pieces(terms);
        let delivered = whole.clone().destination(terms.at(LOCAL)).fragments(48);
        let fragments = whole.fragments(48);
        harness.run(terms.hook, &fragments[1]).expect("passed-fragment").expect_frame(&fragments[1]);
        for at in [0, 1, 2, 0, 2, 1] {
            let ran = harness.run(terms.hook, &fragments[at]);
            ran.expect("delivered").expect_frame(&delivered[at]);
        }
    });
}

/// Errors about a reply that the endpoint's node has sent to the client go by the flow's own way,
/// and where this node does not know the flow, to the owner by name.
#[test]
fn icmp_errors_leave_as_they_came() {
    each_ingress(|harness, terms| {
        set_up_front(harness, by_table(VIP, &[NEAR]));
        harness.run(terms.hook, &terms.request(VIP)).expect("forwarded-direct");
        let before = harness.flows(terms.family);
        for kind in kinds(terms) {
            let comes = about_reply(terms, kind, VIP, (Spot::Client, CLIENT_PORT));
            let ran = harness.run(terms.hook, &comes);
            ran.expect("forwarded-icmp-error").expect_frame(&sent(&comes));
        }
        assert_eq!(harness.flows(terms.family), before, "{terms:?}");
        let comes = unreachable(terms, VIP);
        harness.run(terms.hook, &comes.clone().ttl(1)).expect("dropped-ttl-exceeded");
        set_up_front(harness, by_table(VIP, &[NEAR]));
        let ran = harness.run(terms.hook, &comes);
        ran.expect("forwarded-icmp-error").expect_frame(&named(&comes));
    });
}

/// The pod gets them about what it has sent.
#[test]
fn icmp_errors_are_delivered_by_the_endpoints_node() {
    each_ingress(|harness, terms| {
        set_up_home(harness);
        harness.run(terms.hook, &terms.request(VIP)).expect("delivered");
        super::the_answer_leaves(harness, terms);
        for kind in kinds(terms) {
            let comes = about_reply(terms, kind, VIP, (Spot::Client, CLIENT_PORT));
            let ran = harness.run(terms.hook, &comes);
            ran.expect("delivered-icmp-error").expect_frame(&known(terms, kind));
        }
    });
}
