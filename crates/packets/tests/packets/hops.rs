//! Next hops: kept as long as nothing changed, resolved again when something may have.

use aya::maps::{Array, MapData};
use traffic_policy_ebpf::abi::{Address, Address4, Address6, HOPS_PER_GENERATION, SlotRoute};
use traffic_policy_testing::harness::{
    self, Action, Device, Frontend, Harness, Hook, Input, Setup, Spot, on_one_cpu,
};
use traffic_policy_testing::lab::Family;
use traffic_policy_testing::netlink::Mac;
use traffic_policy_testing::packet::flag;

use crate::dialogue::{Dialogue, everywhere};
use crate::table::{ENDPOINT_PORT, PORT, Terms};

const VIP: (Spot, u16) = (Spot::Vip, PORT);
const ACK: u8 = flag::ACK;
const MOVED: Mac = [2, 0, 0, 0, 0, 0x99];

fn set_up(harness: &mut Harness) {
    harness.set_up(
        &Setup::of(Frontend::new(VIP.0, VIP.1).endpoints(&[(Spot::Near, ENDPOINT_PORT)]))
            .snat_ports(5000..5100),
    );
}

fn neighbour(harness: &Harness, terms: Terms, device: Device, router: Spot, mac: Mac) {
    let (address, name) = (router.of(terms.family), device.name());
    harness.namespace().netlink(async |net| net.neighbour(name, address, mac).await).unwrap();
}

fn route(harness: &Harness, terms: Terms, to: Spot, router: Spot) {
    let network = to.addresses().network().of(terms.family);
    let (prefix, gateway) = (terms.family.prefix(), router.of(terms.family));
    harness.namespace().netlink(async |net| net.route(network, prefix, gateway).await).unwrap();
}

/// The MAC address to which the client's next packet is sent.
#[track_caller]
fn sent_to(dialogue: Dialogue, harness: &Harness) -> Mac {
    let ran = dialogue.send(harness, ACK);
    ran.expect("forwarded");
    ran.frame[..6].try_into().unwrap()
}

/// Changes the stored age of all hops.
fn age_hops(harness: &mut Harness, jiffies: u32) {
    let now = harness.now();
    for index in 1..4 {
        let mut hop = harness.tables.hops.get(&index, 0).unwrap();
        hop.resolved = now.wrapping_sub(jiffies);
        harness.tables.hops.set(index, hop, 0).unwrap();
    }
}

#[test]
fn a_moved_neighbour_is_noticed_when_an_epoch_or_time_says_so() {
    // Jiffies; the test itself may take seconds.
    const MAX_AGE: u32 = 1_000_000;
    let occasions: [fn(&mut Harness); 3] = [
        |harness| harness.change_routes(|routes| routes.hop_epoch += 1),
        |harness| harness.change_routes(|routes| routes.route += 1),
        |harness| age_hops(harness, MAX_AGE + 1),
    ];
    everywhere(|harness, terms| {
        for occasion in occasions {
            set_up(harness);
            harness.change_routes(|routes| routes.hop_max_age = MAX_AGE);
            let (dialogue, sharer) =
                (Dialogue::new(terms, VIP).with_port(1), Dialogue::new(terms, VIP).with_port(2));
            dialogue.establish(harness);
            sharer.establish(harness);
            assert_eq!(dialogue.entries(harness).0.hop, sharer.entries(harness).0.hop, "one hop for both");
            neighbour(harness, terms, Device::Eth0, Spot::RouterNear, MOVED);
            age_hops(harness, MAX_AGE / 10 * 9);
            for dialogue in [dialogue, sharer] {
                assert_eq!(sent_to(dialogue, harness), Spot::RouterNear.mac(), "nothing said so yet");
            }
            occasion(harness);
            for dialogue in [dialogue, sharer] {
                assert_eq!(sent_to(dialogue, harness), MOVED);
                harness.without_jumps(|harness| dialogue.send(harness, ACK).expect("forwarded").clone());
            }
            neighbour(harness, terms, Device::Eth0, Spot::RouterNear, Spot::RouterNear.mac());
        }
    });
}

