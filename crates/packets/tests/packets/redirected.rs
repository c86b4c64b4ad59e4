//! Replies of endpoints on this node that routing sends out of another device once they have their
//! new source: by routing rules, on a node with a separate uplink for each of its addresses, or
//! with endpoints on a card of their own.

use std::net::IpAddr;

use traffic_policy_testing::harness::{self, Device, Frontend, Harness, Setup, Spot};
use traffic_policy_testing::lab::Family;
use traffic_policy_testing::packet::Packet;

use crate::answers::too_long;
use crate::dialogue::Dialogue;
use crate::errors::{WHOLE, error, port_unreachable};
use crate::table::{self, CLIENT_PORT, Case, ENDPOINT_PORT, PORT, Step, Terms};

/// Rules route packets from these sources out by eth1, by slim0, and to a router of eth0 whose MAC
/// address is not known.
const BY_ETH1: (Spot, u16) = (Spot::Vip, PORT);
const BY_SLIM0: (Spot, u16) = (Spot::OtherVip, PORT);
const BY_ETH0: (Spot, u16) = (Spot::NodeEth1, PORT);
/// Packets from this source have no rule: they leave by eth0.
const NODE: (Spot, u16) = (Spot::Node, PORT);
const LOCAL: (Spot, u16) = (Spot::Local, ENDPOINT_PORT);
const CLIENT: (Spot, u16) = (Spot::Client, CLIENT_PORT);

/// Packets with this mark are routed by the main table, as with AWS's plugin.
const MARK: u32 = 0x80;
const MAIN: u32 = 254;

fn add_rules(harness: &Harness) {
    let ways = [
        (BY_ETH1.0, 100, Spot::RouterFar),
        (BY_SLIM0.0, 101, Spot::RouterSlim),
        (BY_ETH0.0, 102, Spot::RouterSilent),
    ];
    for family in Family::BOTH {
        let clients = Spot::Client.addresses().network().of(family);
        let added = harness.namespace().netlink(async |net| {
            for (source, table, router) in ways {
                net.route_in(table, clients, family.prefix(), router.of(family)).await?;
                net.rule_from(source.of(family), table, 1000).await?;
            }
            net.rule_marked(family, MARK, MAIN, 900).await
        });
        added.unwrap();
    }
}

/// A variant of [`table::run`] with routing rules.
fn run(rows: impl Fn(Terms) -> Vec<Case> + Sync) {
    harness::with(|harness| {
        add_rules(harness);
        table::run_on(harness, &|_: &mut Harness, terms| rows(terms));
    });
}

fn frontend((spot, port): (Spot, u16)) -> Setup {
    Setup::of(Frontend::new(spot, port).endpoints(&[LOCAL]))
}

/// The client's first packet, which arrives on a device.
fn comes(terms: Terms, to: (Spot, u16), device: Device) -> Step {
    let request = terms.request(to).macs(Spot::Router.mac(), device.mac());
    let delivered = request.clone().destination(terms.at(LOCAL));
    Step::new(&request, "delivered", &delivered).by(device)
}

/// The endpoint's answer, which the kernel has routed to eth0.
fn answer(terms: Terms) -> Packet {
    terms.answer(LOCAL, CLIENT).macs(Device::Eth0.mac(), Spot::Router.mac()).ttl(63)
}

/// The same packet as it is sent out of eth1.
fn by_eth1(packet: &Packet, terms: Terms) -> Packet {
    packet.clone().source(terms.at(BY_ETH1)).macs(Device::Eth1.mac(), Spot::RouterFar.mac())
}

