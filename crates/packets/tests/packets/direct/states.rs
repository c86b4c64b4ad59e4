//! States of direct flows, of which the node in front sees the requests alone: how long they last,
//! and what a forged packet does to them.

use traffic_policy_ebpf::tcp;
use traffic_policy_testing::harness::{self, Frontend, Harness, Hook, Setup, Spot};
use traffic_policy_testing::packet::flag;

use super::{NEAR, VIP, terms};
use crate::sweeping::{SLACK, TIMEOUTS, sweeper};

/// The states that the client's packets alone show, each with its time.
#[test]
fn a_flow_lasts_as_its_requests_show() {
    harness::with(|harness| {
        for terms in terms(Hook::Ingress) {
            let tcp: &[(&[u8], u32)] = &[
                (&[], TIMEOUTS.unassured),
                (&[flag::ACK], TIMEOUTS.established),
                (&[flag::ACK, flag::FIN | flag::ACK], TIMEOUTS.finished),
                (&[flag::ACK, flag::RST], TIMEOUTS.reset),
            ];
            let udp: &[(&[u8], u32)] = &[(&[], TIMEOUTS.udp)];
            for (flags, timeout) in if terms.tcp { tcp } else { udp } {
                harness.set_up(&Setup::of(Frontend::new(VIP.0, VIP.1).endpoints(&[NEAR]).direct()));
                harness.run(terms.hook, &terms.request(VIP)).expect("forwarded-direct");
                for flags in *flags {
                    let next = terms.request(VIP).with(|packet| packet.tcp_mut().flags = *flags);
                    harness.run(terms.hook, &next).expect("forwarded-direct");
                }
                let mut sweeper = sweeper();
                for (idle, deleted) in [(timeout - SLACK, 0), (timeout + SLACK, 1)] {
                    let last = harness.now().wrapping_sub(idle);
                    let [flow] = harness.flows(terms.family)[..] else { panic!("one entry, {terms:?}") };
                    harness.change(&flow, |entry| entry.last = last);
                    harness.sweep(&mut sweeper, false);
                    let found = harness.sweep(&mut sweeper, false)[terms.family as usize];
                    assert_eq!(found.deleted, deleted, "{flags:x?} idle for {idle}, {terms:?}");
                }
                assert_eq!(harness.flows(terms.family), []);
            }
        }
    });
}

/// A client whose datagrams span more than two seconds has been answered, as far as this node can
/// know: its flow lasts as one that was.
#[test]
fn a_stream_of_datagrams_lasts_as_an_answered_one() {
    harness::with(|harness| {
        for terms in terms(Hook::Ingress).filter(|terms| !terms.tcp) {
            // In jiffies: less than two seconds, and more, at every HZ.
            for (span, timeout) in [(100, TIMEOUTS.udp), (3000, TIMEOUTS.udp_answered)] {
                harness.set_up(&Setup::of(Frontend::new(VIP.0, VIP.1).endpoints(&[NEAR]).direct()));
                harness.run(terms.hook, &terms.request(VIP)).expect("forwarded-direct");
                let mut sweeper = sweeper();
                for (idle, deleted) in [(timeout - SLACK, 0), (timeout + SLACK, 1)] {
                    let last = harness.now().wrapping_sub(idle);
                    let [flow] = harness.flows(terms.family)[..] else { panic!("one entry, {terms:?}") };
                    harness.change(&flow, |entry| {
                        entry.last = last;
                        entry.began = last.wrapping_sub(span);
                    });
                    harness.sweep(&mut sweeper, false);
                    let found = harness.sweep(&mut sweeper, false)[terms.family as usize];
                    assert_eq!(found.deleted, deleted, "{span} jiffies, idle for {idle}, {terms:?}");
                }
            }
        }
    });
}

/// A client that has sent its FIN may still be receiving: a SYN, which anybody can forge, moves its
/// connection to no other endpoint until the client has been silent.
#[test]
fn a_forged_syn_moves_no_half_closed_connection() {
    harness::with(|harness| {
        for terms in terms(Hook::Ingress).filter(|terms| terms.tcp) {
            let to = |endpoint| Frontend::new(VIP.0, VIP.1).endpoints(&[endpoint]).direct();
            harness.set_up(&Setup::of(to(NEAR)));
            let segment = |flags, sequence| {
                let packet = terms.request(VIP).with(|packet| packet.tcp_mut().flags = flags);
                packet.numbers(sequence, 5000)
            };
            let endpoint = |harness: &Harness| harness.flows(terms.family)[0].new_to;
            for (flags, sequence) in [(flag::SYN, 1000), (flag::ACK, 1001), (flag::FIN | flag::ACK, 1001)] {
                harness.run(terms.hook, &segment(flags, sequence)).expect("forwarded-direct");
            }
            let before = endpoint(harness);
            harness.put(0, &to((Spot::OtherNear, NEAR.1)));
            let state = |harness: &Harness| harness.flows(terms.family)[0].state;
            harness.run(terms.hook, &segment(flag::SYN, 9_000_000)).expect("forwarded-direct");
            harness.run(terms.hook, &segment(flag::ACK, 1002)).expect("forwarded-direct");
            assert_eq!((endpoint(harness), state(harness)), (before, tcp::ASSURED | tcp::FIN), "{terms:?}");
            // The client itself has opened another one, which lasts as one that is open.
            harness.run(terms.hook, &segment(flag::ACK, 9_000_001)).expect("forwarded-direct");
            assert_eq!((endpoint(harness), state(harness)), (before, tcp::ASSURED), "{terms:?}");
            harness.run(terms.hook, &segment(flag::FIN | flag::ACK, 9_000_001)).expect("forwarded-direct");
            // Three seconds, at every HZ.
            let quiet = harness.now().wrapping_sub(4000);
            let [flow] = harness.flows(terms.family)[..] else { panic!("one entry, {terms:?}") };
            harness.change(&flow, |entry| entry.last = quiet);
            harness.run(terms.hook, &segment(flag::SYN, 77_000)).expect("forwarded-direct");
            assert_ne!(endpoint(harness), before, "it is over: {terms:?}");
        }
    });
}

/// A RST that is far from the connection's numbers, as a forged one is, does not end it.
#[test]
fn a_forged_reset_ends_no_flow() {
    harness::with(|harness| {
        for terms in terms(Hook::Ingress).filter(|terms| terms.tcp) {
            harness.set_up(&Setup::of(Frontend::new(VIP.0, VIP.1).endpoints(&[NEAR]).direct()));
            let segment = |flags, sequence| {
                let packet = terms.request(VIP).with(|packet| packet.tcp_mut().flags = flags);
                packet.numbers(sequence, 5000)
            };
            for (flags, sequence) in [(flag::SYN, 1000), (flag::ACK, 1001), (flag::RST, 1_000_000)] {
                harness.run(terms.hook, &segment(flags, sequence)).expect("forwarded-direct");
            }
            let state = |harness: &Harness| harness.flows(terms.family)[0].state;
            assert_eq!(state(harness), tcp::ASSURED);
            harness.run(terms.hook, &segment(flag::RST, 1001)).expect("forwarded-direct");
            assert_eq!(state(harness), tcp::ASSURED | tcp::RST);
        }
    });
}
