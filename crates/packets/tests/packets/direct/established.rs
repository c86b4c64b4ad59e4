//! Packets of established direct flows, which need no slow path.

use traffic_policy_testing::harness::{self, Frontend, Hook, Setup, Spot};
use traffic_policy_testing::packet::{Packet, flag};

use super::{FRONT, LOCAL, NEAR, NODE, VIP, arrives, each_ingress, sent, set_up_home, terms};
use crate::table::{CLIENT_PORT, Terms};

/// A segment or datagram of the client, once the endpoint has answered.
fn next(terms: Terms, flags: u8) -> Packet {
    let next = terms.request(VIP);
    if !terms.tcp {
        return next;
    }
    next.with(|packet| packet.tcp_mut().flags = flags).numbers(1001, 5001)
}

/// The entry program alone sends an established packet, as it does those of other flows.
#[test]
fn established_packets_need_no_slow_path_in_front() {
    each_ingress(|harness, terms| {
        harness.set_up(&Setup::of(Frontend::new(VIP.0, VIP.1).endpoints(&[NEAR]).direct()));
        let request = next(terms, flag::ACK);
        harness.run(terms.hook, &terms.request(VIP)).expect("forwarded-direct");
        harness.run(terms.hook, &request).expect("forwarded-direct");
        harness.without_slow_path(|harness| {
            for _ in 0..2 {
                harness.run(terms.hook, &request).expect("forwarded-direct").expect_frame(&sent(&request));
            }
            let unlike = if terms.tcp { next(terms, flag::FIN) } else { terms.request(NODE) };
            assert_ne!(harness.run(terms.hook, &unlike).outcome, "forwarded-direct", "{terms:?}");
        });
        let [flow] = harness.flows(terms.family)[..] else { panic!("one entry, {terms:?}") };
        assert_eq!(flow.packets, 4, "{terms:?}");
    });
}

#[test]
fn established_packets_need_no_slow_path_at_home() {
    harness::with(|harness| {
        for terms in terms(Hook::Ingress) {
            set_up_home(harness, VIP);
            let request = next(terms, flag::ACK);
            let opened = arrives(&request, FRONT, LOCAL.0);
            harness.run(terms.hook, &arrives(&terms.request(VIP), FRONT, LOCAL.0)).expect("delivered");
            if terms.tcp {
                let answer = terms.answer(LOCAL, (Spot::Client, CLIENT_PORT)).ttl(63);
                harness.run(Hook::Egress, &answer).expect("replied-local");
            }
            harness.run(terms.hook, &opened).expect("delivered");
            if !terms.tcp {
                let (entry, _) = harness.flow(terms.family);
                harness.examine_late(&entry);
            }
            harness.without_slow_path(|harness| {
                let delivered = request.clone().destination(terms.at(LOCAL));
                for _ in 0..2 {
                    harness.run(terms.hook, &opened).expect("delivered").expect_frame(&delivered);
                }
            });
        }
    });
}
