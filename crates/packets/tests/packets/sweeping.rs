//! The sweep: expired flows are removed, in two passes; others stay.

use std::net::SocketAddr;

use traffic_policy_cluster::model::Protocol;
use traffic_policy_dataplane::{MapSizes, Removal, RemovedEndpoint, Sweeper, endpoint_key, enter_milestones};
use traffic_policy_ebpf::abi::kind;
use traffic_policy_ebpf::tcp::{MARKED, REMOVED, Timeouts};
use traffic_policy_testing::harness::{self, FlowEntry, Frontend, Harness, Hook, SIZES, Setup, Spot};
use traffic_policy_testing::packet::flag;

use crate::dialogue::{Dialogue, everywhere, everywhere_tcp, everywhere_udp};
use crate::table::{ENDPOINT_PORT, PORT, Terms};

const VIP: (Spot, u16) = (Spot::Vip, PORT);
const ACK: u8 = flag::ACK;
const FIN_ACK: u8 = flag::FIN | flag::ACK;
const SYN_ACK: u8 = flag::SYN | flag::ACK;

/// Time-outs in jiffies, far enough apart that a slow machine does not confuse them.
pub(crate) const TIMEOUTS: Timeouts = Timeouts {
    established: 1_000_000,
    half_closed: 500_000,
    finished: 60_000,
    reset: 20_000,
    unassured: 300_000,
    udp: 40_000,
    udp_answered: 90_000,
};
/// The margin in jiffies around a time-out within which nothing is tested.
pub(crate) const SLACK: u32 = 5000;

pub(crate) fn sweeper() -> Sweeper {
    Sweeper::new(TIMEOUTS, [SIZES.flows4, SIZES.flows6])
}

fn set_up(harness: &mut Harness, endpoint: Spot) {
    let frontend = Frontend::new(VIP.0, VIP.1).endpoints(&[(endpoint, ENDPOINT_PORT)]);
    harness.set_up(&Setup::of(frontend).snat_ports(5000..6000));
}

/// Makes the flow appear idle for this time.
pub(crate) fn idle(harness: &mut Harness, (request, reply): (FlowEntry, FlowEntry), jiffies: u32) {
    let last = harness.now().wrapping_sub(jiffies);
    harness.change(&request, |entry| entry.last = last);
    harness.change(&reply, |entry| entry.last = last);
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
        (|dialogue, harness| drop(dialogue.open(harness)), TIMEOUTS.unassured),
        (
            |dialogue, harness| {
                dialogue.open(harness);
                dialogue.answer(harness, SYN_ACK);
            },
            TIMEOUTS.unassured,
        ),
        (|dialogue, harness| dialogue.establish(harness), TIMEOUTS.established),
        (
            |dialogue, harness| {
                dialogue.establish(harness);
                dialogue.send(harness, FIN_ACK);
            },
            TIMEOUTS.half_closed,
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
                idle(harness, dialogue.entries(harness), timeout - SLACK);
                for _ in 0..3 {
                    let found = harness.sweep(&mut sweeper, false)[terms.family as usize];
                    assert_eq!((found.entries, found.deleted), (2, 0));
                }
                assert_eq!(dialogue.entries(harness).0.state & MARKED, 0);
                idle(harness, dialogue.entries(harness), timeout + SLACK);
                let found = harness.sweep(&mut sweeper, false)[terms.family as usize];
                assert_eq!((found.entries, found.deleted), (2, 0), "two passes");
                assert_eq!(dialogue.entries(harness).0.state & MARKED, MARKED);
                let found = harness.sweep(&mut sweeper, false)[terms.family as usize];
                assert_eq!(found.deleted, 1);
                assert_eq!(harness.flows(terms.family), [], "both entries");
                assert_eq!(harness.unassured(terms.family, terms.tcp), 0);
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
            idle(harness, dialogue.entries(harness), TIMEOUTS.established * 2);
            harness.sweep(&mut sweeper, false);
            packet(dialogue, harness);
            let found = harness.sweep(&mut sweeper, false)[terms.family as usize];
            assert_eq!((found.entries, found.deleted), (2, 0));
            dialogue.send(harness, ACK).expect("forwarded");
            assert_eq!(dialogue.entries(harness).0.state & MARKED, 0, "a packet takes the mark off");
            harness.without_jumps(|harness| dialogue.send(harness, ACK).expect("forwarded").clone());
        }
    });
}

