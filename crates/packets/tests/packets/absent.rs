//! Expired flows make room for new ones even if no agent runs and no sweep happens.

use traffic_policy_dataplane::Sweeper;
use traffic_policy_ebpf::{abi::Sweep, tcp::Timeouts};
use traffic_policy_testing::harness::{Frontend, HZ, Harness, Setup, Spot};
use traffic_policy_testing::packet::flag;

use crate::dialogue::{Dialogue, everywhere, everywhere_tcp};
use crate::table::{ENDPOINT_PORT, PORT, Terms};

const VIP: (Spot, u16) = (Spot::Vip, PORT);
const ACK: u8 = flag::ACK;

/// Time-outs in jiffies, far longer than a test takes.
const TIMEOUTS: Timeouts = Timeouts {
    established: 80_000_000,
    half_closed: 500_000,
    finished: 1_000_000,
    reset: 1_000_000,
    unassured: 1_000_000,
    udp: 1_000_000,
    udp_answered: 1_000_000,
};

/// Leaves the maps in the state in which a killed agent leaves them.
fn set_up(harness: &mut Harness, endpoint: Spot) {
    harness.set_up(
        &Setup::of(Frontend::new(VIP.0, VIP.1).endpoints(&[(endpoint, ENDPOINT_PORT)]))
            .snat_ports(5000..6000),
    );
    harness.sweep(&mut Sweeper::new(TIMEOUTS, [256; 2]), false);
}

fn of_port(terms: Terms, port: u16) -> Dialogue {
    Dialogue::new(terms, VIP).with_port(port)
}

/// Runs a connection from SYN to the last FIN, or datagrams, that ended long ago. Returns whether
/// the table had room for it.
fn past(harness: &mut Harness, dialogue: Dialogue) -> bool {
    if dialogue.open(harness).outcome == "dropped-table-full" {
        return false;
    }
    dialogue.establish(harness);
    if dialogue.terms.tcp {
        dialogue.close(harness);
    }
    let last = harness.now().wrapping_sub(TIMEOUTS.finished + 1000);
    let (request, reply) = dialogue.entries(harness);
    for entry in [request, reply] {
        harness.change(&entry, |entry| entry.last = last);
    }
    true
}

/// Ten times as many short connections as the table holds; an established one that has been idle
/// for hours is never evicted.
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
            let refused = (2..1280).filter(|port| !past(harness, of_port(terms, *port))).count();
            // One refusal each time the table is full again after some seconds.
            assert!(refused < 32, "{refused} connections found no room, {terms:?}");
            assert_eq!(standing.entries(harness).0.last, last, "{terms:?}");
            let outcome = standing.send(harness, ACK).outcome;
            assert!(matches!(outcome, "forwarded" | "delivered"), "{outcome}");
        }
    });
}

/// Connections that both sides have closed, long before their time-out, like `tcp_can_early_drop`
/// of conntrack.
#[test]
fn connections_that_have_ended_make_room_after_five_seconds() {
    everywhere_tcp(|harness, terms| {
        for (idle, room) in [(2, false), (6, true)] {
            set_up(harness, Spot::Near);
            for port in 1..=128 {
                let dialogue = of_port(terms, port);
                dialogue.establish(harness);
                dialogue.close(harness);
            }
            // All at once, however long that took.
            let last = harness.now().wrapping_sub(idle * HZ);
            for entry in harness.flows(terms.family) {
                harness.change(&entry, |entry| entry.last = last);
            }
            let opened = (200..240).filter(|port| of_port(terms, *port).open(harness).outcome == "forwarded");
            let opened = opened.count();
            assert!(
                if room { opened >= 32 } else { opened == 0 },
                "{opened} of 40 after {idle} s, {terms:?}"
            );
        }
    });
}

/// No time-out is known before an agent has ordered a sweep, so nothing is removed.
#[test]
fn without_time_outs_nothing_is_removed() {
    everywhere(|harness, terms| {
        set_up(harness, Spot::Near);
        harness.tables.sweep.set(0, Sweep::default(), 0).unwrap();
        (1..=128).for_each(|port| {
            past(harness, of_port(terms, port));
        });
        for port in 200..240 {
            of_port(terms, port).open(harness).expect("dropped-table-full");
        }
        assert_eq!(harness.flows(terms.family).len(), 256);
    });
}

/// The removed flows belong to another endpoint than the new flow: their look-up uses the memory
/// that also holds the new flow.
#[test]
fn room_is_made_by_flows_of_another_endpoint() {
    everywhere(|harness, terms| {
        let near = Frontend::new(VIP.0, VIP.1).endpoints(&[(Spot::Near, ENDPOINT_PORT)]);
        let local = Frontend::new(Spot::Node, PORT).endpoints(&[(Spot::Local, ENDPOINT_PORT)]);
        harness.set_up(&Setup::of(near).and(local).snat_ports(5000..6000));
        harness.sweep(&mut Sweeper::new(TIMEOUTS, [256; 2]), false);
        for port in 1..=128 {
            past(harness, of_port(terms, port));
        }
        let of_local = |port| Dialogue::new(terms, (Spot::Node, PORT)).with_port(port);
        let found_room = (200..240).filter(|port| past(harness, of_local(*port))).count();
        assert!(found_room >= 32, "{found_room} of 40, {terms:?}");
    });
}
