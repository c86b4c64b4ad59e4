//! Without an agent no sweep runs: expired flows make room for new ones all the same.

use traffic_policy_agent::dataplane::Sweeper;
use traffic_policy_ebpf::{abi::Sweep, tcp::Timeouts};
use traffic_policy_testing::harness::{Frontend, Harness, Place, Setup, Spot};
use traffic_policy_testing::packet::flag;

use crate::dialogue::{Dialogue, everywhere};
use crate::table::{ENDPOINT_PORT, PORT, Terms};

const VIP: (Spot, u16) = (Spot::Vip, PORT);
const ACK: u8 = flag::ACK;

/// Jiffies, far more than a test takes.
const TIMEOUTS: Timeouts = Timeouts {
    established: 80_000_000,
    half_closed: 500_000,
    finished: 1_000_000,
    reset: 1_000_000,
    unassured: 1_000_000,
    udp: 1_000_000,
    udp_answered: 1_000_000,
};

/// As an agent leaves the maps that has been killed.
fn set_up(harness: &mut Harness, endpoint: Spot) {
    harness.set_up(
        &Setup::of(Frontend::new(VIP.0, VIP.1).endpoints(&[(endpoint, ENDPOINT_PORT)])).pool(5000..6000),
    );
    harness.sweep(&mut Sweeper::new(TIMEOUTS, [256; 2]), false);
}

fn of_port(terms: Terms, port: u16) -> Dialogue {
    Dialogue::new(terms, VIP).with_port(port)
}

/// A connection from SYN to the last FIN, or a question with its answer, that ended long ago.
fn past(harness: &mut Harness, dialogue: Dialogue) -> Place {
    dialogue.establish(harness);
    if dialogue.terms.tcp {
        dialogue.close(harness);
    }
    let last = harness.now().wrapping_sub(TIMEOUTS.finished + 1000);
    let (request, reply) = dialogue.entries(harness);
    for entry in [request, reply] {
        harness.change(&entry, |entry| entry.last = last);
    }
    request.place
}

/// Ten times as many short connections as fit; one that stands, idle for hours, is never given up.
#[test]
fn short_connections_never_fill_the_table() {
    everywhere(|harness, terms| {
        for endpoint in [Spot::Near, Spot::Local] {
            set_up(harness, endpoint);
            let standing = of_port(terms, 1);
            standing.establish(harness);
            let idle = if terms.tcp { 40_000_000 } else { 500_000 };
            let last = harness.now().wrapping_sub(idle);
            let (request, reply) = standing.entries(harness);
            for entry in [request, reply] {
                harness.change(&entry, |entry| entry.last = last);
            }
            let pending =
                (2..1280).filter(|port| past(harness, of_port(terms, *port)) == Place::Pending).count();
            // One each time the table is full again after some seconds.
            assert!(pending < 32, "{pending} connections found no room in the main table, {terms:?}");
            assert_eq!(standing.entries(harness).0.last, last, "{terms:?}");
            let outcome = standing.send(harness, ACK).outcome;
            assert!(matches!(outcome, "forwarded" | "delivered"), "{outcome}");
        }
    });
}

/// A flood has filled the share of unassured flows, and no sweep runs.
#[test]
fn a_flood_is_forgotten() {
    everywhere(|harness, terms| {
        let frontend = Frontend::new(VIP.0, VIP.1).endpoints(&[(Spot::Near, ENDPOINT_PORT)]);
        harness.set_up(&Setup::of(frontend).pool(5000..6000).unassured_limit(16));
        harness.sweep(&mut Sweeper::new(TIMEOUTS, [256; 2]), false);
        // UDP has twice the share.
        for port in 1..=32 {
            of_port(terms, port).open(harness).expect("forwarded");
        }
        let mains: Vec<_> =
            harness.flows(terms.family).into_iter().filter(|entry| entry.place == Place::Main).collect();
        let last = harness.now().wrapping_sub(TIMEOUTS.unassured + 1000);
        for entry in mains {
            harness.change(&entry, |entry| entry.last = last);
        }
        // The directory has 256 places, of which each new flow looks at some.
        for port in 100..140 {
            of_port(terms, port).open(harness).expect("forwarded");
        }
        let in_main = |port| {
            of_port(terms, port).request_entry(harness).is_some_and(|entry| entry.place == Place::Main)
        };
        assert_eq!((1..=32).filter(|port| in_main(*port)).count(), 0, "{terms:?}");
        // The first ones come before all of the former have been found.
        let there = (100..140).filter(|port| in_main(*port)).count();
        assert!(there >= if terms.tcp { 8 } else { 16 }, "{there} in the main table, {terms:?}");
    });
}

/// Before any agent has ordered a sweep no time-out is known, and nothing is removed.
#[test]
fn without_time_outs_nothing_is_removed() {
    everywhere(|harness, terms| {
        set_up(harness, Spot::Near);
        harness.tables.sweep.set(0, Sweep::default(), 0).unwrap();
        (1..=128).for_each(|port| {
            past(harness, of_port(terms, port));
        });
        for port in 200..240 {
            of_port(terms, port).open(harness).expect("forwarded");
        }
        let mains = harness.flows(terms.family).iter().filter(|entry| entry.place == Place::Main).count();
        assert_eq!(mains, 256);
    });
}

/// The flows that are removed are those of another endpoint than the one that the new flow goes to: the memory in which they are
/// looked up is also the new flow's.
#[test]
fn room_is_made_by_flows_of_another_endpoint() {
    everywhere(|harness, terms| {
        let near = Frontend::new(VIP.0, VIP.1).endpoints(&[(Spot::Near, ENDPOINT_PORT)]);
        let local = Frontend::new(Spot::Node, PORT).endpoints(&[(Spot::Local, ENDPOINT_PORT)]);
        harness.set_up(&Setup::of(near).and(local).pool(5000..6000));
        harness.sweep(&mut Sweeper::new(TIMEOUTS, [256; 2]), false);
        for port in 1..=128 {
            past(harness, of_port(terms, port));
        }
        let of_local = |port| Dialogue::new(terms, (Spot::Node, PORT)).with_port(port);
        for port in 200..240 {
            of_local(port).establish(harness);
        }
        let found_room = (200..240).filter(|port| of_local(*port).entries(harness).0.place == Place::Main);
        assert!(found_room.count() >= 32, "{terms:?}");
    });
}
