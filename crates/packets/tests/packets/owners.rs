//! Connections that go on by a node which does not know them: the endpoint that a Maglev table
//! names, and those that it named before. By the node in front; at that of the endpoint: [`home`].

mod home;

use traffic_policy_dataplane::MapSizes;
use traffic_policy_ebpf::{
    abi::{ServiceCountKey, kind, maglev::FORMER},
    outcome::Outcome,
    tcp,
};
use traffic_policy_testing::harness::{self, Device, Frontend, Harness, Hook, Input, Setup, Spot};
use traffic_policy_testing::lab::Family;
use traffic_policy_testing::packet::{Packet, Transport, flag};
use traffic_policy_testing::skipped;

use crate::direct::label;
use crate::table::{CLIENT_PORT, ENDPOINT_PORT, PORT, Terms};

const NODE: (Spot, u16) = (Spot::Node, PORT);
const VIP: (Spot, u16) = (Spot::Vip, PORT);
const NEAR: (Spot, u16) = (Spot::Near, ENDPOINT_PORT);
const OTHER: (Spot, u16) = (Spot::OtherNear, ENDPOINT_PORT);
const LOCAL: (Spot, u16) = (Spot::Local, ENDPOINT_PORT);
/// Nodes that send directly.
const FRONT: Spot = Spot::Router;
const OTHER_FRONT: Spot = Spot::RouterFar;
const IPIP: u8 = 4;
const IP6IP6: u8 = 41;
const FIN_ACK: u8 = flag::FIN | flag::ACK;
const SYN_ACK: u8 = flag::SYN | flag::ACK;

fn tcp(hook: Hook) -> impl Iterator<Item = Terms> {
    Terms::all().filter(move |terms| terms.tcp && terms.hook == hook)
}

/// Runs a test by TC, in both families.
fn each(work: impl Fn(&mut Harness, Terms) + Sync) {
    harness::with(|harness| tcp(Hook::Ingress).for_each(|terms| work(harness, terms)));
}

/// Runs a test by XDP and TC, in both families, for both kinds of frontend.
fn each_in_front(work: impl Fn(&mut Harness, Terms, (Spot, u16)) + Sync) {
    harness::with(|harness| {
        for terms in Hook::INGRESS.into_iter().flat_map(tcp) {
            [VIP, NODE].into_iter().for_each(|to| work(harness, terms, to));
        }
    });
}

fn by_table(to: (Spot, u16), endpoints: &[(Spot, u16)]) -> Frontend {
    Frontend::new(to.0, to.1).endpoints(endpoints).direct().maglev("251".parse().unwrap())
}

/// A segment amid a connection.
fn segment(terms: Terms, to: (Spot, u16), port: u16, flags: u8) -> Packet {
    let packet = terms.packet((Spot::Client, port), to).macs(Spot::Router.mac(), Device::Eth0.mac());
    packet.with(|packet| packet.tcp_mut().flags = flags).numbers(7000, 9000)
}

fn within(inner: &Packet, from: Spot, to: Spot, asked: u32) -> Packet {
    let ip = &inner.bytes()[14..];
    let (family, protocol) = if inner.source.is_ipv4() { (Family::V4, IPIP) } else { (Family::V6, IP6IP6) };
    let outer = Packet::new(from.of(family), to.of(family), Transport::Other(protocol));
    outer.payload(ip).with(|outer| {
        outer.ttl = 64;
        outer.label = label(outer.source.is_ipv4(), asked);
        outer.dont_fragment = true;
    })
}

/// A packet that another node sends to the endpoint here.
fn arrives(inner: &Packet, from: Spot, asked: u32) -> Packet {
    within(inner, from, LOCAL.0, asked).macs(Spot::Router.mac(), Device::Eth0.mac())
}

/// A packet that this node sends to an endpoint.
fn sent(inner: &Packet, to: Spot, asked: u32) -> Packet {
    within(inner, Spot::Node, to, asked).macs(Device::Eth0.mac(), Spot::RouterNear.mac())
}