#[test]
fn new_flows_use_the_route_of_their_slot() {
    everywhere(|harness, terms| {
        set_up(harness);
        Dialogue::new(terms, VIP).with_port(1).establish(harness);
        neighbour(harness, terms, Device::Eth0, Spot::RouterNear, MOVED);
        let second = Dialogue::new(terms, VIP).with_port(2);
        let ran = second.open(harness);
        assert_eq!(ran.frame[..6], Spot::RouterNear.mac(), "the FIB was asked once");
        harness.change_routes(|routes| routes.route += 1);
        let ran = Dialogue::new(terms, VIP).with_port(3).open(harness);
        assert_eq!(ran.frame[..6], MOVED);
        neighbour(harness, terms, Device::Eth0, Spot::RouterNear, Spot::RouterNear.mac());
    });
}

/// The flow follows its route, and keeps its source address, by which the endpoint knows it.
#[test]
fn a_route_that_moves_to_another_device() {
    everywhere(|harness, terms| {
        set_up(harness);
        let dialogue = Dialogue::new(terms, VIP);
        dialogue.establish(harness);
        let before = dialogue.entries(harness).0;
        route(harness, terms, Spot::Near, Spot::RouterFar);
        harness.change_routes(|routes| routes.route += 1);
        for _ in 0..2 {
            let ran = dialogue.send(harness, ACK);
            ran.expect("forwarded");
            assert_eq!(ran.action, Action::Redirect);
            let expected = dialogue
                .request(ACK)
                .source((before.new_from.ip(), before.new_from.port()))
                .destination(terms.at((Spot::Near, ENDPOINT_PORT)))
                .macs(Device::Eth1.mac(), Spot::RouterFar.mac())
                .ttl(63);
            ran.expect_frame(&expected);
        }
        route(harness, terms, Spot::Near, Spot::RouterNear);
    });
}

#[test]
fn a_reply_asks_for_the_way_back_once() {
    everywhere(|harness, terms| {
        set_up(harness);
        let dialogue = Dialogue::new(terms, VIP);
        dialogue.establish(harness);
        neighbour(harness, terms, Device::Eth0, Spot::Router, MOVED);
        assert_eq!(dialogue.answer(harness, ACK).frame[..6], Spot::Router.mac());
        harness.change_routes(|routes| routes.hop_epoch += 1);
        assert_eq!(dialogue.answer(harness, ACK).frame[..6], MOVED);
        neighbour(harness, terms, Device::Eth0, Spot::Router, Spot::Router.mac());
    });
}

/// The MAC address to which the answer to a new flow's first packet is sent.
#[track_caller]
fn way_back(dialogue: Dialogue, harness: &Harness, came_by: Device) -> Mac {
    dialogue.open(harness).expect("forwarded");
    let answer = dialogue.answer_packet(harness, flag::SYN | ACK);
    let ran = harness.input(&Input { device: came_by, ..Input::new(dialogue.terms.hook, answer.bytes()) });
    ran.expect("replied");
    ran.frame[..6].try_into().unwrap()
}