/// No entry refers to the old reply entry after a restart. (For TCP none remains.)
#[test]
fn a_reply_entry_that_nobody_names_goes() {
    everywhere_udp(|harness, terms| {
        set_up(harness, Spot::Near);
        let (dialogue, mut sweeper) = (Dialogue::new(terms, VIP), sweeper());
        dialogue.establish(harness);
        let (request, old) = dialogue.entries(harness);
        harness.change(&request, |entry| entry.state |= REMOVED);
        dialogue.open(harness).expect("forwarded");
        assert_eq!(harness.flows(terms.family).len(), 3);
        let last = harness.now().wrapping_sub(TIMEOUTS.unassured + SLACK);
        harness.change(&old, |entry| {
            entry.last = last;
            entry.state |= REMOVED;
        });
        harness.sweep(&mut sweeper, false);
        assert_eq!(harness.flows(terms.family).len(), 3);
        harness.sweep(&mut sweeper, false);
        assert_eq!(harness.flows(terms.family).len(), 2);
        dialogue.establish(harness);
    });
}

/// The record of an endpoint that left the Service port with this index.
fn removed_from(terms: Terms, service: u32, endpoint: SocketAddr) -> RemovedEndpoint {
    let protocol = if terms.tcp { Protocol::Tcp } else { Protocol::Udp };
    RemovedEndpoint { service, endpoint, protocol }
}

#[test]
fn removed_endpoints_are_marked_and_no_others() {
    everywhere(|harness, terms| {
        let endpoints = [(Spot::Near, ENDPOINT_PORT), (Spot::OtherNear, ENDPOINT_PORT)];
        harness.set_up(&Setup::of(Frontend::new(VIP.0, VIP.1).endpoints(&endpoints)).snat_ports(5000..6000));
        let dialogues: Vec<_> = (1..=20).map(|port| Dialogue::new(terms, VIP).with_port(port)).collect();
        dialogues.iter().for_each(|dialogue| dialogue.establish(harness));
        let (address, port) = terms.at(endpoints[0]);
        let removed = SocketAddr::new(address, port);
        let mut sweeper = sweeper();
        let service = dialogues[0].entries(harness).0.service;
        let same = removed_from(terms, service, removed);
        let protocol = if terms.tcp { Protocol::Udp } else { Protocol::Tcp };
        for (what, other) in [
            ("the other protocol", RemovedEndpoint { protocol, ..same }),
            ("another Service's", RemovedEndpoint { service: service + 1, ..same }),
        ] {
            harness.tables.removed.insert(endpoint_key(&other), 1, 0).unwrap();
            harness.sweep(&mut sweeper, true);
            assert!(
                dialogues.iter().all(|dialogue| dialogue.entries(harness).0.state & REMOVED == 0),
                "{what}"
            );
        }
        harness.tables.removed.insert(endpoint_key(&same), 1, 0).unwrap();
        harness.sweep(&mut sweeper, false);
        assert!(
            dialogues.iter().all(|dialogue| dialogue.entries(harness).0.state & REMOVED == 0),
            "not asked to"
        );
        harness.sweep(&mut sweeper, true);
        let marked =
            dialogues.iter().filter(|dialogue| dialogue.entries(harness).0.new_to == removed).count();
        assert!((1..20).contains(&marked), "{marked} of 20 flows to one of two endpoints");
        for dialogue in dialogues {
            let (request, _) = dialogue.entries(harness);
            assert_eq!(request.state & REMOVED != 0, request.new_to == removed);
        }
    });
}

/// Direct flows alone are to choose anew, once the endpoint's node opens no packets any more.
#[test]
fn direct_flows_alone_leave_a_node_that_opens_no_more() {
    harness::with(|harness| {
        for terms in Terms::all().filter(|terms| terms.hook == Hook::Ingress && !terms.tcp) {
            for direct in [false, true] {
                let frontend = Frontend::new(VIP.0, VIP.1).endpoints(&[(Spot::Near, ENDPOINT_PORT)]);
                harness.set_up(&Setup::of(if direct { frontend.direct() } else { frontend }));
                let outcome = if direct { "forwarded-direct" } else { "forwarded" };
                harness.run(terms.hook, &terms.request(VIP)).expect(outcome);
                let state = |harness: &mut Harness| {
                    let flows = harness.flows(terms.family).into_iter();
                    flows.filter(|flow| flow.kind != kind::REPLY).map(|flow| flow.state).collect::<Vec<_>>()
                };
                let before = state(harness);
                let (address, port) = terms.at((Spot::Near, ENDPOINT_PORT));
                let gone = endpoint_key(&removed_from(terms, 1, SocketAddr::new(address, port)));
                harness.tables.removed.insert(gone, Removal::Opening.value(), 0).unwrap();
                harness.sweep(&mut sweeper(), true);
                let marked = if direct { REMOVED } else { 0 };
                assert_eq!(state(harness), before.iter().map(|state| state | marked).collect::<Vec<_>>());
                harness.put(1, &Frontend::new(VIP.0, VIP.1).endpoints(&[(Spot::Near, ENDPOINT_PORT)]));
                harness.run(terms.hook, &terms.request(VIP)).expect("forwarded");
            }
        }
    });
}