#[test]
fn the_way_of_the_new_source_is_taken() {
    run(|terms| {
        let redirected = || {
            let answer = answer(terms);
            Step::new(&answer, "replied-redirected", &by_eth1(&answer, terms)).leaving()
        };
        let request = |to| terms.request(to).destination(terms.at(LOCAL));
        let kind = port_unreachable(terms);
        let refused = error(terms, kind, Spot::Local, &request(BY_ETH1), WHOLE);
        let known = error(terms, kind, BY_ETH1.0, &terms.request(BY_ETH1), WHOLE)
            .macs(Device::Eth1.mac(), Spot::RouterFar.mac());
        // The kernel resolves the neighbour, and writes the MAC addresses afterwards.
        let unresolved = answer(terms).source(terms.at(BY_ETH0));
        let chained = Frontend::new(NODE.0, NODE.1).endpoints(&[BY_ETH0]);
        let to_frontend = terms.request(NODE).destination(terms.at(BY_ETH0));
        vec![
            Case::new(
                "that of the request; asked once, then remembered",
                frontend(BY_ETH1),
                [comes(terms, BY_ETH1, Device::Eth1), redirected(), redirected()],
            ),
            Case::new("a third one", frontend(BY_ETH1), [comes(terms, BY_ETH1, Device::Slim0), redirected()]),
            Case::new(
                "ICMP errors go there, too",
                frontend(BY_ETH1),
                [
                    comes(terms, BY_ETH1, Device::Eth1),
                    Step::new(&refused, "replied-redirected", &known).leaving(),
                ],
            ),
            Case::new(
                "to a neighbour that is not resolved",
                frontend(BY_ETH0),
                [
                    comes(terms, BY_ETH0, Device::Eth0),
                    Step::new(&answer(terms), "replied-redirected", &unresolved).leaving().by(Device::Eth1),
                ],
            ),
            Case::new(
                "its frontend is another one's endpoint: what is redirected is not translated once more",
                frontend(BY_ETH0).and(chained),
                [
                    comes(terms, BY_ETH0, Device::Eth0),
                    // Once delivered by XDP, it would look to TC like a request of the other flow.
                    if terms.xdp() {
                        Step::passed(&terms.request(NODE), "passed-to-tc")
                    } else {
                        Step::new(&terms.request(NODE), "delivered", &to_frontend)
                    },
                    Step::new(&answer(terms), "replied-redirected", &unresolved).leaving().by(Device::Eth1),
                ],
            ),
        ]
    });
}

#[test]
fn as_the_kernel_has_routed_it() {
    run(|terms| {
        let left = |from: (Spot, u16)| {
            let answer = answer(terms);
            Step::new(&answer, "replied-local", &answer.clone().source(terms.at(from))).leaving()
        };
        vec![
            Case::new(
                "asymmetric on purpose: the new source has no other way",
                frontend(NODE),
                [comes(terms, NODE, Device::Eth1), left(NODE), left(NODE)],
            ),
            Case::new(
                "the request came by this device: nothing is asked",
                frontend(BY_ETH1),
                [comes(terms, BY_ETH1, Device::Eth0), left(BY_ETH1)],
            ),
            Case::new(
                "it leaves by that device already",
                frontend(BY_ETH1),
                [comes(terms, BY_ETH1, Device::Eth0), left(BY_ETH1).by(Device::Eth1)],
            ),
            Case::new(
                "a mark has led it here",
                frontend(BY_ETH1),
                [comes(terms, BY_ETH1, Device::Eth1), left(BY_ETH1).marked(MARK), left(BY_ETH1).marked(MARK)],
            ),
            Case::new(
                "no program is attached to the other device",
                frontend(BY_ETH1).with(|setup| setup.devices = vec![(Device::Eth0, true)]),
                [comes(terms, BY_ETH1, Device::Slim0), left(BY_ETH1)],
            ),
        ]
    });
}

/// The sender gets the same error as from any router whose egress MTU is smaller.
#[test]
fn what_does_not_fit_the_other_device() {
    run(|terms| {
        let long = answer(terms).payload(&[7; 1400]);
        let fits = answer(terms).payload(&[7; 1300]);
        let sent = fits.clone().source(terms.at(BY_SLIM0)).macs(Device::Slim0.mac(), Spot::RouterSlim.mac());
        let told = too_long(&long, 1400);
        let mut cases = vec![Case::new(
            "told what fits",
            frontend(BY_SLIM0),
            [
                comes(terms, BY_SLIM0, Device::Slim0),
                Step::new(&long, "rejected-mtu-exceeded", &told).leaving(),
                Step::new(&fits, "replied-redirected", &sent).leaving(),
            ],
        )];
        if terms.v4() {
            let may_be_cut = long.clone().with(|packet| packet.dont_fragment = false);
            cases.push(Case::new(
                "may be fragmented, which is not done here",
                frontend(BY_SLIM0),
                [
                    comes(terms, BY_SLIM0, Device::Slim0),
                    Step::dropped(&may_be_cut, "dropped-mtu-exceeded").leaving(),
                ],
            ));
        }
        cases
    });
}