/// The FIB is looked up once for all flows of a client whose replies run on one CPU, until
/// something may have changed.
#[test]
fn the_next_flow_of_a_client_asks_for_no_way_back() {
    everywhere(|harness, terms| {
        on_one_cpu(|| {
            set_up(harness);
            let way_back = |harness: &Harness, port| {
                way_back(Dialogue::new(terms, VIP).with_port(port), harness, Device::Eth0)
            };
            assert_eq!(way_back(harness, 1), Spot::Router.mac());
            neighbour(harness, terms, Device::Eth0, Spot::Router, MOVED);
            assert_eq!(way_back(harness, 2), Spot::Router.mac(), "nothing said so yet");
            harness.change_routes(|routes| routes.hop_epoch += 1);
            assert_eq!(way_back(harness, 3), MOVED);
            neighbour(harness, terms, Device::Eth0, Spot::Router, Spot::Router.mac());
            assert_eq!(way_back(harness, 4), MOVED);
            harness.change_routes(|routes| routes.route += 1);
            assert_eq!(way_back(harness, 5), Spot::Router.mac());
            neighbour(harness, terms, Device::Eth0, Spot::Router, MOVED);
            assert_eq!(way_back(harness, 6), Spot::Router.mac());
            // With this age no result is recent enough to be used again.
            harness.change_routes(|routes| routes.hop_max_age = 0);
            assert_eq!(way_back(harness, 7), MOVED);
            neighbour(harness, terms, Device::Eth0, Spot::Router, Spot::Router.mac());
        });
    });
}

/// Routing rules match a reply's source, and the device on which it arrived.
#[test]
fn another_question_about_a_client_has_its_own_answer() {
    const OTHER: (Spot, u16) = (Spot::OtherVip, PORT);
    let ways = [(140, Spot::RouterFar), (141, Spot::RouterSlim)];
    harness::with(|harness| {
        for family in Family::BOTH {
            let clients = Spot::Client.addresses().network().of(family);
            let added = harness.namespace().netlink(async |net| {
                for (table, router) in ways {
                    net.route_in(table, clients, family.prefix(), router.of(family)).await?;
                }
                net.rule_from(OTHER.0.of(family), ways[0].0, 1000).await?;
                net.rule_arriving(family, Device::Eth1.name(), ways[1].0, 1001).await
            });
            added.unwrap();
        }
        let endpoints = [(Spot::Near, ENDPOINT_PORT)];
        let frontends = [VIP, OTHER].map(|(spot, port)| Frontend::new(spot, port).endpoints(&endpoints));
        let [one, other] = frontends;
        for terms in Terms::all() {
            harness.set_up(&Setup::of(one.clone()).and(other.clone()).snat_ports(5000..5100));
            on_one_cpu(|| {
                let by = |frontend, port, device| {
                    way_back(Dialogue::new(terms, frontend).with_port(port), harness, device)
                };
                assert_eq!(by(VIP, 1, Device::Eth0), Spot::Router.mac());
                assert_eq!(by(OTHER, 2, Device::Eth0), Spot::RouterFar.mac(), "by its source");
                assert_eq!(by(OTHER, 3, Device::Eth0), Spot::RouterFar.mac());
                assert_eq!(by(VIP, 4, Device::Eth0), Spot::Router.mac());
                assert_eq!(by(VIP, 5, Device::Eth1), Spot::RouterSlim.mac(), "by the device it came by");
                assert_eq!(by(VIP, 6, Device::Eth0), Spot::Router.mac());
            });
        }
    });
}

/// Established flows whose neighbour entry is not resolved any more: XDP leaves them to TC
/// unchanged.
#[test]
fn a_neighbour_that_is_lost() {
    everywhere(|harness, terms| {
        set_up(harness);
        let dialogue = Dialogue::new(terms, VIP);
        dialogue.establish(harness);
        let before = dialogue.entries(harness);
        route(harness, terms, Spot::Near, Spot::RouterSilent);
        harness.change_routes(|routes| routes.route += 1);
        let ran = dialogue.send(harness, ACK);
        if terms.xdp() {
            ran.expect("passed-to-tc");
            assert_eq!(dialogue.entries(harness), before, "nothing was noted");
        } else {
            ran.expect("forwarded");
        }
        route(harness, terms, Spot::Near, Spot::RouterNear);
        harness.change_routes(|routes| routes.route += 1);
        assert_eq!(sent_to(dialogue, harness), Spot::RouterNear.mac());
    });
}