fn set_up_home(harness: &mut Harness, frontend: Frontend) {
    harness.set_up(&Setup::of(frontend));
    harness.let_send_directly(FRONT);
    harness.let_send_directly(OTHER_FRONT);
    harness.open_for(LOCAL.0, 1, LOCAL.1);
}

#[test]
fn a_segment_of_an_unknown_connection_goes_to_its_owner() {
    each_in_front(|harness, terms, to| {
        let hook = terms.hook;
        let endpoints = [NEAR, OTHER];
        // The endpoint of each connection from its beginning.
        let owner = |harness: &mut Harness, port: u16, packet: &Packet| {
            harness.set_up(&Setup::of(by_table(to, &endpoints)));
            harness.run(hook, packet).expect("forwarded-direct");
            let [flow] = harness.flows(terms.family)[..] else { panic!("one entry for {port}") };
            assert_eq!(flow.kind, kind::DIRECT);
            flow.new_to
        };
        let mut seen = std::collections::BTreeSet::new();
        for port in CLIENT_PORT..CLIENT_PORT + 20 {
            let first = owner(harness, port, &segment(terms, to, port, flag::SYN));
            seen.insert(first);
            for flags in [flag::ACK, flag::ACK | flag::PSH, FIN_ACK] {
                let later = owner(harness, port, &segment(terms, to, port, flags));
                assert_eq!(later, first, "{flags:x}, port {port}, {terms:?}");
            }
        }
        assert_eq!(seen.len(), 2);
        // The packets after it are those of a connection that was seen from its beginning.
        harness.set_up(&Setup::of(by_table(to, &[NEAR])));
        for _ in 0..3 {
            let next = segment(terms, to, CLIENT_PORT, flag::ACK);
            harness.run(hook, &next).expect("forwarded-direct").expect_frame(&sent(&next, NEAR.0, 0));
        }
        assert_eq!(harness.flows(terms.family)[0].state, tcp::ASSURED);
    });
}

/// A router sends a node that is new, or is back, connections of others at once. The other nodes
/// may not know it yet, so that it begins none that are forwarded directly.
#[test]
fn a_node_that_is_new_sends_what_goes_on_to_its_owner() {
    each_in_front(|harness, terms, to| {
        let hook = terms.hook;
        let set_up = |harness: &mut Harness| harness.set_up(&Setup::of(by_table(to, &[NEAR]).held()));
        set_up(harness);
        for _ in 0..3 {
            let next = segment(terms, to, CLIENT_PORT, flag::ACK);
            harness.run(hook, &next).expect("forwarded-direct").expect_frame(&sent(&next, NEAR.0, 0));
        }
        set_up(harness);
        harness.run(hook, &segment(terms, to, CLIENT_PORT, flag::SYN)).expect("forwarded");
        assert_eq!(harness.flows(terms.family).len(), 2, "with this node's address as source");
    });
}

/// The table names an endpoint whose node opens nothing, and so sends no such segment: it belongs
/// to a connection of before.
#[test]
fn the_former_owner_of_an_endpoint_whose_node_opens_nothing_is_asked() {
    each_in_front(|harness, terms, to| {
        let closed = (Spot::RemoteBehindPod0, ENDPOINT_PORT);
        let next = segment(terms, to, CLIENT_PORT, flag::ACK);
        harness.set_up(&Setup::of(by_table(to, &[closed]).former(&[NEAR])));
        let ran = harness.run(terms.hook, &next);
        ran.expect("forwarded-direct").expect_frame(&sent(&next, NEAR.0, 1));
        harness.set_up(&Setup::of(by_table(to, &[closed])));
        let nobody = if to == NODE { "passed-no-flow" } else { "reset-no-flow" };
        harness.run(terms.hook, &next).expect(nobody);
    });
}

