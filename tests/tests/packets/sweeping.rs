//! The sweep: what is over goes, in two passes; what is not stays.

use std::net::SocketAddr;

use traffic_policy_agent::dataplane::{GoneEndpoint, Sweeper, endpoint_key};
use traffic_policy_agent::model::Protocol;
use traffic_policy_ebpf::tcp::{GONE, MARKED, Timeouts};
use traffic_policy_testing::harness::{Frontend, Half, Harness, SIZES, Setup, Spot};
use traffic_policy_testing::packet::flag;

use crate::dialogue::{Dialogue, everywhere};
use crate::table::{ENDPOINT_PORT, PORT, Terms};

const VIP: (Spot, u16) = (Spot::Vip, PORT);
const ACK: u8 = flag::ACK;
const FIN_ACK: u8 = flag::FIN | flag::ACK;
const SYN_ACK: u8 = flag::SYN | flag::ACK;

/// In jiffies, far enough apart that a slow machine confuses none with another.
const TIMEOUTS: Timeouts = Timeouts {
    established: 1_000_000,
    finished: 60_000,
    reset: 20_000,
    unconfirmed: 300_000,
    udp: 40_000,
    udp_answered: 90_000,
};
/// Jiffies around a time-out within which nothing is tested.
const SLACK: u32 = 5000;

fn sweeper() -> Sweeper {
    Sweeper::new(TIMEOUTS, [SIZES.flows4, SIZES.flows6])
}

fn set_up(harness: &mut Harness, endpoint: Spot) {
    let frontend = Frontend::new(VIP.0, VIP.1).endpoints(&[(endpoint, ENDPOINT_PORT)]);
    harness.set_up(&Setup::of(frontend).pool(5000..6000));
}

/// As if the flow had been idle for so long.
fn idle(harness: &mut Harness, (request, reply): (Half, Half), jiffies: u32) {
    let last = harness.now().wrapping_sub(jiffies);
    harness.change(&request, |half| half.last = last);
    harness.change(&reply, |half| half.last = last);
}

/// Packets that bring a flow into a state.
type Reach = fn(Dialogue, &Harness);

/// Each state with its time-out.
fn states(terms: Terms) -> Vec<(Reach, u32)> {
    if !terms.tcp {
        return vec![
            (|dialogue, harness| drop(dialogue.open(harness)), TIMEOUTS.udp),
            (|dialogue, harness| dialogue.establish(harness), TIMEOUTS.udp_answered),
        ];
    }
    vec![
        (|dialogue, harness| drop(dialogue.open(harness)), TIMEOUTS.unconfirmed),
        (
            |dialogue, harness| {
                dialogue.open(harness);
                dialogue.answer(harness, SYN_ACK);
            },
            TIMEOUTS.unconfirmed,
        ),
        (|dialogue, harness| dialogue.establish(harness), TIMEOUTS.established),
        (
            |dialogue, harness| {
                dialogue.establish(harness);
                dialogue.send(harness, FIN_ACK);
            },
            TIMEOUTS.established,
        ),
        (
            |dialogue, harness| {
                dialogue.establish(harness);
                dialogue.send(harness, FIN_ACK);
                dialogue.answer(harness, FIN_ACK);
            },
            TIMEOUTS.finished,
        ),
        (
            |dialogue, harness| {
                dialogue.establish(harness);
                dialogue.answer(harness, flag::RST);
            },
            TIMEOUTS.reset,
        ),
    ]
}

#[test]
fn each_state_has_its_time() {
    everywhere(|harness, terms| {
        let dialogue = Dialogue::new(terms, VIP);
        for endpoint in [Spot::Near, Spot::Local] {
            for (reach, timeout) in states(terms) {
                set_up(harness, endpoint);
                reach(dialogue, harness);
                let mut sweeper = sweeper();
                idle(harness, dialogue.halves(harness), timeout - SLACK);
                for _ in 0..3 {
                    let found = harness.sweep(&mut sweeper, false)[terms.family as usize];
                    assert_eq!((found.entries, found.deleted), (2, 0));
                }
                assert_eq!(dialogue.halves(harness).0.state & MARKED, 0);
                idle(harness, dialogue.halves(harness), timeout + SLACK);
                let found = harness.sweep(&mut sweeper, false)[terms.family as usize];
                assert_eq!((found.entries, found.deleted), (2, 0), "two passes");
                assert_eq!(dialogue.halves(harness).0.state & MARKED, MARKED);
                let found = harness.sweep(&mut sweeper, false)[terms.family as usize];
                assert_eq!(found.deleted, 1);
                assert_eq!(harness.flows(terms.family), [], "both halves");
                assert_eq!(harness.usage().unconfirmed, [0, 0]);
            }
        }
    });
}