#[test]
fn xdp_makes_no_flow_that_it_cannot_send() {
    everywhere(|harness, terms| {
        let endpoint = [(Spot::Silent, ENDPOINT_PORT)];
        harness.set_up(&Setup::of(Frontend::new(VIP.0, VIP.1).endpoints(&endpoint)));
        let dialogue = Dialogue::new(terms, VIP);
        dialogue.open(harness);
        if terms.xdp() {
            assert_eq!(harness.flows(terms.family), []);
            assert_eq!(harness.unassured(terms.family, terms.tcp), 0);
        } else {
            assert_eq!(dialogue.entries(harness).0.hop, 0, "to be asked for again");
            dialogue.establish(harness);
        }
    });
}

/// A flow's first packet is counted when its entry is inserted, before it is known whether XDP can
/// send it.
#[test]
fn a_first_packet_is_counted_once_and_only_if_it_is_sent() {
    everywhere(|harness, terms| {
        let endpoint = [(Spot::Far, ENDPOINT_PORT)];
        let setup = Setup::of(Frontend::new(VIP.0, VIP.1).endpoints(&endpoint)).snat_ports(5000..5100);
        harness.set_up(&setup.with(|setup| setup.devices[1].1 = false));
        let dialogue = Dialogue::new(terms, VIP);
        let counted = |harness: &Harness| {
            let (request, _) = dialogue.entries(harness);
            (request.packets, request.bytes)
        };
        let opened = dialogue.open(harness);
        if terms.xdp() {
            opened.expect("passed-to-tc");
            assert_eq!(counted(harness), (0, 0));
            harness.run(Hook::Ingress, &dialogue.opening()).expect("forwarded");
        } else {
            opened.expect("forwarded");
        }
        assert_eq!(counted(harness), (1, dialogue.opening().bytes().len() as u64 - 14));
    });
}

/// Damages the stored routes to endpoints as a reader sees them that races with a writer: the
/// source is another's.
fn spoil<A: Address>(routes: &mut Array<MapData, SlotRoute<A>>, other: A) {
    let mut spoilt = 0;
    for index in 0..routes.len().min(256) {
        let stored = routes.get(&index, 0).unwrap();
        if stored.word != 0 {
            routes.set(index, SlotRoute { source: other, ..stored }, 0).unwrap();
            spoilt += 1;
        }
    }
    assert_ne!(spoilt, 0, "no way is stored");
}

#[test]
fn a_way_that_was_not_written_in_one_piece_is_asked_for_anew() {
    everywhere(|harness, terms| {
        set_up(harness);
        let first = Dialogue::new(terms, VIP).with_port(1);
        first.establish(harness);
        match terms.family {
            Family::V4 => spoil(&mut harness.tables.v4.slot_routes, Address4::from_wire(0x0101_0101)),
            Family::V6 => spoil(&mut harness.tables.v6.slot_routes, Address6::from_wire([1, 1])),
        }
        let second = Dialogue::new(terms, VIP).with_port(2);
        second.establish(harness);
        let sources = [first, second].map(|dialogue| dialogue.entries(harness).0.new_from.ip());
        assert_eq!(sources[0], sources[1], "the node's own");
    });
}

/// The kernel then resolves the neighbours itself, in TC.
#[test]
fn no_room_for_another_hop() {
    everywhere(|harness, terms| {
        set_up(harness);
        // SAFETY: a field of the mapped element.
        unsafe { (*harness.tables.usage.pointer()).hops[0] = u64::from(HOPS_PER_GENERATION) };
        let dialogue = Dialogue::new(terms, VIP);
        let outcome = dialogue.open(harness).outcome;
        assert_eq!(outcome, if terms.xdp() { "passed-to-tc" } else { "forwarded" });
        // The other generation is empty.
        harness.change_routes(|routes| routes.route = 1 << 16 | 2);
        dialogue.open(harness).expect("forwarded");
        assert!(u32::from(dialogue.entries(harness).0.hop) > HOPS_PER_GENERATION);
    });
}