/// Neither what opens nor ends a connection is taken for a part of one, nor is there an owner where
/// nodes choose at random or send with their own address.
#[test]
fn other_segments_are_refused_as_ever() {
    harness::with(|harness| {
        for terms in Hook::INGRESS.into_iter().flat_map(tcp) {
            let hook = terms.hook;
            let random = |to: (Spot, u16)| Frontend::new(to.0, to.1).endpoints(&[NEAR]).direct();
            let snat =
                |to: (Spot, u16)| Frontend::new(to.0, to.1).endpoints(&[NEAR]).maglev("251".parse().unwrap());
            for (what, frontend, flags, outcome) in [
                ("a reset", by_table(VIP, &[NEAR]), flag::RST | flag::ACK, "passed-no-flow"),
                ("no ACK", by_table(VIP, &[NEAR]), flag::FIN, "passed-no-flow"),
                ("SYN-ACK", by_table(VIP, &[NEAR]), SYN_ACK, "reset-no-flow"),
                ("random", random(VIP), flag::ACK, "reset-no-flow"),
                ("random, own address", random(NODE), flag::ACK, "passed-no-flow"),
                ("snat", snat(VIP), flag::ACK, "reset-no-flow"),
                ("policy Local", by_table(VIP, &[LOCAL]).local(), flag::ACK, "reset-no-flow"),
                ("here", by_table(VIP, &[LOCAL]), flag::ACK, "reset-no-flow"),
                ("here, own address", by_table(NODE, &[LOCAL]), flag::ACK, "passed-no-flow"),
            ] {
                let to = (frontend.address, PORT);
                harness.set_up(&Setup::of(frontend));
                let ran = harness.run(hook, &segment(terms, to, CLIENT_PORT, flags));
                assert_eq!(ran.outcome, outcome, "{what}, {terms:?}");
                assert_eq!(harness.flows(terms.family), [], "{what}");
            }
        }
    });
}

/// An owner that is an endpoint of the node in front: that node is also the endpoint's.
#[test]
fn the_node_in_front_asks_the_former_owner_of_its_own_endpoint() {
    each_in_front(|harness, terms, to| {
        let hook = terms.hook;
        harness.set_up(&Setup::of(by_table(to, &[LOCAL]).former(&[NEAR])));
        let next = segment(terms, to, CLIENT_PORT, flag::ACK);
        let ran = harness.run(hook, &next);
        ran.expect("forwarded-direct").expect_frame(&sent(&next, NEAR.0, 1));
        let ran = harness.run(hook, &next);
        ran.expect("forwarded-direct").expect_frame(&sent(&next, NEAR.0, 0));
    });
}

/// Forged segments, each with another source, keep out no connection that is established, and take
/// no more room than forged SYNs.
#[test]
fn forged_segments_hold_a_bounded_part_of_the_table() {
    const UNASSURED: u16 = 64;
    let sizes = MapSizes { flows4: 2048, flows6: 2048, unassured: UNASSURED.into(), ..harness::SIZES };
    harness::with_sizes(sizes, |harness| {
        for (terms, at_home) in
            tcp(Hook::Ingress).flat_map(|terms| [false, true].map(|at_home| (terms, at_home)))
        {
            let frontend =
                if at_home { by_table(VIP, &[LOCAL]).former(&[NEAR]) } else { by_table(VIP, &[NEAR]) };
            set_up_home(harness, frontend);
            let send = |harness: &Harness, port| {
                let packet = segment(terms, VIP, port, flag::ACK);
                let packet = if at_home { arrives(&packet, FRONT, 0) } else { packet };
                let outcome = if at_home { "forwarded-to-owner" } else { "forwarded-direct" };
                harness.run(terms.hook, &packet).expect(outcome);
            };
            (0..3).for_each(|_| send(harness, 1));
            (1000..1000 + 10 * UNASSURED).for_each(|port| send(harness, port));
            let flows = harness.flows(terms.family);
            // IPv6 has half as many places.
            let places = usize::from(UNASSURED) / if terms.v4() { 1 } else { 2 };
            assert_eq!(flows.len(), places + 1, "at home: {at_home}");
            let assured: Vec<_> = flows.iter().filter(|flow| flow.state & tcp::ASSURED != 0).collect();
            assert_eq!(assured.len(), 1);
            assert_eq!(assured[0].from.port(), 1);
        }
    });
}