#[test]
fn traffic_between_the_passes_keeps_a_flow() {
    let packets: [fn(Dialogue, &Harness); 2] = [
        |dialogue, harness| drop(dialogue.send(harness, ACK)),
        |dialogue, harness| drop(dialogue.answer(harness, ACK)),
    ];
    everywhere(|harness, terms| {
        for packet in packets {
            set_up(harness, Spot::Near);
            let (dialogue, mut sweeper) = (Dialogue::new(terms, VIP), sweeper());
            dialogue.establish(harness);
            idle(harness, dialogue.halves(harness), TIMEOUTS.established * 2);
            harness.sweep(&mut sweeper, false);
            packet(dialogue, harness);
            let found = harness.sweep(&mut sweeper, false)[terms.family as usize];
            assert_eq!((found.entries, found.deleted), (2, 0));
            dialogue.send(harness, ACK).expect("forwarded");
            assert_eq!(dialogue.halves(harness).0.state & MARKED, 0, "a packet takes the mark off");
            harness.without_jumps(|harness| dialogue.send(harness, ACK).expect("forwarded").clone());
        }
    });
}

/// After a restart nobody names the old reply half.
#[test]
fn a_reply_half_that_nobody_names_goes() {
    everywhere(|harness, terms| {
        set_up(harness, Spot::Near);
        let (dialogue, mut sweeper) = (Dialogue::new(terms, VIP), sweeper());
        dialogue.establish(harness);
        let (request, old) = dialogue.halves(harness);
        harness.change(&request, |half| half.state |= GONE);
        dialogue.open(harness).expect("forwarded");
        assert_eq!(harness.flows(terms.family).len(), 3);
        let last = harness.now().wrapping_sub(TIMEOUTS.unconfirmed + SLACK);
        harness.change(&old, |half| {
            half.last = last;
            half.state |= GONE;
        });
        harness.sweep(&mut sweeper, false);
        assert_eq!(harness.flows(terms.family).len(), 3);
        harness.sweep(&mut sweeper, false);
        assert_eq!(harness.flows(terms.family).len(), 2);
        dialogue.establish(harness);
    });
}

/// An endpoint that left the Service port with this index.
fn gone_from(terms: Terms, service: u32, endpoint: SocketAddr) -> GoneEndpoint {
    let protocol = if terms.tcp { Protocol::Tcp } else { Protocol::Udp };
    GoneEndpoint { service, endpoint, protocol }
}

#[test]
fn gone_endpoints_are_marked_and_no_others() {
    everywhere(|harness, terms| {
        let endpoints = [(Spot::Near, ENDPOINT_PORT), (Spot::OtherNear, ENDPOINT_PORT)];
        harness.set_up(&Setup::of(Frontend::new(VIP.0, VIP.1).endpoints(&endpoints)).pool(5000..6000));
        let dialogues: Vec<_> = (1..=20).map(|port| Dialogue::new(terms, VIP).with_port(port)).collect();
        dialogues.iter().for_each(|dialogue| dialogue.establish(harness));
        let (address, port) = terms.at(endpoints[0]);
        let gone = SocketAddr::new(address, port);
        let mut sweeper = sweeper();
        let service = dialogues[0].halves(harness).0.service;
        let same = gone_from(terms, service, gone);
        let protocol = if terms.tcp { Protocol::Udp } else { Protocol::Tcp };
        for (what, other) in [
            ("the other protocol", GoneEndpoint { protocol, ..same }),
            ("another Service's", GoneEndpoint { service: service + 1, ..same }),
        ] {
            harness.tables.gone.insert(endpoint_key(&other), 1, 0).unwrap();
            harness.sweep(&mut sweeper, true);
            assert!(dialogues.iter().all(|dialogue| dialogue.halves(harness).0.state & GONE == 0), "{what}");
        }
        harness.tables.gone.insert(endpoint_key(&same), 1, 0).unwrap();
        harness.sweep(&mut sweeper, false);
        assert!(
            dialogues.iter().all(|dialogue| dialogue.halves(harness).0.state & GONE == 0),
            "not asked to"
        );
        harness.sweep(&mut sweeper, true);
        let marked = dialogues.iter().filter(|dialogue| dialogue.halves(harness).0.new_to == gone).count();
        assert!((1..20).contains(&marked), "{marked} of 20 flows to one of two endpoints");
        for dialogue in dialogues {
            let (request, _) = dialogue.halves(harness);
            assert_eq!(request.state & GONE != 0, request.new_to == gone);
        }
    });
}

