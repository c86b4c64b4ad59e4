//! Flows past the share of unassured ones: in a table of their own, where the kernel may evict either entry.

use traffic_policy_ebpf::tcp::{ANSWERED, ASSURED};
use traffic_policy_testing::harness::{Frontend, Harness, Hook, Place, SIZES, Setup, Spot};
use traffic_policy_testing::packet::flag;

use crate::dialogue::{Dialogue, everywhere};
use crate::table::{ENDPOINT_PORT, PORT, Terms};

const VIP: (Spot, u16) = (Spot::Vip, PORT);
const ACK: u8 = flag::ACK;
const SYN_ACK: u8 = flag::SYN | flag::ACK;

fn setup(endpoint: Spot, limit: u32) -> Setup {
    Setup::of(Frontend::new(VIP.0, VIP.1).endpoints(&[(endpoint, ENDPOINT_PORT)]))
        .pool(5000..5100)
        .unassured_limit(limit)
}

/// With the table of pending flows in use from the first flow on, for endpoints of both kinds.
fn each(work: impl Fn(&mut Harness, Terms, Dialogue, Hook) + Sync) {
    everywhere(|harness, terms| {
        for endpoint in [Spot::Near, Spot::Local] {
            harness.set_up(&setup(endpoint, 0));
            let back = if endpoint == Spot::Local { Hook::Egress } else { terms.hook };
            work(harness, terms, Dialogue::new(terms, VIP), back);
        }
    });
}

fn places(harness: &Harness, terms: Terms) -> Vec<Place> {
    harness.flows(terms.family).iter().map(|entry| entry.place).collect()
}

#[test]
fn new_flows_go_there_past_the_limit() {
    everywhere(|harness, terms| {
        // UDP has twice the share of TCP.
        harness.set_up(&setup(Spot::Near, if terms.tcp { 2 } else { 1 }));
        for port in 1..=4 {
            Dialogue::new(terms, VIP).with_port(port).open(harness).expect("forwarded");
        }
        let place = |port| Dialogue::new(terms, VIP).with_port(port).entries(harness).0.place;
        assert_eq!([1, 2, 3, 4].map(place), [Place::Main, Place::Main, Place::Pending, Place::Pending]);
        let unassured = harness.unassured(terms.family, terms.tcp);
        assert_eq!((unassured, harness.usage().pending_created), (2, 2));
        // One is assured, which makes room for one more.
        Dialogue::new(terms, VIP).with_port(1).establish(harness);
        Dialogue::new(terms, VIP).with_port(5).open(harness).expect("forwarded");
        assert_eq!(Dialogue::new(terms, VIP).with_port(5).entries(harness).0.place, Place::Main);
    });
}

#[test]
fn a_confirmed_flow_moves_to_the_main_table() {
    each(|harness, terms, dialogue, _| {
        dialogue.open(harness);
        dialogue.answer(harness, SYN_ACK);
        let before = dialogue.entries(harness);
        assert_eq!(places(harness, terms), [Place::Pending; 2]);
        dialogue.send(harness, ACK);
        assert_eq!(places(harness, terms), [Place::Main; 2]);
        let (request, reply) = dialogue.entries(harness);
        assert_eq!((request.state, reply.state), (ASSURED, ASSURED | ANSWERED));
        assert_eq!((request.new_from, request.new_to), (before.0.new_from, before.0.new_to));
        assert_eq!(request.packets, before.0.packets + 1, "what was counted moves along");
        assert_eq!(harness.unassured(terms.family, terms.tcp), 0, "it was never counted there");
        let outcome = dialogue.answer(harness, ACK).outcome;
        assert!(matches!(outcome, "replied" | "replied-local"), "{outcome}");
    });
}

/// Not at once, if the main table is full: then with the first packet that finds room.
#[test]
fn a_confirmed_flow_moves_when_there_is_room() {
    everywhere(|harness, terms| {
        harness.set_up(&setup(Spot::Near, 1000).pool(5000..6000));
        (1..=128).for_each(|port| Dialogue::new(terms, VIP).with_port(port).establish(harness));
        harness.change_config(|config| config.unassured_limit = [0; 2]);
        let dialogue = Dialogue::new(terms, VIP).with_port(500);
        dialogue.establish(harness);
        dialogue.send(harness, ACK).expect("forwarded");
        assert_eq!(dialogue.entries(harness).0.place, Place::Pending);
        assert_eq!(dialogue.entries(harness).0.state, ASSURED);
        let (request, reply) = Dialogue::new(terms, VIP).with_port(1).entries(harness);
        harness.evict(&request);
        dialogue.send(harness, ACK).expect("forwarded");
        assert_eq!(dialogue.entries(harness).0.place, Place::Pending, "room for an entry is not enough");
        harness.evict(&reply);
        let later = dialogue.request(ACK).with(|packet| {
            if terms.tcp {
                packet.tcp_mut().acknowledgement += 1000;
            }
        });
        harness.run(terms.hook, &later).expect("forwarded");
        assert_eq!(dialogue.entries(harness).0.place, Place::Main);
        assert_eq!(harness.unassured(terms.family, terms.tcp), 0);
        dialogue.answer(harness, ACK).expect("replied");
    });
}