/// A client that never waits for answers, as with statsd, keeps its flow alive for ever.
#[test]
fn flows_that_are_not_assured_leave_a_removed_endpoint() {
    everywhere(|harness, terms| {
        for endpoint in [Spot::Near, Spot::Local] {
            set_up(harness, endpoint);
            let (dialogue, mut sweeper) = (Dialogue::new(terms, VIP), sweeper());
            dialogue.open(harness);
            let FlowEntry { service, new_to: removed, .. } = dialogue.entries(harness).0;
            harness.put(1, &Frontend::new(VIP.0, VIP.1).endpoints(&[(Spot::OtherNear, ENDPOINT_PORT)]));
            harness.sweep(&mut sweeper, true);
            dialogue.open(harness);
            assert_eq!(dialogue.entries(harness).0.new_to, removed, "not named yet");
            harness
                .tables
                .removed
                .insert(endpoint_key(&removed_from(terms, service, removed)), 1, 0)
                .unwrap();
            harness.sweep(&mut sweeper, true);
            dialogue.open(harness).expect("forwarded");
            assert_ne!(dialogue.entries(harness).0.new_to, removed);
            dialogue.establish(harness);
        }
    });
}

/// All flows, as pairs with the request entry first.
fn pairs(harness: &Harness, terms: Terms) -> Vec<(FlowEntry, FlowEntry)> {
    let flows = harness.flows(terms.family);
    let reply = |request: &FlowEntry| {
        let mut replies =
            flows.iter().filter(|entry| (entry.from, entry.to) == (request.new_to, request.new_from));
        *replies.next().unwrap()
    };
    flows.iter().filter(|entry| entry.is_request()).map(|request| (*request, reply(request))).collect()
}

/// Makes a flow for each of these ports, brings it into a state, and makes it appear idle for this
/// time.
fn flows(harness: &mut Harness, terms: Terms, ports: std::ops::Range<u16>, reach: Reach, jiffies: u32) {
    for port in ports.clone() {
        reach(Dialogue::new(terms, VIP).with_port(port), harness);
    }
    for entries in pairs(harness, terms) {
        if ports.contains(&entries.0.from.port()) {
            idle(harness, entries, jiffies);
        }
    }
}

/// The client ports of the flows in the table.
fn ports(harness: &Harness, terms: Terms) -> Vec<u16> {
    pairs(harness, terms).iter().map(|(request, _)| request.from.port()).collect()
}

fn closed(dialogue: Dialogue, harness: &Harness) {
    dialogue.establish(harness);
    dialogue.send(harness, FIN_ACK);
    dialogue.answer(harness, FIN_ACK);
}

fn half_closed(dialogue: Dialogue, harness: &Harness) {
    dialogue.establish(harness);
    dialogue.answer(harness, FIN_ACK);
}

fn established(dialogue: Dialogue, harness: &Harness) {
    dialogue.establish(harness);
}

fn opened(dialogue: Dialogue, harness: &Harness) {
    dialogue.open(harness);
}

/// The number of flows to be removed until 70 % of the table of 256 are used. If opening them takes
/// more than five seconds, a later flow may have taken the port of a closed one: there are then
/// fewer than were opened.
fn too_many(harness: &Harness, terms: Terms) -> u32 {
    let left = SIZES.flows4 * 70 / 100;
    (harness.flows(terms.family).len() as u32 - left).div_ceil(2)
}

/// The numbers of entries that four sweeps remove.
fn sweeps(harness: &mut Harness, terms: Terms) -> [u32; 4] {
    let mut sweeper = sweeper();
    [(); 4].map(|()| harness.sweep(&mut sweeper, false)[terms.family as usize].deleted)
}

