//! ICMP errors about replies that the endpoint's node has sent to the client: they come to the node
//! in front, and travel on to the endpoint's node.

use traffic_policy_ebpf::abi::maglev::FORMER;
use traffic_policy_testing::harness::{self, Device, Frontend, Harness, Hook, Setup, Spot};
use traffic_policy_testing::packet::{Packet, Transport, flag};

use super::{FRONT, LOCAL, NEAR, NODE, VIP, arrives, each_ingress, label, sent, set_up_home, terms, within};
use crate::errors::{WHOLE, error, kinds, port_unreachable};
use crate::table::{CLIENT_PORT, ENDPOINT_PORT, Terms};

const CLIENT: (Spot, u16) = (Spot::Client, CLIENT_PORT);
const OTHER: (Spot, u16) = (Spot::OtherNear, ENDPOINT_PORT);
/// A router on the way to the client.
const ON_THE_WAY: Spot = Spot::RouterFar;

fn direct(to: (Spot, u16), endpoints: &[(Spot, u16)]) -> Frontend {
    Frontend::new(to.0, to.1).endpoints(endpoints).direct()
}

fn by_table(to: (Spot, u16), endpoints: &[(Spot, u16)]) -> Frontend {
    direct(to, endpoints).maglev("251".parse().unwrap())
}

/// An error about a reply of the frontend, as it comes to this node.
pub(super) fn about_reply(
    terms: Terms,
    kind: (u8, u8, [u8; 4]),
    from: (Spot, u16),
    client: (Spot, u16),
) -> Packet {
    let reply = terms.answer(from, client).payload(&[0x5a; 100]).ttl(7);
    error(terms, kind, ON_THE_WAY, &reply, WHOLE).macs(Spot::Router.mac(), Device::Eth0.mac())
}

pub(super) fn unreachable(terms: Terms, from: (Spot, u16)) -> Packet {
    about_reply(terms, port_unreachable(terms), from, CLIENT)
}

/// The error as it leaves for the endpoint's node, after `asked` owners were asked.
fn relayed(error: &Packet, to: Spot, asked: u32) -> Packet {
    let outer = within(error, Spot::Node, to).macs(Device::Eth0.mac(), Spot::RouterNear.mac());
    outer.with(|outer| {
        outer.ttl = 64;
        outer.label = label(outer.source.is_ipv4(), asked);
        outer.dont_fragment = true;
    })
}

/// The number of owners that were asked, as another node writes it.
fn asked(packet: Packet, asked: u32) -> Packet {
    packet.with(|outer| outer.label = label(outer.source.is_ipv4(), asked))
}

#[test]
fn an_error_follows_the_flow_that_it_is_about() {
    each_ingress(|harness, terms| {
        for to in [NODE, VIP] {
            harness.set_up(&Setup::of(direct(to, &[NEAR])));
            harness.run(terms.hook, &terms.request(to)).expect("forwarded-direct");
            let before = harness.flows(terms.family);
            for kind in kinds(terms) {
                let comes = about_reply(terms, kind, to, CLIENT);
                let ran = harness.run(terms.hook, &comes);
                ran.expect("forwarded-icmp-error").expect_frame(&sent(&comes));
            }
            assert_eq!(harness.flows(terms.family), before, "{terms:?}");
            for ttl in [0, 1] {
                let expired = unreachable(terms, to).ttl(ttl);
                harness.run(terms.hook, &expired).expect("dropped-ttl-exceeded");
            }
        }
    });
}