#[test]
fn without_its_request_entry_a_reply_passes() {
    each(|harness, terms, dialogue, back| {
        dialogue.open(harness);
        let answer = dialogue.answer_packet(harness, SYN_ACK);
        harness.evict(&dialogue.entries(harness).0);
        harness.run(back, &answer).expect("passed-stale-flow");
        let outcome = dialogue.open(harness).outcome;
        assert!(matches!(outcome, "forwarded" | "delivered"), "{outcome}");
        dialogue.establish(harness);
        assert_eq!(dialogue.entries(harness).0.place, Place::Main, "{terms:?}");
    });
}

#[test]
fn without_its_reply_entry_a_request_starts_anew() {
    each(|harness, terms, dialogue, _| {
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
        assert_eq!(dialogue.entries(harness).0.place, Place::Main);
    });
}

/// The key of an evicted reply entry may belong to another client by now.
#[test]
fn a_reply_entry_of_another_flow_is_not_believed() {
    everywhere(|harness, terms| {
        harness.set_up(&setup(Spot::Near, 0).pool([5000]));
        let (first, second) =
            (Dialogue::new(terms, VIP).with_port(1), Dialogue::new(terms, VIP).with_port(2));
        first.open(harness).expect("forwarded");
        harness.evict(&first.entries(harness).1);
        second.open(harness).expect("forwarded");
        first.open(harness).expect("dropped-no-snat-port");
        second.answer(harness, SYN_ACK).expect("replied");
        second.establish(harness);
    });
}

#[test]
fn a_port_taken_in_one_table_is_taken_in_the_other() {
    everywhere(|harness, terms| {
        harness.set_up(&setup(Spot::Near, 1).pool([5000]));
        Dialogue::new(terms, VIP).with_port(1).open(harness).expect("forwarded");
        Dialogue::new(terms, VIP).with_port(2).open(harness).expect("dropped-no-snat-port");
        harness.set_up(&setup(Spot::Near, 0).pool([5000]));
        Dialogue::new(terms, VIP).with_port(1).open(harness).expect("forwarded");
        harness.change_config(|config| config.unassured_limit = [100; 2]);
        Dialogue::new(terms, VIP).with_port(2).open(harness).expect("dropped-no-snat-port");
    });
}

/// The oldest go first, by the kernel's choice; those in the main table are not touched.
#[test]
fn a_flood_evicts_pending_flows_only() {
    everywhere(|harness, terms| {
        harness.set_up(&setup(Spot::Near, 1).pool(1000..9000));
        let established = Dialogue::new(terms, VIP).with_port(1);
        established.establish(harness);
        for port in 1000..3000 {
            Dialogue::new(terms, VIP).with_port(port).open(harness).expect("forwarded");
        }
        let (main, pending): (Vec<_>, Vec<_>) =
            harness.flows(terms.family).into_iter().partition(|entry| entry.place == Place::Main);
        let unassured = if terms.tcp { 1 } else { 2 };
        assert_eq!(main.len(), 2 + 2 * unassured, "the established flow, and the one that may be unassured");
        assert!(pending.len() <= SIZES.pending as usize, "{} pending entries of 4,000", pending.len());
        established.send(harness, ACK).expect("forwarded");
        established.answer(harness, ACK).expect("replied");
        let last = Dialogue::new(terms, VIP).with_port(2999);
        last.answer(harness, SYN_ACK).expect("replied");
        last.send(harness, ACK).expect("forwarded");
        assert_eq!(last.entries(harness).0.place, Place::Main);
    });
}

/// One-way protocols (statsd, syslog) never confirm a flow: their sources must not make a node treat TCP clients as a flood.
#[test]
fn tcp_and_udp_are_counted_apart() {
    everywhere(|harness, terms| {
        harness.set_up(&setup(Spot::Near, 2));
        let share = if terms.tcp { 2 } else { 4 };
        for port in 1..=10 {
            Dialogue::new(terms, VIP).with_port(port).open(harness).expect("forwarded");
        }
        let place = |harness: &Harness, dialogue: Dialogue| dialogue.entries(harness).0.place;
        let of_port = |port| Dialogue::new(terms, VIP).with_port(port);
        assert_eq!(place(harness, of_port(share)), Place::Main);
        assert_eq!(place(harness, of_port(share + 1)), Place::Pending);
        let other = Dialogue::new(Terms { tcp: !terms.tcp, ..terms }, VIP).with_port(1000);
        other.open(harness).expect("forwarded");
        let mains = harness.flows(terms.family).iter().filter(|entry| entry.place == Place::Main).count();
        assert_eq!(mains, 2 * usize::from(share + 1), "the other protocol has its own share");
    });
}