/// Both ends of a connection send again, at the same time, what was lost with the node in front:
/// its first two segments come by another node on two CPUs, and one makes the flow while the other
/// looks for the owner.
#[test]
fn two_first_segments_at_once_go_to_one_owner() {
    const ROUNDS: u32 = 8;
    const CONNECTIONS: u16 = 500;
    // A place for each segment.
    let sizes = MapSizes { flows4: 4096, flows6: 4096, unassured: 4096, ..harness::SIZES };
    harness::with_sizes(sizes, |harness| {
        for (terms, at_home) in
            Hook::INGRESS.into_iter().flat_map(tcp).flat_map(|terms| [(terms, false), (terms, true)])
        {
            if at_home && terms.hook == Hook::Xdp {
                continue;
            }
            for _ in 0..ROUNDS {
                let frontend =
                    if at_home { by_table(VIP, &[LOCAL]).former(&[NEAR]) } else { by_table(VIP, &[NEAR]) };
                set_up_home(harness, frontend);
                let segments: Vec<_> = (CLIENT_PORT..CLIENT_PORT + CONNECTIONS)
                    .map(|port| {
                        let packet = segment(terms, VIP, port, flag::ACK);
                        let packet = if at_home { arrives(&packet, FRONT, 0) } else { packet };
                        Input::new(terms.hook, packet.bytes())
                    })
                    .collect();
                let before = harness.outcomes(terms.hook);
                if harness.at_once([&segments, &segments]).is_none() {
                    skipped("two_first_segments_at_once_go_to_one_owner", "one CPU: nothing is at once");
                    return;
                }
                let to_owner = if at_home { Outcome::ForwardedToOwner } else { Outcome::ForwardedDirect };
                let ran = harness.outcomes_since(terms.hook, &before);
                assert_eq!(ran, [(to_owner, 2 * u64::from(CONNECTIONS))], "at home: {at_home}, {terms:?}");
            }
        }
    });
}

/// The search in XDP, of a packet that is then left to TC, concerns no packet after it.
#[test]
fn what_xdp_leaves_to_tc_counts_for_no_other_packet() {
    harness::with(|harness| {
        for terms in tcp(Hook::Xdp) {
            let other = (Spot::OtherVip, PORT);
            let far = (Spot::Far, ENDPOINT_PORT);
            let setup = Setup::of(by_table(VIP, &[LOCAL]).former(&[far])).and(by_table(other, &[NEAR]));
            harness.set_up(&setup.with(|setup| setup.devices[1].1 = false));
            let next = segment(terms, other, CLIENT_PORT, flag::ACK);
            let known = sent(&next, NEAR.0, 0);
            for _ in 0..2 {
                harness.run(Hook::Xdp, &next).expect("forwarded-direct").expect_frame(&known);
            }
            // No neighbour is known yet.
            let silent = (Spot::Silent, ENDPOINT_PORT);
            for former in [far, silent] {
                let setup =
                    Setup::of(by_table(VIP, &[LOCAL]).former(&[former])).and(by_table(other, &[NEAR]));
                harness.set_up(&setup.with(|setup| setup.devices[1].1 = false));
                harness.run(Hook::Xdp, &next).expect("forwarded-direct");
                harness.run(Hook::Xdp, &segment(terms, VIP, CLIENT_PORT, flag::ACK)).expect("passed-to-tc");
                harness.run(Hook::Xdp, &next).expect("forwarded-direct").expect_frame(&known);
            }
        }
    });
}