/// Above three quarters of the table, the flows that were idle for longest are removed before their
/// time-out, and no more than the excess.
#[test]
fn a_nearly_full_table_lets_the_longest_idle_go() {
    everywhere(|harness, terms| {
        set_up(harness, Spot::Near);
        let over = if terms.tcp { closed } else { established };
        flows(harness, terms, 1..31, over, 30_000);
        flows(harness, terms, 31..121, over, 300);
        // A later flow may have taken the port of one that is over.
        let old = ports(harness, terms).iter().filter(|port| **port <= 30).count() as u32;
        assert!(old > 20, "{old}");
        assert_eq!(sweeps(harness, terms), [0, 0, old, 0], "noticed, marked, deleted, enough");
        assert!(ports(harness, terms).iter().all(|port| *port > 30));
    });
}

/// The limit holds however many flows have the same idle time.
#[test]
fn a_nearly_full_table_lets_no_more_go_than_it_must() {
    everywhere(|harness, terms| {
        set_up(harness, Spot::Near);
        let over = if terms.tcp { closed } else { established };
        flows(harness, terms, 1..121, over, 300);
        let expected = too_many(harness, terms);
        assert_eq!(sweeps(harness, terms), [0, 0, expected, 0]);
    });
}

/// An established TCP connection is never removed for another flow, however long it has been idle.
#[test]
fn a_nearly_full_table_keeps_established_connections() {
    everywhere_tcp(|harness, terms| {
        let idle = TIMEOUTS.half_closed - SLACK;
        for (reach, fresh) in [(closed as Reach, 200), (opened, 200), (half_closed, 200)] {
            set_up(harness, Spot::Near);
            flows(harness, terms, 1..41, established, idle);
            flows(harness, terms, 41..121, reach, fresh);
            let expected = too_many(harness, terms);
            assert_eq!(sweeps(harness, terms), [0, 0, expected, 0]);
            let kept = ports(harness, terms);
            assert!((1..41).all(|port| kept.contains(&port)), "{kept:?}");
        }
        set_up(harness, Spot::Near);
        flows(harness, terms, 1..129, established, idle);
        assert_eq!(sweeps(harness, terms), [0; 4]);
        let dialogue = Dialogue::new(terms, VIP);
        dialogue.with_port(1).send(harness, ACK).expect("forwarded");
        dialogue.with_port(1).answer(harness, ACK).expect("replied");
    });
}

/// Expired flows are removed first, then those that may be over, and then half-closed ones.
#[test]
fn a_nearly_full_table_goes_by_classes() {
    everywhere_tcp(|harness, terms| {
        set_up(harness, Spot::Near);
        flows(harness, terms, 1..11, closed, 100);
        flows(harness, terms, 11..21, opened, 1_000);
        flows(harness, terms, 21..91, half_closed, 2_000);
        flows(harness, terms, 91..121, established, 100_000);
        let expected = too_many(harness, terms);
        assert_eq!(sweeps(harness, terms), [0, 0, expected, 0]);
        let kept = ports(harness, terms);
        assert!(kept.iter().all(|port| *port > 20), "{kept:?}");
        assert!((91..121).all(|port| kept.contains(&port)), "{kept:?}");
    });
}

/// Datagrams to a Service that answers, from any number of sources.
#[test]
fn answered_datagrams_take_no_connection_its_place() {
    everywhere_tcp(|harness, terms| {
        let udp = Terms { tcp: false, ..terms };
        set_up(harness, Spot::Near);
        flows(harness, terms, 1..21, half_closed, 50_000);
        flows(harness, terms, 21..41, established, 50_000);
        flows(harness, udp, 41..121, established, 200);
        let expected = too_many(harness, terms);
        assert_eq!(sweeps(harness, terms), [0, 0, expected, 0]);
        let kept = ports(harness, terms);
        assert!((1..41).all(|port| kept.contains(&port)), "{kept:?}");
    });
}

/// The kernel passes empty buckets without a pause: where there is no entry, no piece ends.
#[test]
fn a_nearly_empty_table_is_swept_in_pieces() {
    const ENTRIES: u32 = 1 << 16;
    const MILESTONES: usize = 16;
    harness::with_sizes(MapSizes { flows4: ENTRIES, flows6: ENTRIES, ..SIZES }, |harness| {
        set_up(harness, Spot::Near);
        enter_milestones(&mut harness.tables).unwrap();
        let mut sweeper = Sweeper::new(TIMEOUTS, [ENTRIES; 2]);
        let (pieces, _) = harness.sweep_in_pieces(&mut sweeper, false);
        assert!(pieces > 2 * MILESTONES, "{pieces} pieces");
        for terms in Terms::all().filter(|terms| terms.tcp && terms.xdp()) {
            Dialogue::new(terms, VIP).open(harness);
            let found = harness.sweep(&mut sweeper, false);
            assert_eq!(found[terms.family as usize].entries, 2, "no milestone is a flow");
        }
    });
}