/// Every node finds the endpoint by the table, as it does for the connection's own packets.
#[test]
fn without_a_flow_an_error_goes_to_the_owner() {
    each_ingress(|harness, terms| {
        for to in [NODE, VIP] {
            let mut seen = std::collections::BTreeSet::new();
            for port in CLIENT_PORT..CLIENT_PORT + 12 {
                let client = (Spot::Client, port);
                harness.set_up(&Setup::of(by_table(to, &[NEAR, OTHER])));
                let request = terms.packet(client, to).macs(Spot::Router.mac(), Device::Eth0.mac());
                harness.run(terms.hook, &request).expect("forwarded-direct");
                let owner = harness.flows(terms.family)[0].new_to.ip();
                let owner = if owner == NEAR.0.of(terms.family) { NEAR.0 } else { OTHER.0 };
                seen.insert(owner == NEAR.0);
                harness.set_up(&Setup::of(by_table(to, &[NEAR, OTHER])));
                let comes = about_reply(terms, port_unreachable(terms), to, client);
                // The second time by the route that is kept with the endpoint.
                for _ in 0..2 {
                    let ran = harness.run(terms.hook, &comes);
                    ran.expect("forwarded-icmp-error").expect_frame(&relayed(&comes, owner, 0));
                }
                assert_eq!(harness.flows(terms.family), [], "no entry, {terms:?}");
            }
            assert_eq!(seen.len(), 2, "both endpoints, {terms:?}");
        }
    });
}

/// No endpoint follows from some of the quoted packets, and no client can have asked for others.
#[test]
fn other_errors_without_a_flow_pass_as_ever() {
    each_ingress(|harness, terms| {
        let maglev = |frontend: Frontend| frontend.maglev("251".parse().unwrap());
        let snat = maglev(Frontend::new(VIP.0, VIP.1).endpoints(&[NEAR]));
        let from_node = about_reply(terms, port_unreachable(terms), VIP, (Spot::Node, CLIENT_PORT));
        let elsewhere = unreachable(terms, (Spot::OtherVip, VIP.1));
        let to_another =
            unreachable(terms, VIP).with(|packet| packet.destination = Spot::Node.of(terms.family));
        let common = unreachable(terms, VIP);
        for (what, frontend, packet) in [
            ("at random", direct(VIP, &[NEAR]), &common),
            ("snat", snat, &common),
            ("policy Local", by_table(VIP, &[LOCAL]).local(), &common),
            ("endpoint here", by_table(VIP, &[LOCAL]), &common),
            ("source ranges", by_table(VIP, &[NEAR]).sources(&[Spot::Near]), &common),
            ("this node as client", by_table(VIP, &[NEAR]), &from_node),
            ("no Service", by_table(VIP, &[NEAR]), &elsewhere),
            ("not to the sender", by_table(VIP, &[NEAR]), &to_another),
        ] {
            harness.set_up(&Setup::of(frontend));
            let ran = harness.run(terms.hook, packet);
            assert_eq!(ran.outcome, "passed-icmp-no-flow", "{what}, {terms:?}");
        }
        // A switch floods a frame that is for another machine.
        harness.set_up(&Setup::of(by_table(VIP, &[NEAR])));
        if terms.xdp() {
            let flooded = common.clone().macs(Spot::Router.mac(), Spot::RouterFar.mac());
            harness.run(terms.hook, &flooded).expect("passed-icmp-no-flow");
        }
        harness.run(terms.hook, &common).expect("forwarded-icmp-error");
    });
}

/// Opens a flow here, as another node sends it, and has it answered.
fn establish_home(harness: &mut Harness, terms: Terms) {
    set_up_home(harness, VIP);
    harness.run(terms.hook, &arrives(&terms.request(VIP), FRONT, LOCAL.0)).expect("delivered");
    harness.run(Hook::Egress, &terms.answer(LOCAL, CLIENT).ttl(63)).expect("replied-local");
}

/// The error of [`about_reply`] as the pod gets it: about what the pod has sent.
pub(super) fn known(terms: Terms, kind: (u8, u8, [u8; 4])) -> Packet {
    let answer = terms.answer(LOCAL, CLIENT).payload(&[0x5a; 100]).ttl(7);
    error(terms, kind, ON_THE_WAY, &answer, WHOLE).macs(Spot::Router.mac(), Device::Eth0.mac())
}

/// The pod gets the error about what it has sent, from the router that has sent it.
#[test]
fn the_endpoints_node_translates_what_is_quoted() {
    harness::with(|harness| {
        for terms in terms(Hook::Ingress) {
            establish_home(harness, terms);
            let before = harness.flows(terms.family);
            for kind in kinds(terms) {
                let comes = about_reply(terms, kind, VIP, CLIENT);
                for number in 0..=FORMER {
                    let ran = harness.run(terms.hook, &asked(arrives(&comes, FRONT, LOCAL.0), number));
                    ran.expect("delivered-icmp-error").expect_frame(&known(terms, kind));
                }
            }
            assert_eq!(harness.flows(terms.family), before, "{terms:?}");
        }
    });
}