/// Routes replies from the frontend's address by another table, in which eth1 leads to the clients;
/// returns that address.
fn add_rule(harness: &Harness, terms: Terms, table: u32) -> IpAddr {
    let clients = Spot::Client.addresses().network().of(terms.family);
    let (prefix, router) = (terms.family.prefix(), Spot::RouterFar.of(terms.family));
    let source = BY_ETH1.0.of(terms.family);
    let added = harness.namespace().netlink(async |net| {
        net.route_in(table, clients, prefix, router).await?;
        net.rule_from(source, table, 1000).await
    });
    added.unwrap();
    source
}

/// The FIB's answer is used until routes or rules change, and no longer.
#[test]
fn asked_again_when_something_may_have_changed() {
    harness::with(|harness| {
        for terms in Terms::all() {
            let leave = |harness: &Harness, outcome: &str| {
                for _ in 0..2 {
                    harness.run(harness::Hook::Egress, &answer(terms)).expect(outcome);
                }
            };
            harness.set_up(&frontend(BY_ETH1));
            comes(terms, BY_ETH1, Device::Eth1).run(harness, terms);
            leave(harness, "replied-local");
            let table = if terms.xdp() { 110 } else { 111 };
            let source = add_rule(harness, terms, table);
            leave(harness, "replied-local");
            harness.change_routes(|routes| routes.route += 1);
            leave(harness, "replied-redirected");
            let removed = harness.namespace().netlink(async |net| net.remove_rule_from(source, table).await);
            removed.unwrap();
            leave(harness, "replied-redirected");
            harness.change_routes(|routes| routes.route += 1);
            leave(harness, "replied-local");
        }
    });
}

/// XDP knows a member of a bond by its own index, and replies leave by the bond: the FIB is queried
/// once, and not after each change of routes.
#[test]
fn a_request_by_a_device_that_is_not_known() {
    harness::with(|harness| {
        for terms in Terms::all() {
            harness.set_up(
                &frontend(BY_ETH1).with(|setup| setup.devices.retain(|(device, _)| *device != Device::Slim0)),
            );
            let leave = |harness: &Harness| {
                harness.run(harness::Hook::Egress, &answer(terms)).expect("replied-local");
            };
            comes(terms, BY_ETH1, Device::Slim0).run(harness, terms);
            leave(harness);
            let table = if terms.xdp() { 120 } else { 121 };
            let source = add_rule(harness, terms, table);
            harness.change_routes(|routes| routes.route += 1);
            leave(harness);
            let removed = harness.namespace().netlink(async |net| net.remove_rule_from(source, table).await);
            removed.unwrap();
        }
    });
}

/// A client that comes back by another device with the same port: the entry of its new conversation
/// has the new device.
#[test]
fn a_conversation_that_begins_again_by_another_device() {
    harness::with(|harness| {
        add_rules(harness);
        for terms in Terms::all().filter(|terms| terms.tcp) {
            harness.set_up(&frontend(BY_ETH1));
            let dialogue = Dialogue::new(terms, BY_ETH1);
            dialogue.establish(harness);
            dialogue.close(harness);
            let again = dialogue.opening().macs(Spot::Router.mac(), Device::Eth1.mac()).numbers(900_000, 0);
            let delivered = again.clone().destination(terms.at(LOCAL));
            Step::new(&again, "delivered", &delivered).by(Device::Eth1).run(harness, terms);
            let second = answer(terms).numbers(7000, 900_001);
            let sent = by_eth1(&second, terms);
            Step::new(&second, "replied-redirected", &sent).leaving().run(harness, terms);
        }
    });
}