/// A client that never waits for answers, as of statsd, keeps its flow alive for ever.
#[test]
fn pending_flows_leave_a_gone_endpoint() {
    everywhere(|harness, terms| {
        for endpoint in [Spot::Near, Spot::Local] {
            set_up(harness, endpoint);
            harness.change_state(|state| state.unconfirmed_limit = [0; 2]);
            let (dialogue, mut sweeper) = (Dialogue::new(terms, VIP), sweeper());
            dialogue.open(harness);
            let Half { service, new_to: gone, .. } = dialogue.halves(harness).0;
            harness.put(1, &Frontend::new(VIP.0, VIP.1).endpoints(&[(Spot::OtherNear, ENDPOINT_PORT)]));
            harness.sweep(&mut sweeper, true);
            dialogue.open(harness);
            assert_eq!(dialogue.halves(harness).0.new_to, gone, "not named yet");
            harness.tables.gone.insert(endpoint_key(&gone_from(terms, service, gone)), 1, 0).unwrap();
            harness.sweep(&mut sweeper, true);
            dialogue.open(harness).expect("forwarded");
            assert_ne!(dialogue.halves(harness).0.new_to, gone);
            dialogue.establish(harness);
        }
    });
}

/// Above 80 % of the table those go that were idle for longest, whatever their time.
#[test]
fn a_nearly_full_table_lets_the_longest_idle_go() {
    everywhere(|harness, terms| {
        set_up(harness, Spot::Near);
        let dialogues: Vec<_> = (1..=120).map(|port| Dialogue::new(terms, VIP).with_port(port)).collect();
        let mut halves: Vec<(Half, Half)> = Vec::new();
        for dialogue in &dialogues {
            dialogue.establish(harness);
        }
        let flows = harness.flows(terms.family);
        for request in flows.iter().filter(|half| half.is_request()) {
            let mut replies =
                flows.iter().filter(|half| (half.from, half.to) == (request.new_to, request.new_from));
            halves.push((*request, *replies.next().unwrap()));
        }
        for (number, halves) in halves.iter().enumerate() {
            // A quarter has been idle for much longer.
            idle(harness, *halves, if number % 4 == 0 { 30_000 } else { 300 });
        }
        let mut sweeper = sweeper();
        let deleted: Vec<_> =
            (0..4).map(|_| harness.sweep(&mut sweeper, false)[terms.family as usize].deleted).collect();
        assert_eq!(deleted, [0, 0, 30, 0], "noticed, marked, deleted, enough");
        let kept = harness.flows(terms.family).into_iter().filter(Half::is_request).collect::<Vec<_>>();
        let now = harness.now();
        assert!(kept.iter().all(|half| now.wrapping_sub(half.last) < 20_000));
    });
}

/// While there is no flow with SNAT, packets to pool ports are nobody's: the other family's flows count, too.
#[test]
fn the_pool_bits_are_asked_only_while_there_are_flows() {
    everywhere(|harness, terms| {
        set_up(harness, Spot::Near);
        let (dialogue, mut sweeper) = (Dialogue::new(terms, VIP), sweeper());
        let stray = terms.packet((Spot::OtherNear, 1), (Spot::Node, 5500));
        harness.run(terms.hook, &stray).expect("passed");
        dialogue.establish(harness);
        harness.run(terms.hook, &stray).expect("passed-not-service");
        for _ in 0..3 {
            harness.sweep(&mut sweeper, false);
        }
        harness.run(terms.hook, &stray).expect("passed-not-service");
        dialogue.answer(harness, ACK).expect("replied");
        idle(harness, dialogue.halves(harness), TIMEOUTS.established * 2);
        harness.sweep(&mut sweeper, false);
        harness.sweep(&mut sweeper, false);
        assert_eq!(harness.flows(terms.family), []);
        // Two more that find nothing: a flow may have been on its way behind the back of the first.
        harness.sweep(&mut sweeper, false);
        harness.run(terms.hook, &stray).expect("passed-not-service");
        harness.sweep(&mut sweeper, false);
        harness.run(terms.hook, &stray).expect("passed");
        dialogue.establish(harness);
        dialogue.answer(harness, ACK).expect("replied");
    });
}

#[test]
fn flows_to_this_node_need_no_pool_bits() {
    everywhere(|harness, terms| {
        set_up(harness, Spot::Local);
        Dialogue::new(terms, VIP).establish(harness);
        let found = harness.sweep(&mut sweeper(), false)[terms.family as usize];
        assert_eq!((found.snat, harness.usage().snat_created), (0, 0));
    });
}

#[test]
fn pending_flows_are_asked_for_only_while_there_are_some() {
    everywhere(|harness, terms| {
        set_up(harness, Spot::Near);
        harness.change_state(|state| state.unconfirmed_limit = [0; 2]);
        let (dialogue, mut sweeper) = (Dialogue::new(terms, VIP), sweeper());
        dialogue.open(harness);
        assert_eq!(harness.sweep(&mut sweeper, false)[terms.family as usize].pending, 2);
        idle(harness, dialogue.halves(harness), TIMEOUTS.unconfirmed + SLACK);
        for _ in 0..3 {
            harness.sweep(&mut sweeper, false);
        }
        assert_eq!(harness.flows(terms.family), []);
        let mut swept = 0;
        harness.change_state(|state| swept = state.pending_swept);
        assert_eq!(swept, harness.usage().pending_created);
        dialogue.establish(harness);
    });
}