/// Nothing that was inside an outer packet reaches the stack or another node as it is.
#[test]
fn other_errors_from_inside_are_dropped() {
    harness::with(|harness| {
        for terms in terms(Hook::Ingress) {
            establish_home(harness, terms);
            let other = about_reply(terms, port_unreachable(terms), VIP, (Spot::Client, CLIENT_PORT + 1));
            let to_node =
                unreachable(terms, VIP).with(|packet| packet.destination = Spot::Node.of(terms.family));
            let (kind, code, rest) = if terms.v4() { (8, 0, [0; 4]) } else { (128, 0, [0; 4]) };
            let echo = Packet::new(
                Spot::Client.of(terms.family),
                Spot::Vip.of(terms.family),
                Transport::Icmp { kind, code, rest },
            );
            for (what, inner) in [
                ("no flow", &other),
                ("not to the sender", &to_node),
                ("an echo request", &echo.payload(&[1; 80])),
                ("cut short", &unreachable(terms, VIP).payload(&[0x45; 12])),
            ] {
                let ran = harness.run(terms.hook, &arrives(inner, FRONT, LOCAL.0));
                assert_eq!(ran.outcome, "dropped-unknown-endpoint", "{what}, {terms:?}");
            }
            // A flow through this node to another one, by another way than the outer packet says.
            harness.set_up(&Setup::of(Frontend::new(VIP.0, VIP.1).endpoints(&[NEAR])));
            harness.let_send_directly(FRONT);
            harness.open_for(LOCAL.0, 1, LOCAL.1);
            harness.run(terms.hook, &terms.request(VIP)).expect("forwarded");
            let comes = arrives(&unreachable(terms, VIP), FRONT, LOCAL.0);
            harness.run(terms.hook, &comes).expect("dropped-unknown-endpoint");
        }
    });
}

/// An error about a connection that goes on by the owner's node goes the same way.
#[test]
fn what_home_does_not_know_goes_to_the_former_owner() {
    harness::with(|harness| {
        for terms in terms(Hook::Ingress) {
            let set_up = |harness: &mut Harness| {
                harness.set_up(&Setup::of(by_table(VIP, &[LOCAL]).former(&[NEAR, OTHER])));
                harness.let_send_directly(FRONT);
                harness.open_for(LOCAL.0, 1, LOCAL.1);
            };
            let comes = unreachable(terms, VIP);
            let of = |number| asked(arrives(&comes, FRONT, LOCAL.0), number);
            for (number, owner) in [(0, Some(NEAR.0)), (1, Some(OTHER.0)), (2, None), (FORMER, None)] {
                set_up(harness);
                let ran = harness.run(terms.hook, &of(number));
                let Some(owner) = owner else {
                    ran.expect("dropped-unknown-endpoint");
                    continue;
                };
                ran.expect("forwarded-icmp-error").expect_frame(&relayed(&comes, owner, number + 1));
                assert_eq!(harness.flows(terms.family), []);
            }
            // This node in front of its own endpoint, and after it the count of another packet.
            set_up(harness);
            harness
                .run(terms.hook, &comes)
                .expect("forwarded-icmp-error")
                .expect_frame(&relayed(&comes, NEAR.0, 1));
            if terms.tcp {
                set_up(harness);
                let segment = terms.request(VIP).with(|packet| packet.tcp_mut().flags = flag::ACK);
                harness.run(terms.hook, &arrives(&segment, FRONT, LOCAL.0)).expect("forwarded-to-owner");
                for number in [0, 1] {
                    let ran = harness.run(terms.hook, &of(number));
                    ran.expect("forwarded-icmp-error").expect_frame(&relayed(&comes, NEAR.0, number + 1));
                }
                harness.run(terms.hook, &of(FORMER)).expect("dropped-unknown-endpoint");
            }
        }
    });
}
