//! A table that is full of established direct flows, which anybody can make who forges two packets
//! each: the endpoint's answer is not seen, so nothing shows that a client is real.

use traffic_policy_testing::harness::HZ;

use super::*;

/// The table size of a Service.
const SLOTS: &str = "251";

fn by_table() -> Frontend {
    Frontend::new(VIP.0, VIP.1).endpoints(&[NEAR]).direct().maglev(SLOTS.parse().unwrap())
}

fn at_random() -> Frontend {
    Frontend::new(VIP.0, VIP.1).endpoints(&[NEAR]).direct()
}

fn of_port(terms: Terms, port: u16, flags: u8) -> Packet {
    let packet = terms.packet((Spot::Client, port), VIP).macs(Spot::Router.mac(), Device::Eth0.mac());
    packet.with(|packet| packet.tcp_mut().flags = flags)
}

/// Fills the table with flows of two packets each that have been idle for some seconds, and returns
/// their number.
fn fill(harness: &mut Harness, terms: Terms, frontend: Frontend, idle: u32) -> u16 {
    harness.set_up(&Setup::of(frontend));
    harness.sweep(&mut sweeper(), false);
    let room = if terms.v4() { harness::SIZES.flows4 } else { harness::SIZES.flows6 };
    let room = u16::try_from(room).unwrap();
    for port in 1..=room {
        for flags in [flag::SYN, flag::ACK] {
            harness.run(terms.hook, &of_port(terms, port, flags)).expect("forwarded-direct");
        }
    }
    let flows = harness.flows(terms.family);
    assert!(flows.iter().all(|flow| flow.state == tcp::ASSURED));
    let last = harness.now().wrapping_sub(idle * HZ);
    for flow in flows {
        harness.change(&flow, |entry| entry.last = last);
    }
    harness.run(terms.hook, &of_port(terms, 20_000, flag::SYN)).expect("dropped-table-full");
    room
}

/// Returns how many of 64 new connections are served.
fn served(harness: &Harness, terms: Terms) -> usize {
    let opens =
        |port: &u16| harness.run(terms.hook, &of_port(terms, *port, flag::SYN)).outcome == "forwarded-direct";
    (20_001..20_065).filter(opens).count()
}

/// An entry is a copy of what the table says, so a flow gives way as soon as it pauses, and goes on
/// with its next segment.
#[test]
fn flows_by_the_table_make_room_at_once_and_go_on() {
    each_ingress(|harness, terms| {
        if !terms.tcp {
            return;
        }
        let room = fill(harness, terms, by_table(), 2);
        assert_eq!(served(harness, terms), 64, "{terms:?}");
        let kept: Vec<_> = harness.flows(terms.family).iter().map(|flow| flow.from.port()).collect();
        let gone: Vec<_> = (1..=room).filter(|port| !kept.contains(port)).collect();
        assert!(gone.len() >= 64, "{} gave way", gone.len());
        for port in gone.into_iter().take(8) {
            harness.run(terms.hook, &of_port(terms, port, flag::ACK)).expect("forwarded-direct");
        }
    });
}

/// A flow in use is not given up for another one.
#[test]
fn flows_by_the_table_in_use_stay() {
    each_ingress(|harness, terms| {
        if terms.tcp {
            fill(harness, terms, by_table(), 0);
            assert_eq!(served(harness, terms), 0, "{terms:?}");
        }
    });
}

/// Without a table, or with affinity, which may have chosen another endpoint than the table would,
/// a flow that gives way is lost: that takes a minute of silence.
#[test]
fn other_flows_make_room_after_a_minute() {
    each_ingress(|harness, terms| {
        if !terms.tcp {
            return;
        }
        for frontend in [at_random, || by_table().affinity(600)] {
            fill(harness, terms, frontend(), 50);
            assert_eq!(served(harness, terms), 0, "{terms:?}");
            fill(harness, terms, frontend(), 70);
            assert_eq!(served(harness, terms), 64, "{terms:?}");
        }
    });
}
